"""A weight that the optimizer does not train is excluded from clipping, skipping and metrics, like a frozen one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import AdamW, FromOptax, Learner, MultiOptimizer
from spmd_tasks.learning.unread_gradients import unread_gradients
from spmd_tasks.sharding import WeightSpec

SPECS = {
  'a': WeightSpec(shape=(2, 3, 2), init=None, stacked=1, num_input_dims=1),
  'b': WeightSpec(shape=(2, 3, 2), init=None, stacked=1, num_input_dims=1),
}
WEIGHTS = {name: jnp.ones(spec.shape) for name, spec in SPECS.items()}
LABELS = {'a': 'trained', 'b': 'untrained'}
ZERO = optax.set_to_zero()
OPTIMIZERS = {
  'MultiOptimizer': MultiOptimizer(optimizers=(('a', FromOptax(factory=optax.sgd, learning_rate=1.0)),)),
  'partition': optax.partition({'trained': optax.sgd(1.0), 'untrained': ZERO}, LABELS),
  'label function': optax.multi_transform({'trained': optax.sgd(1.0), 'untrained': ZERO}, lambda tree: LABELS),
  'set to zero last': optax.chain(optax.trace(0.0), optax.sgd(1.0), optax.masked(ZERO, {'a': False, 'b': True})),
  'frozen first': optax.chain(optax.freeze({'a': False, 'b': True}), optax.sgd(1.0)),
  'MultiSteps': optax.MultiSteps(optax.partition({'trained': optax.sgd(1.0), 'untrained': ZERO}, LABELS), 1),
}


def step(optimizer, grads, clip_global_norm=None):
  learner = Learner(optimizer=optimizer, clip_global_norm=clip_global_norm)
  state = learner.init(WEIGHTS, SPECS)
  update = lambda grads, state: learner.update(grads, jnp.float32(1), jnp.int32(0), state, WEIGHTS, SPECS)
  return jax.jit(update)(grads, state)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_norms_are_of_trained_weights(name):
  grads = {'a': jnp.full((2, 3, 2), 3.0), 'b': jnp.full((2, 3, 2), 50.0)}
  new, _, metrics = step(OPTIMIZERS[name], grads, clip_global_norm=1.0)
  np.testing.assert_allclose(metrics['grad_norm'], 3 * np.sqrt(12), rtol=1e-6)
  np.testing.assert_allclose(jnp.linalg.norm(new['a'] - 1), 1.0, rtol=1e-6)
  np.testing.assert_allclose(metrics['weight_norm'], jnp.linalg.norm(new['a']), rtol=1e-6)
  np.testing.assert_array_equal(new['b'], WEIGHTS['b'])


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_unread_non_finite_gradient_does_not_skip_the_step(name):
  grads = {'a': jnp.ones((2, 3, 2)), 'b': jnp.full((2, 3, 2), jnp.nan)}
  new, state, metrics = step(OPTIMIZERS[name], grads)
  assert metrics['skipped'] == 0
  np.testing.assert_array_equal(new['a'], np.zeros((2, 3, 2)))
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


CLIP = optax.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
  'transformation, expected',
  [
    (optax.adam(0.1), (False, False)),
    (optax.masked(optax.sgd(1.0), {'a': True, 'b': False}), (False, False)),  # the update of b is its gradient
    (OPTIMIZERS['partition'], (False, True)),
    (optax.chain(CLIP, optax.freeze({'a': False, 'b': True})), (False, False)),  # the norm includes b
    (optax.chain(optax.freeze({'a': False, 'b': True}), CLIP), (False, True)),
    (optax.chain(optax.contrib.prodigy(), optax.freeze({'a': False, 'b': True})), (False, False)),  # in its state
    (ZERO, (True, True)),
  ],
)
def test_gradients_that_no_update_depends_on_are_unread(transformation, expected):
  state = transformation.init(WEIGHTS)
  unread = unread_gradients(lambda grads, state: transformation.update(grads, state, WEIGHTS), WEIGHTS, state)
  assert (unread['a'], unread['b']) == expected


def test_our_optimizers_read_all_gradients():
  transformation = AdamW(learning_rate=0.1, weight_decay=0.1).transformation(SPECS)
  update = lambda grads, state: transformation.update(grads, state, WEIGHTS, is_finite=jnp.bool_(True))
  assert unread_gradients(update, WEIGHTS, transformation.init(WEIGHTS)) == {'a': False, 'b': False}
