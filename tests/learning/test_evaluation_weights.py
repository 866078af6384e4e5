"""Evaluation uses x of schedule_free, the slow weights of lookahead, and the weights before sam moves them uphill.

The reference is plain optax, in float32, on the weights of single layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import AdamW, FromOptax, Learner
from spmd_tasks.learning.evaluation_weights import has_evaluation_weights
from spmd_tasks.sharding import WeightSpec

SPECS = {
  'kernel': WeightSpec(shape=(2, 3, 2), init=None, stacked=1, num_input_dims=1),
  'bias': WeightSpec(shape=(2,), init=None, tags=('no_decay',)),
}
FREE = optax.contrib.schedule_free_sgd(0.1)
SAM = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
LOOKAHEAD = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)


def layers(tree):
  return {'kernel': list(tree['kernel']), 'bias': tree['bias']}


def gradient(weights):
  return jax.tree.map(lambda w: 2 * w + 0.3 * jnp.sin(7 * w), weights)


def trained(optimizer, num_steps, start):
  """(trained weights, weights to evaluate) of our learner."""
  learner = Learner(optimizer=optimizer)
  state, weights = learner.init(start, SPECS), start
  learner.state_split_dims(jax.eval_shape(lambda: state), SPECS)
  update = jax.jit(lambda w, state: learner.update(gradient(w), jnp.float32(1), jnp.int32(0), state, w, SPECS)[:2])
  for _ in range(num_steps):
    weights, state = update(weights, state)
  return weights, learner.evaluation_weights(state, weights, averaged=False)


def plain(optimizer, num_steps, start):
  """(trained weights, state) of plain optax."""
  params = optax.LookaheadParams.init_synced(start) if optimizer is LOOKAHEAD else start
  state = optimizer.init(params)
  for _ in range(num_steps):
    updates, state = optimizer.update(gradient(getattr(params, 'fast', params)), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


@pytest.fixture
def start(rng):
  return {name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}


def assert_equal(got, expected):
  for a, b in zip(jax.tree.leaves(layers(got)), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_schedule_free_evaluates_the_average(start):
  y, x = trained(FREE, 5, start)
  params, state = plain(FREE, 5, layers(start))
  assert_equal(y, params)
  assert_equal(x, optax.contrib.schedule_free_eval_params(state, params))
  assert np.abs(x['kernel'] - y['kernel']).max() > 1e-3


def test_schedule_free_in_a_partition_evaluates_the_average_of_its_group(start):
  labels = {'kernel': 'free', 'bias': 'plain'}
  y, x = trained(optax.partition({'free': FREE, 'plain': optax.sgd(0.1)}, labels), 5, start)
  params, state = plain(FREE, 5, layers(start)['kernel'])
  assert_equal(x, {'kernel': optax.contrib.schedule_free_eval_params(state, params), 'bias': y['bias']})


@pytest.mark.parametrize('num_steps', [2, 3, 5])
def test_lookahead_evaluates_the_slow_weights(start, num_steps):
  fast, slow = trained(LOOKAHEAD, num_steps, start)
  params, _ = plain(LOOKAHEAD, num_steps, layers(start))
  assert_equal(fast, params.fast)
  assert_equal(slow, params.slow)


@pytest.mark.parametrize('num_steps', [3, 4])
@pytest.mark.parametrize('optimizer', [SAM, optax.chain(optax.identity(), SAM)], ids=['sam', 'in a chain'])
def test_sam_evaluates_weights_before_they_move_uphill(start, num_steps, optimizer):
  moved, weights = trained(optimizer, num_steps, start)
  params, state = plain(SAM, num_steps, layers(start))
  assert_equal(moved, params)
  assert_equal(weights, state.cache if num_steps % 2 else params)


def test_multi_steps_trains_like_its_gradient_transformation(start):
  multi_steps = optax.MultiSteps(optax.adam(0.1), 2)
  params, _ = plain(multi_steps.gradient_transformation(), 5, layers(start))
  for optimizer in (multi_steps, FromOptax(factory=lambda: multi_steps, learning_rate=None)):
    weights, evaluation_weights = trained(optimizer, 5, start)
    assert_equal(weights, params)
    assert evaluation_weights is weights


def test_other_optimizers_evaluate_the_trained_weights(start):
  opaque = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
  for optimizer in (AdamW(learning_rate=0.1), optax.adam(0.1), opaque):
    state = jax.eval_shape(lambda weights, learner=Learner(optimizer=optimizer): learner.init(weights, SPECS), start)
    assert not has_evaluation_weights(state.opt_state)
