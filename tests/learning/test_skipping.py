"""Every transformation can be skipped; Adam's, which chooses before it computes a direction, copies nothing for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning.skipping import chain, keep_if_finite, scale_by_adam, skippable

BETAS = {'beta1': 0.8, 'beta2': 0.9, 'epsilon': 1e-6}


def draw(rng):
  return {'kernel': jnp.asarray(rng.normal(size=(4, 6)), jnp.float32), 'scale': jnp.asarray(rng.normal(size=6), 'f4')}


@pytest.mark.parametrize('momentum_dtype', ['float32', 'bfloat16'])
def test_adam_is_optax_adam(momentum_dtype, rng):
  adam = scale_by_adam(**BETAS, momentum_dtype=momentum_dtype)
  reference = optax.scale_by_adam(b1=0.8, b2=0.9, eps=1e-6, mu_dtype=jnp.dtype(momentum_dtype))
  state = adam.init(draw(rng))
  reference_state = reference.init(draw(rng))
  for _ in range(3):
    grads = draw(rng)
    directions, state = adam.update(grads, state, is_finite=jnp.bool(True))
    expected, reference_state = reference.update(grads, reference_state)
    assert jax.tree.structure(state) == jax.tree.structure(reference_state)
    for a, b in zip(jax.tree.leaves((directions, state)), jax.tree.leaves((expected, reference_state)), strict=True):
      assert a.dtype == b.dtype
      # optax also computes with a bfloat16 moment in bfloat16, we only store it so.
      rtol, atol = (1e-6, 0.0) if momentum_dtype == 'float32' else (1e-2, 1e-2)
      np.testing.assert_allclose(a.astype('float32'), b.astype('float32'), rtol=rtol, atol=atol)


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


@pytest.mark.parametrize(
  'scale, copies', [(scale_by_adam(**BETAS, momentum_dtype='float32'), False), (optax.scale_by_adam(), True)]
)
def test_skipping_adam_copies_no_moment(scale, copies, rng):
  """Compiled, with weights and moments donated. If optax's copies nothing either one day, ours is not needed."""
  transformation, weights = chain(scale), draw(rng)

  def step(weights, state, grads):
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm)
    directions, state = transformation.update(
      jax.tree.map(lambda g: g / norm, grads), state, weights, is_finite=is_finite
    )
    return keep_if_finite(is_finite, jax.tree.map(jnp.subtract, weights, directions), weights), state

  program = jax.jit(step, donate_argnums=(0, 1)).lower(weights, transformation.init(weights), weights).compile()
  assert bool(re.search(r'f32\[4,6\]\S* copy\(', program.as_text())) == copies
