"""batched_ffn against one expert after the other."""

from capacity_reference import expert_ffn
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe.batched_ffn import batched_ffn
from spmd_tasks.layers.moe.experts import ExpertWeights


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('inner_shape', [(4,), (2, 3)])
def test_each_expert_computes_its_own_rows(gated, inner_shape, rng):
  rows = rng.normal(size=(3, *inner_shape, 5)).astype(np.float32)
  up, gate = rng.normal(size=(2, 3, 5, 7)).astype(np.float32)
  down = rng.normal(size=(3, 7, 5)).astype(np.float32)
  weights = ExpertWeights(
    up=jnp.asarray(up),
    down=jnp.asarray(down),
    gate=jnp.asarray(gate) if gated else None,
    activation='silu',
    up_split_dims=None,
    down_split_dims=None,
  )
  result = batched_ffn(jnp.asarray(rows), weights)
  for index in np.ndindex(3, *inner_shape):
    e = index[0]
    expected = expert_ffn(*(a.astype(np.float64) for a in (rows[index], up[e], down[e])), gate[e] if gated else None)
    np.testing.assert_allclose(result[index], expected, rtol=1e-4, atol=1e-5)
