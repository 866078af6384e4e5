"""The grouped matmul block by block: our own form, for CPU.

Shapes: R rows, E groups, K in, N out.
"""

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.row_blocks import RowBlock, for_each_block, vary_alike


def dot(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
  """Contracts dim `x_dim` of x with `y_dim` of y, two matrices, in float32."""
  return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=jnp.float32)


def multiply_by_loop(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """`grouped_matmul` with arguments in place."""
  return _multiply(*vary_alike(rows, weights, group_sizes))


@jax.custom_vjp
def _multiply(rows, weights, group_sizes):
  def body(block: RowBlock, result):
    return block.write(result, dot(block.read(rows), block.read_matrix(weights), 1, 0))

  result = jnp.zeros_like(rows, shape=(rows.shape[0], weights.shape[2]))
  return for_each_block(body, result, rows.shape[0], group_sizes)


def _forward(rows, weights, group_sizes):
  return _multiply(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(saved, d_result):
  rows, weights, group_sizes = saved

  def body(block: RowBlock, carry):
    d_rows, d_weights = carry
    d_block = block.read(d_result)
    d_rows = block.write(d_rows, dot(d_block, block.read_matrix(weights), 1, 1))
    return d_rows, block.add_matrix(d_weights, dot(block.read(rows), d_block, 0, 0))

  carry = jnp.zeros_like(rows), jnp.zeros_like(weights, dtype=jnp.float32)
  d_rows, d_weights = for_each_block(body, carry, rows.shape[0], group_sizes)
  return d_rows, d_weights.astype(weights.dtype), None


_multiply.defvjp(_forward, _backward)
