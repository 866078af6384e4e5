"""Balance biases follow the sign of their load violation, and do not affect other weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import Adafactor, AdamW, Learner
from spmd_tasks.sharding import WeightSpec

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
}


def random_tree(rng):
  return jax.tree.map(lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32), SPECS)


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
def test_only_the_sign_of_its_own_gradient_matters(optimizer, rng):
  learner = Learner(optimizer=OPTIMIZERS[optimizer], clip_global_norm=0.5, ema_decay=0.5)
  start, all_grads = random_tree(rng), [random_tree(rng) for _ in range(3)]
  weights, state, metrics = run(learner, SPECS, start, all_grads)
  signs = sum(np.sign(grads['router']['bias']) for grads in all_grads)
  np.testing.assert_allclose(weights['router']['bias'], start['router']['bias'] - 1e-3 * signs, rtol=1e-6)

  others, other_state, other_metrics = run(
    learner, WITHOUT_BIAS, without_bias(start), [without_bias(grads) for grads in all_grads]
  )
  jax.tree.map(np.testing.assert_array_equal, without_bias(weights), others)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state.opt_state), jax.tree.leaves(other_state.opt_state))
  assert metrics['grad_norm'] == other_metrics['grad_norm']
  assert metrics['weight_norm'] > other_metrics['weight_norm']  # includes the bias


def test_balanced_load_and_rate_0_do_not_change_it(rng):
  start, grads = random_tree(rng), random_tree(rng)
  balanced = grads | {'router': grads['router'] | {'bias': jnp.zeros((2, 3))}}
  for rate, step_grads in [(1.0, balanced), (0.0, grads)]:
    learner = Learner(optimizer=optax.sgd(1.0), balance_bias_rate=rate)
    weights, _, _ = run(learner, SPECS, start, [step_grads])
    np.testing.assert_array_equal(weights['router']['bias'], start['router']['bias'])


def test_a_skipped_step_does_not_change_it(rng):
  learner = Learner(optimizer=AdamW(learning_rate=0.1), ema_decay=0.5)
  start, grads = random_tree(rng), random_tree(rng)
  weights, state, metrics = run(learner, SPECS, start, [grads], [np.nan])
  assert metrics['skipped'] == 1
  jax.tree.map(np.testing.assert_array_equal, (weights, state.ema_weights), (start, start))
