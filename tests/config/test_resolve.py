"""Overrides reach every field of an experiment with its type; wrong ones get the nearest paths and examples."""

import fiddle as fdl
from flax import linen as nn
import jax.numpy as jnp
import optax
import pytest
from small_experiments import Built, FeedForward, Incomplete, Input, Model, Optimizer, Reduction, Small, Task

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.tree import check_numbers
from spmd_tasks.errors import UserError, user_error_code
from spmd_tasks.experiment import Experiment
from spmd_tasks.layers import TokenEmbedding
from spmd_tasks.runtime import Task as TrainedTask
from tests import binary


def read(job, path):
  """The built value at a path."""
  node = job
  for name in path.split('.'):
    node = node[name] if hasattr(node, 'keys') else getattr(node, name)
  return node


SETTABLE = [
  ('experiment.seed', 'seed', '7', 7),
  ('experiment.ici_mesh_shape', 'ici_mesh_shape', '1,4,2', (1, 4, 2)),
  ('experiment.axis_rules', 'axis_rules', '[(mlp,mdl)]', (('mlp', 'mdl'),)),
  ('experiment.inputs_split_mapping', 'inputs_split_mapping', 'None', None),
  ('experiment.inputs_split_mapping.map_2d', 'inputs_split_mapping.map_2d', 'data,None', ('data', None)),
  ('experiment.schedule.learning_rate', 'schedule.learning_rate', '2', 2.0),
  ('task.model.num_layers', 'task.model.num_layers', '5', 5),
  ('task.model.ffn.width', 'task.model.ffn.width', '5', 5),
  ('task.model.ffn.dtype', 'task.model.ffn.dtype', 'bfloat16', jnp.bfloat16),
  ('task.model.ffn.split_dims', 'task.model.ffn.split_dims', 'None,(data,mdl)', (None, ('data', 'mdl'))),
  ('task.model.dropout', 'task.model.dropout', '0.1', 0.1),
  ('task.optimizer.learning_rate', 'task.optimizer.learning_rate', '1e-4', 1e-4),
  ('task.optimizer.betas', 'task.optimizer.betas', '0.8,0.95', (0.8, 0.95)),
  ('task.optimizer', 'task.optimizer', 'None', None),
  ('task.scales.b', 'task.scales.b', '3', 3.0),
  ('task.reduction', 'task.reduction', 'SUM', Reduction.SUM),
  ('train_input.files', 'train_input.files', 'a.txt,b.txt', ('a.txt', 'b.txt')),
  ('eval_inputs.dev.batch_size', 'eval_inputs.dev.batch_size', '16', 16),
]


@pytest.mark.parametrize('cls', [Small, Built])
@pytest.mark.parametrize('place, path, text, expected', SETTABLE)
def test_an_override_reaches_the_built_job(cls, place, path, text, expected):
  value = read(resolve(cls, [f'{path}={text}']).build(), place)
  assert value == expected
  assert type(value) is type(expected)


def test_without_overrides_the_job_is_as_in_the_class():
  job = resolve('small_experiments.Small').build()
  assert job.name == 'small_experiments.Small'
  assert job.experiment == Small()
  assert job.task.model.num_layers == 2
  assert job.train_input == Input(batch_size=4)
  assert dict(job.eval_inputs) == {'dev': Input(batch_size=2), 'test': Input(batch_size=2)}


def test_an_override_of_a_part_wins_over_the_experiments_field():
  job = resolve(Small, ['task.model.num_layers=3', 'num_layers=9']).build()
  assert (job.task.model.num_layers, job.experiment.num_layers) == (3, 9)


def test_overrides_that_only_fit_together_are_checked_together():
  overrides = ['mesh_axis_names=replica,data,expert,mdl', 'ici_mesh_shape=1,2,2,2']
  assert resolve(Small, overrides).experiment.ici_mesh_shape == (1, 2, 2, 2)
  # One built object, whose `low` must not be above its `high`.
  job = resolve(Small, ['task.optimizer.low=5', 'task.optimizer.high=6']).build()
  assert (job.task.optimizer.low, job.task.optimizer.high) == (5, 6)


def test_missing_values_can_be_given_by_overrides():
  job = resolve(Incomplete, ['width=3', 'train_input.batch_size=6']).build()
  assert (job.task.model.ffn.width, job.train_input.batch_size) == (3, 6)


