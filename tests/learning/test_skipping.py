"""Every transformation can be skipped; Adam's, which chooses before it computes a direction, copies nothing for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning.skipping import chain, scale_by_adam, skippable

BETAS = {'beta1': 0.8, 'beta2': 0.9, 'epsilon': 1e-6}


def draw(rng):
  return {'kernel': jnp.asarray(rng.normal(size=(4, 6)), jnp.float32), 'scale': jnp.asarray(rng.normal(size=6), 'f4')}


TRANSFORMATIONS = {
  'adam': scale_by_adam(**BETAS, momentum_dtype='bfloat16'),
  'trace': skippable(optax.trace(0.9)),
  'chain': chain(
    optax.scale_by_lion(), optax.add_decayed_weights(0.1), scale_by_adam(**BETAS, momentum_dtype='float32')
  ),
}


@pytest.mark.parametrize('name', TRANSFORMATIONS)
def test_a_skipped_update_returns_the_state_that_it_was_given(name, rng):
  transformation, weights = TRANSFORMATIONS[name], draw(rng)
  _, state = transformation.update(draw(rng), transformation.init(weights), weights, is_finite=jnp.bool(True))
  bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), draw(rng))
  _, kept = transformation.update(bad, state, weights, is_finite=jnp.bool(False))
  jax.tree.map(np.testing.assert_array_equal, kept, state)
  _, changed = transformation.update(draw(rng), state, weights, is_finite=jnp.bool(True))
  assert not np.array_equal(jax.tree.leaves(changed)[-1], jax.tree.leaves(state)[-1])
