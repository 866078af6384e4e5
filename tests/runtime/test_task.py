"""Task calls a user's Linen model and loss with the right arguments, and keeps declared variables as state."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import TransformerStack, base
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.learning import Learner
from spmd_tasks.runtime import Task, partition_spmd_model, sown_values
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, stage_axis_rules
from spmd_tasks.sharding.specs import sharding_scope

B, D = 4, 3
SPEC = {'x': jax.ShapeDtypeStruct((B, D), jnp.float32), 'y': jax.ShapeDtypeStruct((B,), jnp.float32)}


def batch_of(seed=0):
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for name, spec in SPEC.items()}


class Model(nn.Module):
  """Its predictions are 1 in training, and 0 otherwise."""

  def setup(self):
    self.param('weight', nn.initializers.zeros, (1,))

  def answer(self, trains):
    return jnp.full((B,), float(trains))


class Train(Model):
  def __call__(self, x, train=False):
    return self.answer(train)


class Training(Model):
  def __call__(self, x, *, training):
    return self.answer(training)


class IsTraining(Model):
  def __call__(self, batch, is_training=False):
    return self.answer(is_training)


class Deterministic(Model):
  def __call__(self, batch, deterministic: bool):
    return self.answer(not deterministic)


class RunningAverage(Model):
  def __call__(self, y, x, use_running_average=True):
    return self.answer(not use_running_average)


class Several(Model):
  def __call__(self, batch, train=False, deterministic=True, **others):
    return self.answer(train and not deterministic and not others)


def mean(predictions, batch):
  return jnp.mean(predictions)


def losses_of(task):
  """The loss in training and in evaluation, and the mean prediction of a decode."""
  batch = batch_of()
  variables = task.init_variables(jax.random.key(0), batch)
  losses = (task.compute_loss(variables, batch, train=train, rng=jax.random.key(1)).loss for train in (True, False))
  return (*map(float, losses), float(jnp.mean(task.predict(variables, batch))))


@pytest.mark.parametrize('model', [Train, Training, IsTraining, Deterministic, RunningAverage, Several])
def test_the_train_flag_is_passed_by_any_of_its_names(model):
  assert losses_of(Task(model=model(), loss=mean, learner=optax.sgd(0.1))) == (1.0, 0.0, 0.0)


def own_flag(predictions, batch, *, deterministic=True):
  return jnp.float32(0 if deterministic else 1)


class OwnFlag:
  def __call__(self, predictions, batch, training):
    return jnp.float32(training)


@pytest.mark.parametrize(
  'loss, expected',
  [(own_flag, (1.0, 0.0)), (OwnFlag(), (1.0, 0.0)), (functools.partial(own_flag, deterministic=False), (1.0, 1.0))],
  ids=['function', 'object', 'bound already'],
)
def test_a_loss_may_take_the_flag_too(loss, expected):
  assert losses_of(Task(model=Train(), loss=loss, learner=optax.sgd(0.1)))[:2] == expected


def test_a_sublayer_gets_the_flag_by_each_name():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
      return x + (0 if deterministic else 1)

  x = jnp.zeros((2, 3))
  for train in (True, False):
    run = nn.apply(lambda layer, x, train=train: base.run_layer('block', layer, x, train=train), Layer())
    assert run({}, x)[0][0, 0] == train


class Scaled(Model):
  def __call__(self, x, scale=2.0):
    return self.answer(True) * scale


class ScaledWhole(Model):
  def __call__(self, batch, *, scale=2.0):
    return self.answer(True) * scale


@pytest.mark.parametrize('model, remedy', [(Scaled, 'an entry of the batch, or a field'), (ScaledWhole, 'a field')])
def test_another_argument_keeps_its_default_and_is_named_once(model, remedy, caplog):
  base._warn_of_default.cache_clear()
  assert losses_of(Task(model=model(), loss=mean, learner=optax.sgd(0.1))) == (2.0, 2.0, 2.0)
  (line,) = [record.getMessage() for record in caplog.records]
  assert f'{model.__name__}.__call__ has the argument scale, which keeps its default 2.0' in line
  assert f'make it {remedy} of the model' in line


def test_an_argument_without_default_or_entry_is_refused():
  class Other(Model):
    def __call__(self, x, scale):
      return self.answer(scale)

  with pytest.raises(UserError, match=r"Other.__call__ takes scale, .*\['x', 'y'\]"):
    losses_of(Task(model=Other(), loss=mean, learner=optax.sgd(0.1)))


ADD = {'reduce_fn': lambda old, new: old + new, 'init_fn': lambda: 0.0}


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.sow('losses', 'size', jnp.sum(x**2))
    self.sow('losses', 'total', jnp.sum(x**2), **ADD)
    self.sow('statistics', 'mean', jnp.mean(x), **ADD)
    count = self.variable('statistics', 'count', jnp.zeros, ())
    updated = self.variable('counts', 'updated', jnp.zeros, ())
    if not self.is_initializing() and self.is_mutable_collection('statistics'):
      count.value += jnp.float32(1)
      self.sow('counts', 'updated', jnp.float32(2), **ADD)  # of a variable that the module has declared
    del updated
    return nn.Dense(x.shape[-1])(x)


class Sowing(nn.Module):
  is_scanned: bool = False

  @nn.compact
  def __call__(self, x):
    self.sow('intermediates', 'input', x)
    if self.is_scanned:
      axes = dict.fromkeys(('params', 'losses', 'statistics', 'counts'), 0)
      step = lambda layer, x, _: (layer(x), None)
      x, _ = nn.scan(step, variable_axes=axes, split_rngs={'params': True}, length=2)(Layer(name='layers'), x, None)
    else:
      x = Layer(name='layers')(x)
    return jnp.sum(x, axis=-1)


@pytest.mark.parametrize('is_scanned', [False, True])
@pytest.mark.parametrize('num_microbatches', [1, 2])
def test_sown_values_are_not_state_and_are_warned_of_once(is_scanned, num_microbatches, caplog):
  """After three steps the state has the variables that modules declare, and no others."""
  sown_values.warn_of_sown.cache_clear()
  learner = Learner(optimizer=optax.sgd(0.0), num_microbatches=num_microbatches)
  task = Task(
    model=Sowing(is_scanned=is_scanned), loss=lambda p, batch: jnp.mean((p - batch['y']) ** 2), learner=learner
  )
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)).build(jax.devices()[:1])
  model = partition_spmd_model(task, mesh, SPEC, axis_rules=DEFAULT_AXIS_RULES)
  state, batch = model.init(0), model.train_step.place(batch_of())
  losses = []
  for _ in range(3):
    state, metrics = model.train_step(state, batch)
    losses.append(float(metrics['loss']))
  counts = {'statistics': {'layers': {'count': 3.0}}, 'counts': {'layers': {'updated': 6.0}}}
  shape = (2,) if is_scanned else ()
  jax.tree.map(
    lambda kept, value: np.testing.assert_array_equal(kept, np.full(shape, value)), state.non_trainable, counts
  )
  assert losses == [losses[0]] * 3
  (line,) = [record.getMessage() for record in caplog.records if 'sows' in record.getMessage()]
  assert 'the model Sowing sows losses/layers/size, losses/layers/total, statistics/layers/mean: ' in line


@pytest.mark.parametrize('stack', [TransformerStack, PipelinedStack])
def test_values_sown_by_the_blocks_of_a_stack_are_not_state(stack):
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, segment_ids=None, segment_pos=None, train=False):
      self.sow('losses', 'size', jnp.sum(x))
      return x

  fields = {'num_microbatches': 2} if stack is PipelinedStack else {}
  mesh = MeshSpec(axis_names=('stage',), ici_mesh_shape=(2,)).build(jax.devices()[:2])
  with sharding_scope(mesh, stage_axis_rules(())):
    arguments = stack(block=Block(), num_layers=2, **fields), {'params': jax.random.key(0)}, jnp.zeros((2, 2, 3))
    variables, sown = sown_values.sown_values(*arguments)
  assert variables['losses']
  assert sown_values.without_sown(variables, sown) == {}


class TrainingHead(nn.Module):
  """Has a head that only training calls; `init` creates its weights and averages."""

  @nn.compact
  def __call__(self, x, train=False):
    if train or self.is_initializing():
      nn.BatchNorm(use_running_average=not train, name='norm')(nn.Dense(2, name='head')(x))
    self.sow('batch_stats', 'total', jnp.sum(x), **ADD)
    return jnp.sum(x, axis=-1)


def test_variables_that_only_training_reads_are_state():
  task = Task(model=TrainingHead(), loss=lambda p, batch: jnp.mean((p - batch['y']) ** 2), learner=optax.sgd(0.0))
  variables = jax.eval_shape(task.init_variables, jax.random.key(0), batch_of())
  assert {name: set(tree) for name, tree in variables.items()} == {'params': {'head', 'norm'}, 'batch_stats': {'norm'}}