def test_a_config_used_twice_is_built_once():
  class Shared(Small):
    def task(self):
      ffn = fdl.Config(FeedForward)
      return {'first': ffn, 'second': ffn}

  job = resolve(Shared, ['task.first.width=3']).build()
  assert job.task['first'] is job.task['second']
  assert job.task['second'].width == 3


BAD = [
  ('ici_mesh_shape=1,a,1', r'write for example ici_mesh_shape=1,1,1$'),
  ('num_layers=abc', r'num_layers=abc is not of type int \(now 2\): write for example num_layers=4'),
  ('task.freeze=1', 'task.freeze=1 is not of type bool .*task.freeze=true'),
  ('task.optimizer.betas=1,2,3', r'betas=1,2,3 is not of type tuple\[float, float\]'),
  ('task.model.ffn.dtype=float33', 'is not of type dtype .*dtype=bfloat16'),
  ('numlayers=3', "the experiment has no 'numlayers'. Nearest: num_layers"),
  ('task.modle.num_layers=3', r"task has no 'modle'. Nearest: task\.model\.$"),
  ('learning_rate=3', "has no 'learning_rate'. Nearest: schedule.learning_rate, task.optimizer.learning_rate"),
  ('eval_inputs.dave.batch_size=3', r'Nearest: eval_inputs\.dev\.$'),
  ('task.clip.x=3', 'task.clip has no fields of its own; set task.clip=... itself'),
  ('task.model.ffn.activation=gelu', "takes a Callable: change that in the experiment's code"),
  ('task.model.ffn=3', 'small_experiments:FeedForward; set one of its fields: task.model.ffn.width'),
  ('task=None', 'task=None cannot be set: task is a small_experiments:Task'),
  ('seed', "'seed' is not an override: write path=value, for example seed=100"),
  ('seed 1', "'seed 1' is not an override: write path=value, for example seed=100"),
  ('task.optimizer.low=5', 'low = 5 must not be above high = 2'),
]


@pytest.mark.parametrize('override, message', BAD)
def test_the_error_about_a_bad_override_has_the_remedy(override, message):
  with pytest.raises(ValueError, match=message):
    resolve(Small, [override])


class NeedsFolder(Small):
  folder: str = ''

  def task(self):
    if not self.folder:
      raise UserError('folder is not set: --set folder=DIR.')
    return super().task()


def test_a_misspelled_field_is_named_also_if_its_value_is_missed():
  assert resolve(NeedsFolder, ['folder=models']).experiment.folder == 'models'
  for override, message in (('foldre=models', "has no 'foldre'. Nearest: folder"), ('task.x=1', 'folder is not set')):
    with pytest.raises(UserError, match=message):
      resolve(NeedsFolder, [override])


class WithOptax(Small):
  learning_rate: float = 0.01

  def task(self):
    return TrainedTask(
      model=nn.Dense(1), loss=optax.l2_loss, learner=fdl.Config(optax.adamw, learning_rate=self.learning_rate)
    )


@pytest.mark.parametrize(
  'path, message',
  [
    (
      'task.learner.learning_rate',
      r"built optax optimizer, which .*: set the experiment's learning_rate, or .*FromOptax",
    ),
    ('task.learner.optimizer.weight_decay', 'set a field of the experiment that makes it, or .*FromOptax'),
    ('task.learner.optimizer.learning_rate', 'set a field of the experiment that makes it, or .*FromOptax'),
    ('task.learner.clip_global_nrom', 'Nearest: task.learner.clip_global_norm'),
    ('task.loss.function.alpha', r'no fields of its own; set a field .* return fdl.Config\(Task, \.\.\.\)'),
  ],
)
def test_what_a_built_task_hides_from_overrides_is_set_by_a_field_of_the_experiment(path, message):
  with pytest.raises(UserError, match=message):
    resolve(WithOptax, [f'{path}=0.1'])


def test_a_part_that_refuses_its_fields_is_named_by_path():
  with pytest.raises(UserError, match=r'^eval_inputs.dev: batch_size = -3 must be positive.$'):
    resolve(Small, ['eval_inputs.dev.batch_size=-3']).build()


