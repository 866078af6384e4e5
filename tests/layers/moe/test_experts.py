"""The experts' networks against float64: over sorted rows, forward and all gradients, and over batched rows.

Shapes: R = 64 rows, E = 4 experts, D = 6 model, F = 10 ffn, L = 3 layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import Experts, ExpertWeights
from spmd_tasks.layers.moe._experts import batched_ffn, grouped_ffn

NUM_ROWS, NUM_EXPERTS, MODEL_DIM, HIDDEN_DIM, NUM_LAYERS = 64, 4, 6, 10, 3
GROUP_SIZES = {
  'balanced': (16, 16, 16, 16),
  'skewed': (37, 3, 20, 4),
  'one has all': (0, 0, 64, 0),
  'none has any': (0, 0, 0, 0),
  'rows past the end': (5, 9, 0, 13),
}


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


# The activations and their derivatives, in float64.
ACTIVATIONS = {
  'relu': (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
  'silu': (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
}


def reference(activation, group_sizes, rows, up, down, gate, d_result):
  """The result and the gradients of rows, up, down and gate (None for a plain network), expert by expert."""
  act, act_derivative = ACTIVATIONS[activation]
  result, d_rows, d_up, d_down = (np.zeros_like(x) for x in (rows, rows, up, down))
  d_gate = None if gate is None else np.zeros_like(gate)
  ends = np.cumsum(group_sizes)
  for e, (start, end) in enumerate(zip(ends - group_sizes, ends)):
    x, dy, linear = rows[start:end], d_result[start:end], rows[start:end] @ up[e]
    activated = linear if gate is None else x @ gate[e]
    factor = 1 if gate is None else linear
    hidden, d_hidden = act(activated) * factor, dy @ down[e].T
    d_activated = d_hidden * factor * act_derivative(activated)
    result[start:end] = hidden @ down[e]
    d_down[e] = hidden.T @ dy
    if gate is None:
      d_up[e] = x.T @ d_activated
      d_rows[start:end] = d_activated @ up[e].T
    else:
      d_linear = d_hidden * act(activated)
      d_up[e], d_gate[e] = x.T @ d_linear, x.T @ d_activated
      d_rows[start:end] = d_linear @ up[e].T + d_activated @ gate[e].T
  return result, d_rows, d_up, d_down, d_gate


def make_weights(rng, activation, gated, dtype='float32'):
  up, gate = (jnp.asarray(rng.standard_normal((NUM_EXPERTS, MODEL_DIM, HIDDEN_DIM)) * 0.4, dtype) for _ in range(2))
  down = jnp.asarray(rng.standard_normal((NUM_EXPERTS, HIDDEN_DIM, MODEL_DIM)) * 0.3, dtype)
  return ExpertWeights(
    up=up, down=down, gate=gate if gated else None, activation=activation, up_split_dims=None, down_split_dims=None
  )


def make_rows(rng, dtype='float32'):
  return jnp.asarray(rng.standard_normal((NUM_ROWS, MODEL_DIM)), dtype)


@functools.cache
def compiled(backend):
  """The result and the gradients, jitted: sizes are arguments, so that all cases share one compilation."""

  def run(rows, group_sizes, weights, d_result):
    def ffn(rows, weights):
      return grouped_ffn(rows, group_sizes, weights, backend=backend)

    result, pull_back = jax.vjp(ffn, rows, weights)
    return result, *pull_back(d_result)

  return jax.jit(run)


def with_biases(weights, rng):
  """Away from zero, and large enough for the limits of gpt-oss's activation."""
  sizes = {'up_bias': HIDDEN_DIM, 'gate_bias': HIDDEN_DIM, 'down_bias': MODEL_DIM}
  return weights.replace(
    **{name: jnp.asarray(6 * rng.standard_normal((NUM_EXPERTS, size)), 'float32') for name, size in sizes.items()}
  )


def expert_of_gpt_oss(e, rows, weights):
  """Rows [R, D] through expert e, as its paper has it, with JAX's own gradients."""
  up = jnp.clip(rows @ weights.up[e] + weights.up_bias[e][None], -7, 7)
  gate = jnp.minimum(rows @ weights.gate[e] + weights.gate_bias[e][None], 7)
  return ((up + 1) * gate / (1 + jnp.exp(-1.702 * gate))) @ weights.down[e] + weights.down_bias[e][None]


@pytest.mark.parametrize('backend', ['loop', 'ragged_dot'])
def test_biases_and_a_clamped_activation(rng, backend):
  rows, d_result = make_rows(rng), make_rows(rng)
  weights, sizes = with_biases(make_weights(rng, 'clamped_swiglu', True), rng), GROUP_SIZES['rows past the end']
  actual = compiled(backend)(rows, jnp.array(sizes, jnp.int32), weights, d_result)

  def reference(rows, weights):
    starts = np.cumsum(sizes) - sizes
    parts = [expert_of_gpt_oss(e, rows[i : i + n], weights) for e, (i, n) in enumerate(zip(starts, sizes))]
    return jnp.concatenate([*parts, jnp.zeros((NUM_ROWS - sum(sizes), MODEL_DIM))])

  result, pull_back = jax.vjp(reference, rows, weights)
  for ours, expected in zip(jax.tree.leaves(actual), jax.tree.leaves((result, *pull_back(d_result))), strict=True):
    np.testing.assert_allclose(ours, expected, atol=1e-5 * max(1.0, np.abs(expected).max()), rtol=0)
  batched = batched_ffn(rows.reshape(NUM_EXPERTS, 4, 4, MODEL_DIM), weights)
  for e in range(NUM_EXPERTS):
    expected = expert_of_gpt_oss(e, rows.reshape(NUM_EXPERTS, 16, MODEL_DIM)[e], weights)
    np.testing.assert_allclose(batched[e].reshape(16, MODEL_DIM), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('backend', ['loop', 'ragged_dot'])
def test_gates_multiply_the_results(rng, backend):
  """Biases included; the gates of rows past the end take no part."""
  rows, d_result = make_rows(rng), make_rows(rng)
  weights, sizes = with_biases(make_weights(rng, 'silu', True), rng), jnp.array(GROUP_SIZES['rows past the end'])
  num_used = sum(GROUP_SIZES['rows past the end'])
  gates = jnp.asarray(rng.uniform(0.1, 1.0, NUM_ROWS), jnp.float32)

  def inside(rows, weights, gates):
    return grouped_ffn(rows, sizes, weights, gates=gates, backend=backend)

  def outside(rows, weights, gates):
    return gates[:, None] * grouped_ffn(rows, sizes, weights, backend='ragged_dot')

  @functools.partial(jax.jit, static_argnums=0)
  def with_gradients(ffn, *args):
    result, pull_back = jax.vjp(ffn, *args)
    return result, *pull_back(d_result)

  *actual, d_gates = with_gradients(inside, rows, weights, gates.at[num_used:].set(9.0))
  *expected, expected_d_gates = with_gradients(outside, rows, weights, gates)
  np.testing.assert_allclose(d_gates[:num_used], expected_d_gates[:num_used], rtol=1e-4, atol=1e-4)
  for ours, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, other, atol=1e-5 * max(1.0, np.abs(other).max()), rtol=0)


def test_an_activation_with_a_formula_of_its_own_needs_a_gate():
  with pytest.raises(ValueError, match=r"'clamped_swiglu' is unknown \(it needs a gate\): choose one of"):
    Experts(num_experts=2, hidden_dim=3, gated=False, activation='clamped_swiglu').init(jax.random.key(0), 4)
