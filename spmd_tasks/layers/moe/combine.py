"""combine_rows: the experts' results, weighted by the gates and summed per token.

Shapes: n tokens, k choices per token, R = n * k rows, D model.

The rows are kept for one purpose only, the gradient of the gates. They may be kept in 8 or 4 bits (MegaBlocks'
quantize_scatter): the result and the gradient of the rows stay what they are.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.permutation import Permutation, take_rows


class QuantizedRows(struct.PyTreeNode):
  """Rows in whole steps of each row's own size, rounded to nearest: at most half a step off.

  Attributes:
    codes: int8 [R, D]; or uint8 [R, ceil(D / 2)], columns 2i and 2i + 1 in the low and the high half of a byte.
    steps: float32 [R, 1], the row's largest magnitude over 127 or over 7.
    num_columns: D.
  """

  codes: jax.Array
  steps: jax.Array
  num_columns: int = struct.field(pytree_node=False)


def quantize_rows(rows: jax.Array, bits: int) -> QuantizedRows:
  """Quantizes rows [R, D] to 8 or 4 bits."""
  rows = rows.astype(jnp.float32)
  limit = 2 ** (bits - 1) - 1
  steps = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / limit
  codes = jnp.round(rows / jnp.where(steps == 0, 1.0, steps)).astype(jnp.int8)
  if bits == 4:
    codes = jnp.pad(codes, ((0, 0), (0, rows.shape[1] % 2))) + 8
    codes = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(jnp.uint8)
  return QuantizedRows(codes=codes, steps=steps, num_columns=rows.shape[1])


def dequantize_rows(quantized: QuantizedRows) -> jax.Array:
  """Float32 [R, D]."""
  codes = quantized.codes
  if codes.dtype == jnp.uint8:
    halves = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    codes = halves[:, : quantized.num_columns].astype(jnp.int8) - 8
  return codes.astype(jnp.float32) * quantized.steps


def combine_rows(
  rows: jax.Array, gates: jax.Array, permutation: Permutation, *, saved_bits: int | None = None
) -> jax.Array:
  """[n, D], for each token the sum over its rows times their gates, accumulated in float32, in the rows' dtype.

  A gate of 0 is no assignment: its row may hold anything, and it takes no gradient. The gradient of the gates is
  <d result, row>, that of the rows gate * d result; both are gathers.

  Args:
    rows: [R, D], in the order of `permutation`.
    gates: float32 [n, k].
    permutation: of the assignments.
    saved_bits: None keeps the rows as they are for the backward pass; 8 and 4 keep that many bits per element, and
      the gradient of the gates is off by at most sum(|d result|) * (largest magnitude in the row) / (254 or 14).

  Raises:
    UserError: saved_bits is none of these.
  """
  if saved_bits not in (None, 4, 8):
    raise UserError(f'saved_bits={saved_bits} must be None (keep the rows as they are), 8 or 4.')
  return _combine_rows(saved_bits, rows, gates, permutation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine_rows(saved_bits, rows, gates, permutation):
  del saved_bits
  result = jnp.zeros((), jnp.float32)
  # Choice by choice, as one gather of [n, k, D] would be written to memory before it is summed.
  for choice in range(gates.shape[1]):
    gate = gates[:, choice, None]
    result += jnp.where(gate == 0, 0.0, gate * take_rows(rows, permutation.positions[:, choice]))
  return result.astype(rows.dtype)


def _combine_rows_forward(saved_bits, rows, gates, permutation):
  saved = rows if saved_bits is None else quantize_rows(rows, saved_bits)
  return _combine_rows(saved_bits, rows, gates, permutation), (saved, gates, permutation)


def _combine_rows_backward(saved_bits, residuals, d_result):
  saved, gates, permutation = residuals
  rows = saved if saved_bits is None else dequantize_rows(saved)
  d_row_results = take_rows(d_result, permutation.token_ids)
  d_row_gates = jnp.einsum('rd,rd->r', rows, d_row_results, preferred_element_type=jnp.float32)
  d_gates = jnp.where(gates == 0, 0.0, take_rows(d_row_gates, permutation.positions))
  row_gates = jnp.zeros_like(d_row_gates)
  row_gates = row_gates.at[permutation.positions.reshape(-1)].set(gates.reshape(-1), mode='drop')
  d_rows = row_gates[:, None] * d_row_results
  return d_rows.astype(d_result.dtype), d_gates, None


_combine_rows.defvjp(_combine_rows_forward, _combine_rows_backward)