def test_an_error_in_a_parts_own_code_has_its_config_path_and_its_line():
  class Configured(Small):
    def task(self):
      return fdl.Config(Task, model=None, optimizer=fdl.Config(Optimizer, low=5))

  message = r'task.optimizer: building .* ValueError: low = 5 must not be above high = 2. \(.*small_experiments.py:46\)'
  with pytest.raises(ValueError, match=message) as raised:
    resolve(Configured).build()
  assert user_error_code(raised.value) == exit_codes.USAGE


def test_an_assertion_without_a_message_has_its_line():
  class Asserting(Small):
    def task(self):
      raise AssertionError

  with pytest.raises(UserError, match=r'fails with AssertionError \(.*test_resolve\.py:\d+\): correct that code'):
    resolve(Asserting).build()


def test_an_error_in_an_experiment_is_one_sentence_unless_tracebacks_are_on(capsys, monkeypatch):
  flags = ('--exp', 'small_experiments.Raising', '--print_config', '--set')
  assert binary.run_in_process(*flags, 'error=UserError') == exit_codes.USAGE
  assert capsys.readouterr().err == 'spmd-tasks: num_layers=2 must be odd.\n'
  assert binary.run_in_process(*flags, 'error=ValueError') == exit_codes.USAGE
  assert 'fails with ValueError: num_layers=2 must be odd. (' in capsys.readouterr().err
  monkeypatch.setenv('JAX_TRACEBACK_FILTERING', 'off')
  assert binary.run_in_process(*flags, 'error=ValueError') == exit_codes.FAILED
  message = capsys.readouterr().err
  assert message.startswith('spmd-tasks: ValueError: num_layers=2 must be odd. (')
  assert 'small_experiments.py", line' in message
  assert message.endswith('\nValueError: num_layers=2 must be odd.\n')


@pytest.mark.parametrize(
  'cls, overrides, message',
  [
    (Incomplete, [], r'Incomplete has no value for its field width: .* --set width='),
    (Incomplete, ['width=3'], r'train_input.batch_size has no value: .* --set train_input.batch_size='),
    (Experiment, [], r'Experiment does not define task\(\), train_input\(\)'),
  ],
)
def test_the_error_about_an_incomplete_experiment_says_what_is_missing(cls, overrides, message):
  with pytest.raises(ValueError, match=message):
    resolve(cls, overrides)


def test_a_config_that_fiddle_would_never_build_is_refused():
  class Hidden(Small):
    def task(self):
      return Task(model=fdl.Config(Model, num_layers=2, ffn=FeedForward()))

  with pytest.raises(ValueError, match=r'task.model is a config inside a built Task, .* make the Task a fdl.Config'):
    resolve(Hidden)


def test_a_part_may_be_built_by_a_function():
  def make_task(width: int, *, scale: float = 1.0):
    return (width, scale)

  class FromFunction(Small):
    def task(self):
      return fdl.Config(make_task, width=self.num_layers)

  assert resolve(FromFunction, ['task.scale=2', 'task.width=3']).build().task == (3, 2.0)


def test_a_mesh_layout_can_be_set_by_path():
  changed = resolve('moe.StdlibTiny', ['mesh.num_expert_partitions=2', 'mesh.num_partitions=2']).experiment
  assert changed.ici_mesh_shape == (1, 2, 2, 2)
  assert resolve('moe.StdlibTiny', ['ici_mesh_shape=1,1,8,1']).experiment.ici_mesh_shape == (1, 1, 8, 1)
  again = from_json(to_json(resolve('moe.StdlibTiny')), ['mesh.num_expert_partitions=8']).experiment
  assert again.ici_mesh_shape == (1, 1, 8, 1)
  saved = to_json(resolve('moe.StdlibTiny', ['ici_mesh_shape=1,1,8,1']))
  assert from_json(saved).experiment.ici_mesh_shape == (1, 1, 8, 1)


@pytest.mark.parametrize('dtype', ['nonsense', '', 'int32', 'float64', 'complex64', bool])
def test_a_dtype_that_activations_cannot_have_is_refused(dtype):
  embedding = fdl.Config(TokenEmbedding, vocab_size=7, embed_dim=4, dtype=dtype)
  with pytest.raises(UserError, match=r'model\.dtype = .* set float32'):
    check_numbers({'model': embedding})


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_a_seed_has_32_bits(seed):
  with pytest.raises(UserError, match=rf'seed = {seed} must be in'):
    resolve(Small, [f'seed={seed}'])
