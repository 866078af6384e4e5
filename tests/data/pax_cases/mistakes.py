"""Experiments with one mistake each; `AT` names the method that has it."""

import jax.numpy as jnp
import numpy as np
from paxml import base_experiment, learners, tasks_lib
from praxis import base_hyperparams, base_input, base_layer, base_model, optimizers, pax_fiddle, py_utils, schedules


class Rows(base_input.BaseInput):
  """Random rows with their sums; `fails` names the method that raises."""

  fails: str = ''

  def __post_init__(self):
    super().__post_init__()
    if self.fails == 'init':
      raise OSError('no such shard')

  def get_next(self):
    if self.fails == 'get_next':
      raise OSError('no such shard')
    x = np.ones((self.batch_size, 4), np.float32)
    return [x] if self.fails == 'kind' else py_utils.NestedMap(x=x, y=x.sum(-1, keepdims=True))


class Regression(base_model.BaseModel):
  """One product; `fails` names the method that raises."""

  fails: str = ''

  def setup(self):
    self.create_variable('w', base_layer.WeightHParams(shape=[4, 1], dtype=jnp.float32))

  def compute_predictions(self, batch):
    return jnp.dot(batch.images if self.fails == 'compute_predictions' else batch.x, self.theta.w)

  def compute_loss(self, predictions, batch):
    mean = jnp.mean((predictions - batch.y) ** 2)
    return mean if self.fails == 'compute_loss' else (py_utils.NestedMap(loss=(mean, 1.0)), py_utils.NestedMap())

  def decode(self, batch):
    if self.fails == 'decode':
      return jnp.dot(batch.x, jnp.zeros((3, 1)))
    return py_utils.NestedMap(), py_utils.NestedMap(predictions=self.compute_predictions(batch))

  def process_decode_out(self, dataset, outputs):
    return None


class Stops(base_hyperparams.FiddleBaseParameterizable):
  """Reads a metric that does not exist."""

  def __call__(self, metrics, *others):
    return metrics['train/nothing'] < 0


class Right(base_experiment.BaseExperiment):
  """Has no mistake except in process_decode_out."""

  AT = ''

  def __init__(self):
    if self.AT == 'init':
      raise OSError('no such vocabulary')

  def validate(self):
    if self.AT == 'validate':
      raise OSError('no such vocabulary')

  def datasets(self):
    fields = {'train': {'is_training': True}, 'valid': {'is_training': False, 'eval_loop_num_batches': 1}}
    if self.AT == 'datasets':
      fields['train']['is_trainin'] = True
    at, _, fails = self.AT.partition('.')
    if at in fields:
      fields[at]['fails'] = fails
    configs = [pax_fiddle.Config(Rows, batch_size=4, name=name, **more) for name, more in fields.items()]
    if self.AT == 'built':
      configs[0] = configs[0].Instantiate()
    return None if self.AT == 'none' else configs

  def decode_datasets(self):
    if self.AT == 'decode_datasets':
      raise OSError('no such prompts')
    return [pax_fiddle.Config(Rows, batch_size=4, name='prompts', eval_loop_num_batches=1)]

  def task(self):
    if self.AT == 'task':
      return tasks_lib.SinglTask
    task = pax_fiddle.Config(tasks_lib.SingleTask, name='regression')
    task.model = pax_fiddle.Config(Regression, name='model', fails=self.AT)
    if self.AT == 'field':
      task.model.hidden_dims = 8
    task.model.mesh_axis_names = ['replica', 'data', 'mdl']
    task.model.ici_mesh_shape = 4 if self.AT == 'mesh' else [1, 4, 1]
    task.train.num_train_steps = 2
    task.train.learner = pax_fiddle.Config(learners.Learner, loss_name='loss')
    task.train.learner.optimizer = pax_fiddle.Config(optimizers.Adam, learning_rate=0.1)
    if self.AT != 'schedule':
      task.train.learner.optimizer.lr_schedule = pax_fiddle.Config(schedules.Constant, value=1.0)
    if self.AT == 'regex':
      task.train.learner.bprop_variable_exclusion = ['(']
    if self.AT == 'stop':
      task.early_stopping_fn = pax_fiddle.Config(Stops)
    return task


class NoTask(base_experiment.BaseExperiment):
  """Does not define task()."""

  def datasets(self):
    return []


def __getattr__(name):
  """Returns the experiment with a mistake at `name`, in which double underscores stand for dots."""
  if name.startswith('__'):
    raise AttributeError(name)
  return type(name, (Right,), {'AT': name.replace('__', '.'), '__module__': __name__, '__doc__': name})
