"""Combining rows, against loops in float64, and what is kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe.combine import combine_rows, dequantize_rows, quantize_rows
from spmd_tasks.layers.moe.permutation import sort_by_expert

E, D = 3, 5
NOWHERE = E
IDS = np.array([[2, 0], [1, 2], [NOWHERE, NOWHERE], [0, 1], [2, NOWHERE], [1, 2]], np.int32)


@pytest.fixture
def case(rng):
  permutation = sort_by_expert(jnp.asarray(IDS), E)
  rows = rng.normal(size=(IDS.size, D)).astype(np.float32)
  gates = np.where(IDS == NOWHERE, 0.0, rng.uniform(0.1, 1.0, IDS.shape)).astype(np.float32)
  d_result = rng.normal(size=(len(IDS), D)).astype(np.float32)
  return rows, gates, permutation, d_result


def reference(rows, gates, permutation, d_result):
  """(result, d rows, d gates) in float64."""
  rows, gates, d_result = (np.asarray(x, np.float64) for x in (rows, gates, d_result))
  result, d_rows, d_gates = np.zeros_like(d_result), np.zeros_like(rows), np.zeros_like(gates)
  for token, choice in np.ndindex(*gates.shape):
    row = int(permutation.positions[token, choice])
    if gates[token, choice] == 0:
      continue
    result[token] += gates[token, choice] * rows[row]
    d_rows[row] = gates[token, choice] * d_result[token]
    d_gates[token, choice] = rows[row] @ d_result[token]
  return result, d_rows, d_gates


def run(rows, gates, permutation, d_result, saved_bits=None):
  arrays = [jnp.asarray(x) for x in (rows, gates)]
  result, vjp = jax.vjp(lambda r, g: combine_rows(r, g, permutation, saved_bits=saved_bits), *arrays)
  return result, *vjp(jnp.asarray(d_result))


def test_result_and_gradients(case):
  for actual, expected in zip(run(*case), reference(*case), strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('saved_bits', [None, 4, 8])
def test_rows_of_no_assignment_spread_no_nan(case, saved_bits):
  rows, gates, permutation, d_result = case
  expected = run(*case, saved_bits)
  nowhere = np.arange(len(rows)) >= np.sum(permutation.group_sizes)
  spoilt = np.where(nowhere[:, None], np.nan, rows)
  for actual, clean in zip(run(spoilt, gates, permutation, d_result, saved_bits), expected, strict=True):
    np.testing.assert_array_equal(actual, clean)


@pytest.mark.parametrize(('saved_bits', 'limit'), [(8, 127), (4, 7)])
def test_saved_bits_change_the_gradient_of_the_gates_only_and_by_the_step_at_most(case, saved_bits, limit):
  rows, _, permutation, d_result = case
  result, d_rows, d_gates = run(*case)
  quantized_result, quantized_d_rows, quantized_d_gates = run(*case, saved_bits)
  np.testing.assert_array_equal(quantized_result, result)
  np.testing.assert_array_equal(quantized_d_rows, d_rows)
  half_steps = np.max(np.abs(rows), axis=1) / limit / 2
  bound = half_steps[permutation.positions] * np.sum(np.abs(d_result), axis=1)[:, None]
  error = np.abs(quantized_d_gates - d_gates)
  assert (error <= bound * (1 + 1e-5)).all()
  assert error.max() > 0.05 * bound.max()  # they are quantized


@pytest.mark.parametrize('num_columns', [1, 4, 5])
@pytest.mark.parametrize(('bits', 'limit'), [(8, 127), (4, 7)])
def test_quantized_rows_hold_whole_steps_exactly(bits, limit, num_columns):
  codes = np.concatenate([[[limit] * num_columns, [-limit] * num_columns, [0] * num_columns]]).astype(np.float32)
  codes = np.concatenate([codes, np.linspace(-limit, limit, 3 * num_columns).round().reshape(3, -1)]).astype(np.float32)
  codes[:, 0] = limit  # so that the step of every row is known
  rows = codes * 0.25
  np.testing.assert_array_equal(dequantize_rows(quantize_rows(jnp.asarray(rows), bits)), rows)


@pytest.mark.parametrize(('saved_bits', 'bytes_per_row'), [(None, 4 * 64), (8, 64 + 4), (4, 32 + 4)])
def test_bytes_kept_for_the_backward_pass(saved_bits, bytes_per_row, rng):
  permutation = sort_by_expert(jnp.asarray(IDS), E)
  rows, gates = jnp.asarray(rng.normal(size=(IDS.size, 64)), jnp.float32), jnp.ones(IDS.shape, jnp.float32)
  kept = jax.jit(lambda r: jax.vjp(lambda r, g: combine_rows(r, g, permutation, saved_bits=saved_bits), r, gates)[1])(
    rows
  )
  of_rows = sum(leaf.nbytes for leaf in jax.tree.leaves(kept) if leaf.ndim == 2 and leaf.shape[0] == IDS.size)
  assert of_rows == IDS.size * bytes_per_row


def test_an_unknown_number_of_bits_is_refused(case):
  with pytest.raises(ValueError, match='saved_bits=2 must be None'):
    run(*case, saved_bits=2)
