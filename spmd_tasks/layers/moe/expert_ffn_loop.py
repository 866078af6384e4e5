"""Experts' feed-forward networks block by block, for CPU.

A block goes through its expert's whole network while it is in the cache. The pre-activation is all that is saved of
the hidden layer: to compute an activation again costs less than to write it to memory and read it back. The gradient
of a weight is written once per expert, not summed over all experts.

Shapes: R rows, E experts, D model, F ffn, S rows of a block.
"""

import functools

import jax
import jax.numpy as jnp

from spmd_tasks.layers.feed_forward import hidden_layer
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.grouped_matmul_loop import dot
from spmd_tasks.layers.moe.row_blocks import RowBlock, for_each_block, vary_alike


def ffn_by_loop(rows: jax.Array, group_sizes: jax.Array, weights: ExpertWeights) -> jax.Array:
  """`grouped_ffn`, always with the activation recomputed."""
  rows, group_sizes, up, gate, down = vary_alike(rows, group_sizes, weights.up, weights.gate, weights.down)
  inputs = (up,) if gate is None else (up, gate)
  return _ffn(weights.activation, rows, group_sizes, inputs, down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(activation, rows, group_sizes, inputs, down):
  """`inputs` are the kernels [E, D, F] into the hidden layer, as `hidden_layer` takes their results."""
  return _run(activation, rows, group_sizes, inputs, down, saved=())[0]


def _run(activation, rows, group_sizes, inputs, down, saved):
  """Returns the result and `saved`, arrays [R, F] as many as inputs or none, filled with the pre-activations."""

  def body(block: RowBlock, carry):
    result, saved = carry
    x = block.read(rows)
    pre_activations = [dot(x, block.read_matrix(kernels), 1, 0).astype(rows.dtype) for kernels in inputs]
    saved = tuple(block.write(*pair) for pair in zip(saved, pre_activations))
    hidden = hidden_layer(activation, *pre_activations)
    return block.write(result, dot(hidden, block.read_matrix(down), 1, 0)), saved

  return for_each_block(body, (jnp.zeros_like(rows), saved), rows.shape[0], group_sizes)


def _forward(activation, rows, group_sizes, inputs, down):
  empty = jnp.zeros_like(rows, shape=(rows.shape[0], down.shape[1]))
  result, saved = _run(activation, rows, group_sizes, inputs, down, (empty,) * len(inputs))
  return result, (rows, group_sizes, inputs, down, saved)


def _backward(activation, residuals, d_result):
  rows, group_sizes, inputs, down, saved = residuals

  def body(block: RowBlock, carry):
    d_rows, d_inputs, d_down = carry
    x, d_block = block.read(rows), block.read(d_result)
    hidden, pull_back = jax.vjp(functools.partial(hidden_layer, activation), *[block.read(pre) for pre in saved])
    d_hidden = dot(d_block, block.read_matrix(down), 1, 1).astype(rows.dtype)
    d_down = block.add_matrix(d_down, dot(hidden, d_block, 0, 0))
    d_pres = pull_back(d_hidden)
    d_inputs = tuple(block.add_matrix(d, dot(x, d_pre, 0, 0)) for d, d_pre in zip(d_inputs, d_pres))
    d_xs = [dot(d_pre, block.read_matrix(kernels), 1, 1) for kernels, d_pre in zip(inputs, d_pres)]
    return block.write(d_rows, functools.reduce(jnp.add, d_xs)), d_inputs, d_down

  zeros = functools.partial(jnp.zeros_like, dtype=jnp.float32)
  carry = jnp.zeros_like(rows), tuple(map(zeros, inputs)), zeros(down)
  d_rows, d_inputs, d_down = for_each_block(body, carry, rows.shape[0], group_sizes)
  return d_rows, None, tuple(d.astype(kernels.dtype) for d, kernels in zip(d_inputs, inputs)), d_down.astype(down.dtype)


_ffn.defvjp(_forward, _backward)
