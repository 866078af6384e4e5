"""BaseTask, BaseLearner and Loss can be subclassed with few methods, and their hooks are called."""

import dataclasses

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import Loss
from spmd_tasks.learning import BaseLearner, FromOptax, Learner, LearnerState
from spmd_tasks.runtime import BaseTask, Task, TrainState, partition_spmd_model
from spmd_tasks.runtime.flops import model_flops_per_train_step
from spmd_tasks.sharding import MeshSpec, WeightSpec
from spmd_tasks.sharding.weights import replicated_spec

B, D = 8, 3
SPEC = {'x': jax.ShapeDtypeStruct((B, D), jnp.float32), 'y': jax.ShapeDtypeStruct((B,), jnp.float32)}


def batch_of(seed=0):
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in SPEC.items()}


class Linear(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(x)[:, 0]


def squared_error(predictions, batch):
  return jnp.mean(jnp.square(predictions - batch['y']))


def partition(task):
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(2,)).build(jax.devices()[:2])
  return partition_spmd_model(task, mesh, SPEC)


class Hooks(Loss):
  """Records which hooks are called; those that return a batch add an entry."""

  def __init__(self):
    self.called = []

  def check_weights(self, weight_specs):
    assert {spec.shape for spec in jax.tree.leaves(weight_specs)} == {(D, 1), (1,)}
    self.called.append('check_weights')

  def prepare_whole_batch(self, task, variables, batch, num_microbatches):
    assert (batch['y'].shape, num_microbatches) == ((B,), 2)
    self.called.append('prepare_whole_batch')
    return batch | {'mean': jnp.full(B, batch['y'].mean())}

  def prepare_batch(self, task, variables, batch):
    self.called.append('prepare_batch')
    return batch | {'target': jax.lax.stop_gradient(task.predict(variables, batch))}

  def may_have_empty_microbatches(self, batch):
    self.called.append('may_have_empty_microbatches')
    return False

  def __call__(self, predictions, batch):
    target = batch['target'] + batch.get('mean', 0)
    return jnp.mean(jnp.square(predictions - target)), {'target': jnp.mean(target)}


def test_the_hooks_of_a_loss_are_called_in_a_step_with_microbatches():
  loss = Hooks()
  model = partition(Task(model=Linear(), loss=loss, learner=Learner(optimizer=optax.sgd(0.1), num_microbatches=2)))
  _, metrics = model.train_step(model.init(0), model.train_step.place(batch_of()))
  assert set(loss.called) == {'check_weights', 'prepare_whole_batch', 'prepare_batch', 'may_have_empty_microbatches'}
  # The target is the prediction plus the mean of the whole batch.
  np.testing.assert_allclose(metrics['loss'], batch_of()['y'].mean() ** 2, rtol=1e-5)


def test_flops_count_prepare_batch_without_a_backward_pass():
  task = Task(model=Linear(), loss=squared_error, learner=optax.sgd(0.1))
  model = partition(task)
  flops = [
    model_flops_per_train_step(
      dataclasses.replace(task, loss=loss), SPEC, model.abstract_state.variables, model.weight_specs
    )
    for loss in (squared_error, Hooks())
  ]
  forward = 2 * B * D
  assert flops == [3 * forward, 4 * forward]


def test_a_plain_function_is_wrapped_once():
  task = Task(model=Linear(), loss=squared_error, learner=optax.sgd(0.1))
  again = dataclasses.replace(task, eval_with_ema=False)
  assert isinstance(task.loss, Loss)
  assert again.loss == task.loss
  assert again.loss.function is squared_error


class KeepWeights(BaseLearner):
  """A learner with only the required methods; it does not change weights."""

  def init(self, weights, weight_specs):
    zero = jnp.zeros((), jnp.int32)
    return LearnerState(opt_state=(), ema_weights=None, num_skipped=zero, num_skipped_in_a_row=zero)

  def update(self, grads, loss, step, state, weights, weight_specs, factors=None):
    return weights, state, {'skipped': jnp.zeros(())}

  def state_split_dims(self, abstract_state, weight_specs):
    return jax.tree.map(replicated_spec, abstract_state)


