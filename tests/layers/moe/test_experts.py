"""The experts of gpt-oss, whose activation has a formula of its own; test_dropless.py has the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import Experts, ExpertWeights
from spmd_tasks.layers.moe._experts import batched_ffn

NUM_ROWS, NUM_EXPERTS, MODEL_DIM, HIDDEN_DIM = 64, 4, 6, 10
SIZES = (5, 9, 0, 13)  # and rows past the end


def make_weights(rng):
  """Biases away from zero, and large enough for the limits of gpt-oss's activation."""
  draw = lambda scale, *shape: jnp.asarray(scale * rng.standard_normal((NUM_EXPERTS, *shape)), jnp.float32)
  return ExpertWeights(
    **{'up': draw(0.4, MODEL_DIM, HIDDEN_DIM), 'gate': draw(0.4, MODEL_DIM, HIDDEN_DIM)},
    **{'down': draw(0.3, HIDDEN_DIM, MODEL_DIM), 'down_bias': draw(6, MODEL_DIM)},
    **{'up_bias': draw(6, HIDDEN_DIM), 'gate_bias': draw(6, HIDDEN_DIM)},
    **{'activation': 'clamped_swiglu', 'up_split_dims': None, 'down_split_dims': None},
  )


def expert_of_gpt_oss(e, rows, weights):
  """Rows [R, D] through expert e, as its paper has it, with JAX's own gradients."""
  up = jnp.clip(rows @ weights.up[e] + weights.up_bias[e][None], -7, 7)
  gate = jnp.minimum(rows @ weights.gate[e] + weights.gate_bias[e][None], 7)
  return ((up + 1) * gate / (1 + jnp.exp(-1.702 * gate))) @ weights.down[e] + weights.down_bias[e][None]


@pytest.mark.parametrize('backend', ['loop', 'ragged_dot'])
def test_biases_and_a_clamped_activation(rng, backend):
  rows, d_result = (jnp.asarray(rng.standard_normal((NUM_ROWS, MODEL_DIM)), jnp.float32) for _ in range(2))
  weights, sizes = make_weights(rng), SIZES

  @jax.jit
  def with_gradients(rows, weights):
    ffn = lambda rows, weights: weights.apply_to_rows(rows, jnp.array(sizes, jnp.int32), jnp.ones(NUM_ROWS))
    result, pull_back = jax.vjp(ffn, rows, weights.replace(backend=backend))
    return result, *pull_back(d_result)

  actual = with_gradients(rows, weights)

  def reference(rows, weights):
    starts = np.cumsum(sizes) - sizes
    parts = [expert_of_gpt_oss(e, rows[i : i + n], weights) for e, (i, n) in enumerate(zip(starts, sizes))]
    return jnp.concatenate([*parts, jnp.zeros((NUM_ROWS - sum(sizes), MODEL_DIM))])

  @jax.jit
  def of_reference(rows, weights):
    result, pull_back = jax.vjp(reference, rows, weights)
    return result, *pull_back(d_result)

  for ours, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(of_reference(rows, weights)), strict=True):
    np.testing.assert_allclose(ours, expected, atol=1e-5 * max(1.0, np.abs(expected).max()), rtol=0)


def test_all_experts_at_once(rng):
  rows = jnp.asarray(rng.standard_normal((NUM_EXPERTS, 16, MODEL_DIM)), jnp.float32)

  @jax.jit
  def both(rows, weights):
    expected = jnp.stack([expert_of_gpt_oss(e, rows[e], weights) for e in range(NUM_EXPERTS)])
    return batched_ffn(rows.reshape(NUM_EXPERTS, 4, 4, MODEL_DIM), weights).reshape(rows.shape), expected

  np.testing.assert_allclose(*both(rows, make_weights(rng)), rtol=1e-4, atol=1e-4)


def test_an_activation_with_a_formula_of_its_own_needs_a_gate():
  with pytest.raises(ValueError, match="'clamped_swiglu' needs a gate: choose one of"):
    Experts(num_experts=2, hidden_dim=3, gated=False, activation='clamped_swiglu').init(jax.random.key(0), 4)
