"""Balance biases follow the sign of their load violation; for everything else they might as well not be there."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from spmd_tasks.learning import Adafactor, AdamW, Learner, Lion, Sgd
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.specs import sharding_scope

OTHERS = {
  'kernel': WeightSpec(shape=(2, 4, 6), init=None, split_dims=(None, 'data', None), stacked=1),
  'scale': WeightSpec(shape=(6,), init=None, tags=('no_decay',)),
}
SPECS = OTHERS | {
  'router': {
    'bias': WeightSpec(shape=(2, 3), init=None, split_dims=(None, None), stacked=1, tags=('balance_bias', 'no_decay')),
    'kernel': WeightSpec(shape=(2, 4, 3), init=None, stacked=1),
  }
}
WITHOUT_BIAS = SPECS | {'router': {'kernel': SPECS['router']['kernel']}}
OPTIMIZERS = {
  'adamw': AdamW(learning_rate=0.1, weight_decay=0.1),
  'adafactor': Adafactor(learning_rate=0.1, momentum=0.9, min_dim_size_to_factor=2, weight_decay=0.1),
  'lion': Lion(learning_rate=0.1, weight_decay=0.1),
  'momentum': Sgd(learning_rate=0.1, momentum=0.9),
}


def draw(rng, specs=SPECS):
  return jax.tree.map(lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32), specs)


def without_bias(tree):
  return tree | {'router': {'kernel': tree['router']['kernel']}}


def run(learner, specs, start, all_grads, losses=None):
  """The weights and the state after some steps, and the last metrics."""
  update = jax.jit(lambda g, loss, state, w: learner.update(g, loss, jnp.int32(0), state, w, specs))
  weights, state = start, learner.init(start, specs)
  for grads, loss in zip(all_grads, losses or [1.0] * len(all_grads)):
    weights, state, metrics = update(grads, jnp.float32(loss), state, weights)
  return weights, state, metrics


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_nothing_but_the_sign_of_its_own_gradient_matters(optimizer, rng):
  learner = Learner(optimizer=OPTIMIZERS[optimizer], clip_global_norm=0.5, ema_decay=0.5)
  start, all_grads = draw(rng), [draw(rng) for _ in range(3)]
  weights, state, metrics = run(learner, SPECS, start, all_grads)
  signs = sum(np.sign(grads['router']['bias']) for grads in all_grads)
  np.testing.assert_allclose(weights['router']['bias'], start['router']['bias'] - 1e-3 * signs, rtol=1e-6)

  others, other_state, other_metrics = run(
    learner, WITHOUT_BIAS, without_bias(start), [without_bias(grads) for grads in all_grads]
  )
  jax.tree.map(np.testing.assert_array_equal, without_bias(weights), others)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state.opt_state), jax.tree.leaves(other_state.opt_state))
  assert metrics['grad_norm'] == other_metrics['grad_norm']
  assert metrics['weight_norm'] > other_metrics['weight_norm']  # that of all weights


def test_balanced_experts_and_rate_0_leave_it_alone(rng):
  start, grads = draw(rng), draw(rng)
  balanced = grads | {'router': grads['router'] | {'bias': jnp.zeros((2, 3))}}
  for rate, step_grads in [(1.0, balanced), (0.0, grads)]:
    learner = Learner(optimizer=Sgd(learning_rate=1.0), balance_bias_rate=rate)
    weights, _, _ = run(learner, SPECS, start, [step_grads])
    np.testing.assert_array_equal(weights['router']['bias'], start['router']['bias'])


def test_a_skipped_step_does_not_move_it(rng):
  learner = Learner(optimizer=AdamW(learning_rate=0.1), ema_decay=0.5)
  start, grads = draw(rng), draw(rng)
  weights, state, metrics = run(learner, SPECS, start, [grads], [np.nan])
  assert metrics['skipped'] == 1
  jax.tree.map(np.testing.assert_array_equal, (weights, state.ema_weights), (start, start))


def test_the_average_follows_it(rng):
  learner = Learner(optimizer=AdamW(learning_rate=0.1), ema_decay=0.5)
  start = draw(rng)
  weights, state, _ = run(learner, SPECS, start, [draw(rng)])
  expected = (np.asarray(start['router']['bias'], np.float64) + weights['router']['bias']) / 2
  np.testing.assert_allclose(state.ema_weights['router']['bias'], expected, rtol=1e-6)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_the_state_has_one_spec_per_leaf(optimizer):
  learner = Learner(optimizer=OPTIMIZERS[optimizer], ema_decay=0.5)
  weights = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), SPECS)
  state = jax.eval_shape(lambda w: learner.init(w, SPECS), weights)
  specs = learner.state_split_dims(state, SPECS)
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  assert [spec.shape for spec in jax.tree.leaves(specs)] == [leaf.shape for leaf in jax.tree.leaves(state)]
  assert not any('balance_bias' in spec.tags for spec in jax.tree.leaves(specs.opt_state))
  assert specs.ema_weights['router']['bias'].split_dims == (None, None)


def test_a_sharded_step_is_the_same(rng):
  learner = Learner(optimizer=OPTIMIZERS['adamw'], clip_global_norm=0.5)
  start, grads = draw(rng), draw(rng)
  with sharding_scope(Mesh(np.array(jax.devices()), ('data',)), ()):
    sharded, _, metrics = run(learner, SPECS, start, [grads])
  alone, _, alone_metrics = run(learner, SPECS, start, [grads])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (sharded, metrics), (alone, alone_metrics))


def test_a_negative_rate_is_refused():
  with pytest.raises(ValueError, match='balance_bias_rate is -1'):
    Learner(optimizer=Sgd(learning_rate=1.0), balance_bias_rate=-1.0)