def test_a_custom_learner_needs_three_methods():
  model = partition(Task(model=Linear(), loss=squared_error, learner=KeepWeights()))
  first = model.init(0)
  weights = jax.device_get(first.weights)
  state, metrics = model.train_step(first, model.train_step.place(batch_of()))
  assert int(state.step) == 1
  assert metrics['loss'] > 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.weights), weights)


class OtherTask(BaseTask):
  """A task with only the required methods: linear regression without Linen."""

  model, decode = 'x @ w', None

  def make_key(self, seed):
    return jax.random.key(seed)

  def init_variables(self, rng, batch):
    spec = WeightSpec(shape=(D,), init=jax.nn.initializers.zeros, split_dims=('data',))
    return {'params': {'w': spec(rng)}}

  def init_state(self, variables, weight_specs, rng):
    learner = KeepWeights().init(variables['params'], weight_specs)
    return TrainState(jnp.zeros((), jnp.int32), jax.random.key_data(rng), variables['params'], learner)

  def learner_specs(self, abstract_learner, weight_specs):
    return jax.tree.map(replicated_spec, abstract_learner)

  def predict(self, variables, batch):
    return batch['x'] @ variables['params']['w']

  def train_step(self, weight_specs, state, batch, *, keeps_examples=False):
    loss, gradients = jax.value_and_grad(lambda w: squared_error(self.predict({'params': w}, batch), batch))(
      state.weights
    )
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, state.weights, gradients)
    metrics = {'loss': loss, 'loss_weight': jnp.float32(B), 'skipped': jnp.float32(0)}
    return state.replace(step=state.step + 1, weights=weights), metrics

  def eval_step(self, variables, batch, step, *, keeps_examples=False):
    return {'loss': squared_error(self.predict(variables, batch), batch)}


def test_a_task_of_another_framework_trains_padded_on_a_mesh():
  task = OtherTask()
  model = partition(task)
  assert model.padded_state.weights['w'].shape == (4,)
  state, losses = model.init(0), []
  for _ in range(3):
    state, metrics = model.train_step(state, model.train_step.place(batch_of()))
    losses.append(float(metrics['loss']))
  assert losses == sorted(losses, reverse=True)
  step = model.eval_step(model.input_layout.spec)
  assert float(step(state, step.place(batch_of()))['loss']) < losses[-1]
  assert model_flops_per_train_step(task, SPEC, model.abstract_state.variables) == 3 * 2 * B * D


def test_a_task_of_another_framework_is_refused_by_modes_that_need_a_linen_model():
  with pytest.raises(UserError, match=r'--mode serve .* OtherTask'):
    OtherTask().as_task('--mode serve')


@pytest.mark.parametrize('learner', [object(), Learner], ids=['object', 'class'])
def test_a_learner_of_the_wrong_type_is_refused(learner):
  with pytest.raises(UserError, match=r'learner is .* optimizer'):
    Task(model=Linear(), loss=squared_error, learner=learner)


_SGD = fdl.Config(FromOptax, factory=optax.sgd, learning_rate=0.5)


@pytest.mark.parametrize(
  'learner', [_SGD, fdl.Config(Learner, optimizer=_SGD), Learner(optimizer=_SGD)], ids=['optimizer', 'learner', 'inner']
)
def test_a_built_task_builds_the_configs_in_its_fields(learner):
  task = Task(model=fdl.Config(Linear), loss=fdl.Partial(squared_error), learner=learner)
  assert task.model == Linear()
  assert task.learner == Learner(optimizer=FromOptax(factory=optax.sgd, learning_rate=0.5))
  batch = batch_of()
  assert task.loss(batch['y'] + 1, batch) == pytest.approx(1)


def test_an_optimizer_of_the_wrong_type_is_refused():
  with pytest.raises(UserError, match='Optimizer'):
    Learner(optimizer=object())
