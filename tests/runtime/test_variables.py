"""Variables that are not weights, such as batch statistics, are updated on any mesh, padded, saved and evaluated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss, TransformerStack
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.learning import AdamW, Learner
from spmd_tasks.programs.restored_weights import restore_evaluation_variables
from spmd_tasks.runtime import Task, partition_spmd_model
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, WeightSpec, stage_axis_rules

B, T, D, F, V = 8, 6, 30, 90, 37
SPEC = {'ids': jax.ShapeDtypeStruct((B, T), jnp.int32), 'labels': jax.ShapeDtypeStruct((B, T), jnp.int32)}
SPEC['weights'] = jax.ShapeDtypeStruct((B, T), jnp.float32)


class Block(nn.Module):
  """A feed-forward block with Linen's BatchNorm and a running mean of its hidden units.

  BatchNorm declares its statistics as plain arrays; the running mean [F] is sharded like the hidden units, and padded.
  """

  @nn.compact
  def __call__(self, x, segment_ids=None, segment_pos=None, *, train=False):
    weight = lambda name, shape, dims: self.param(
      name, WeightSpec(shape=shape, init=nn.initializers.normal(0.3), split_dims=dims)
    )
    normed = nn.BatchNorm(use_running_average=not train, momentum=0.9, use_scale=False, use_bias=False)(x)
    hidden = jnp.tanh(normed @ weight('up', (D, F), ('embed', 'mlp')))
    mean = self.variable(
      'activity', 'mean', lambda: WeightSpec(shape=(F,), init=nn.initializers.zeros, split_dims=('mlp',))(None)
    )
    value = mean.value
    if train and not self.is_initializing():
      mean.value = 0.9 * value + 0.1 * jnp.mean(hidden, axis=(0, 1))
    return x + (hidden - value[None, None]) @ weight('down', (F, D), ('mlp', 'embed')), {}


class Model(nn.Module):
  stack: nn.Module

  @nn.compact
  def __call__(self, batch, train=False):
    spec = WeightSpec(shape=(V, D), init=nn.initializers.normal(1.0), split_dims=('vocab', 'embed'))
    table = self.param('table', spec)
    x, _ = self.stack(table[batch['ids']], None, None, train=train)
    return {'logits': x @ table.T}


def make_model(shape=(1, 2, 4), num_microbatches=1, stack=TransformerStack, eval_with_ema=True, **settings):
  stack = stack(block=Block(), num_layers=2, **settings)
  learner = Learner(optimizer=AdamW(learning_rate=1e-2), num_microbatches=num_microbatches, ema_decay=0.9)
  task = Task(model=Model(stack), loss=LanguageModelLoss(), learner=learner, eval_with_ema=eval_with_ema)
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=shape).build(jax.devices()[: np.prod(shape)])
  return partition_spmd_model(task, mesh, SPEC, axis_rules=DEFAULT_AXIS_RULES)


def batches():
  rng = np.random.default_rng(0)
  for _ in range(5):
    ids, labels = rng.integers(0, V, (2, B, T), np.int32)
    yield {'ids': ids, 'labels': labels, 'weights': np.ones((B, T), np.float32)}


def run(model):
  state, losses = model.init(0), []
  for batch in batches():
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['loss']))
  return state, losses


@pytest.fixture(scope='module')
def on_mesh():
  model = make_model()
  state, losses = run(model)
  return model, state, losses, jax.device_get(model.to_canonical(state))


def assert_same_statistics(state, expected, rtol):
  for name in ('batch_stats', 'activity'):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol), state.non_trainable[name], expected[name]
    )


def test_losses_and_statistics_do_not_depend_on_the_mesh(on_mesh):
  model, state, losses, canonical = on_mesh
  expected_state, expected_losses = run(make_model((1, 1, 1)))
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
  assert_same_statistics(canonical, jax.device_get(expected_state.non_trainable), 1e-5)
  assert model.padded_state.non_trainable['activity']['stack']['layers']['mean'].shape == (2, 92)
  assert model.state_specs.non_trainable['activity']['stack']['layers']['mean'] == jax.P(None, 'mdl')
  assert state.non_trainable['activity']['stack']['layers']['mean'].any()


def test_a_running_mean_agrees_with_numpy(on_mesh):
  model, *_ = on_mesh
  start = jax.device_get(model.to_canonical(model.init(0)))
  batch = next(batches())
  state, _ = model.train_step(model.init(0), model.train_step.place(batch))
  mean = jax.device_get(state).non_trainable['batch_stats']['stack']['layers']['BatchNorm_0']['mean'][0]
  expected = start.weights['table'][batch['ids']].astype(np.float64).mean((0, 1)) * 0.1  # over the whole batch
  np.testing.assert_allclose(mean[:D], expected, rtol=1e-5, atol=1e-7)


def test_statistics_are_averaged_over_microbatches(on_mesh):
  model = make_model(num_microbatches=2)
  batch = next(batches())
  state, _ = model.train_step(model.init(0), model.train_step.place(batch))
  whole, _ = on_mesh[0].train_step(on_mesh[0].init(0), on_mesh[0].train_step.place(batch))
  first = lambda state: jax.device_get(state).non_trainable['batch_stats']['stack']['layers']['BatchNorm_0']['mean'][0]
  np.testing.assert_allclose(first(state), first(whole), rtol=1e-5, atol=1e-7)


def averaged_statistics():
  """The averages over steps, in NumPy, of the statistics of a job that evaluates trained weights."""
  model = make_model((1, 1, 1), eval_with_ema=False)
  state = model.init(0)
  averages = jax.device_get(state.non_trainable)
  assert averages.keys() == {'batch_stats', 'activity'}
  for batch in batches():
    state, _ = model.train_step(state, model.train_step.place(batch))
    averages = jax.tree.map(lambda e, x: 0.9 * e + 0.1 * np.asarray(x), averages, jax.device_get(state.non_trainable))
  return averages


def test_variables_are_restored_on_another_mesh_and_evaluated_with_averaged_weights(on_mesh, tmp_path):
  model, state, _, canonical = on_mesh
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(5, model.to_canonical(state))
  checkpointer.wait()
  other = make_model((1, 1, 3))
  restored = other.from_canonical(checkpointer.restore(other.canonical_state).state)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_canonical(restored)), canonical)

  variables = restore_evaluation_variables(other, checkpointer).variables
  checkpointer.close()
  batch = next(batches())
  step = other.eval_step(SPEC)
  statistics = averaged_statistics()
  averaged = {'params': canonical.learner.ema_weights, **statistics}
  assert_same_statistics(
    canonical.replace(non_trainable={name: canonical.non_trainable[f'ema_{name}'] for name in statistics}),
    statistics,
    1e-5,
  )
  expected = jax.jit(lambda variables: model.task.compute_loss(variables, batch, train=False).loss)(averaged)
  actual = step.with_variables(variables, step.place(batch), jnp.int32(5))['loss'].compute()
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  live = step(restored, step.place(batch))['loss'].compute()
  np.testing.assert_allclose(live, expected, rtol=1e-5)


@pytest.mark.parametrize(
  'shape',
  [pytest.param((1, 1, 1), id='one device', marks=pytest.mark.exhaustive), pytest.param((1, 2, 4), id='padded')],
)
def test_the_average_of_schedule_free_is_restored_and_evaluated(shape, tmp_path):
  """The loss at x = schedule_free_eval_params, from a live state and from a checkpoint."""
  task = Task(
    model=Model(TransformerStack(block=Block(), num_layers=2)),
    loss=LanguageModelLoss(),
    learner=optax.contrib.schedule_free_sgd(0.5),
  )
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=shape).build(jax.devices()[: np.prod(shape)])
  model = partition_spmd_model(task, mesh, SPEC, axis_rules=DEFAULT_AXIS_RULES)
  state, _ = run(model)
  canonical, batch = jax.device_get(model.to_canonical(state)), next(batches())
  average = optax.contrib.schedule_free_eval_params(canonical.learner.opt_state, canonical.weights)
  loss = jax.jit(
    lambda weights: task.compute_loss({'params': weights, **canonical.non_trainable}, batch, train=False).loss
  )
  expected = loss(average)
  assert abs(expected - loss(canonical.weights)) > 1e-3
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(5, model.to_canonical(state))
  checkpointer.wait()
  restored = restore_evaluation_variables(model, checkpointer).variables
  checkpointer.close()
  step = model.eval_step(SPEC)
  placed = step.place(batch)
  for averages in (step.with_variables(restored, placed, jnp.int32(5)), step(state, placed)):
    np.testing.assert_allclose(averages['loss'].compute(), expected, rtol=1e-5)
  with pytest.raises(UserError, match=r'needs a TrainState.*: pass the state'):
    step(state.variables, placed)


def test_a_pipeline_refuses_blocks_with_other_variables():
  stack = PipelinedStack(block=Block(), num_layers=2, num_microbatches=2)
  task = Task(model=Model(stack), loss=LanguageModelLoss(), learner=Learner(optimizer=AdamW(learning_rate=1e-2)))
  mesh = MeshSpec(axis_names=('stage', 'data'), ici_mesh_shape=(2, 1)).build(jax.devices()[:2])
  rules = stage_axis_rules((('batch', 'data'),))
  model = partition_spmd_model(task, mesh, SPEC, axis_rules=(*rules, ('embed', None), ('mlp', None), ('vocab', None)))
  with pytest.raises(UserError, match=r"\['activity', 'batch_stats'\]"):
    model.train_step.compile()
