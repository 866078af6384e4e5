"""The backend 'loop': grouped matmuls and experts' networks block by block, written for CPU.

XLA's CPU backend has no grouped matmul, but multiplies one block of rows by one matrix as fast as a whole array.
Rows sorted by group are therefore cut into blocks of a few static sizes (_row_blocks.py); a loop multiplies each block
by its group's matrix and writes the product in place.

`ffn_by_loop` applies an expert's whole network, gates included, to a block while the block is in the cache. It saves
only the pre-activation of the hidden layer, because computing an activation again costs less than writing it to memory
and reading it back, or nothing where the backward pass is to compute that again too. The gradients of weights are added
up in place.

Shapes: R rows, E groups (experts), S rows of a block; K and N the dims of a matrix; D model, F ffn.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.feed_forward import PRE_ACTIVATIONS_NAME, hidden_layer
from spmd_tasks.layers.moe._row_blocks import RowBlock, RowBlocks, locate_blocks
from spmd_tasks.layers.transformer import ROUTING_NAME

# A kernel of each expert with its bias, or None.
Pair = tuple[jax.Array, jax.Array | None]


def vary_alike(*arrays: jax.Array | None) -> tuple[Any, ...]:
  """Casts the arrays to vary over the same mesh axes: over each axis that any of them varies over.

  Loops inside a `shard_map` with check_vma=True require equal varying axes; elsewhere the cast does nothing.
  """
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays if x is not None))

  def cast(x):
    missing = () if x is None else tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  return tuple(cast(x) for x in arrays)


def dot(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
  """Contracts dim `x_dim` of the matrix x with dim `y_dim` of the matrix y, in float32."""
  return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=jnp.float32)


def multiply_by_loop(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul` block by block: rows [R, K] times weights [E, K, N] to [R, N]."""
  rows, weights, group_sizes = vary_alike(rows, weights, group_sizes)
  return _multiply(rows, weights, _locate(rows, group_sizes))


def _locate(rows: jax.Array, group_sizes: jax.Array) -> RowBlocks:
  """Locates the blocks; every remat policy keeps them, so that the backward pass does not."""
  blocks = locate_blocks(rows.shape[0], group_sizes)
  return blocks.replace(table=checkpoint_name(blocks.table, ROUTING_NAME))


@jax.custom_vjp
def _multiply(rows, weights, blocks):
  def body(block: RowBlock, result):
    return block.write(result, dot(block.read(rows), block.read_matrix(weights), 1, 0))

  result = jnp.zeros_like(rows, shape=(rows.shape[0], weights.shape[2]))
  return blocks.for_each(body, result)


def _multiply_forward(rows, weights, blocks):
  return _multiply(rows, weights, blocks), (rows, weights, blocks)


def _multiply_backward(saved, d_result):
  rows, weights, blocks = saved

  def body(block: RowBlock, carry):
    d_rows, d_weights = carry
    d_block = block.read(d_result)
    d_rows = block.write(d_rows, dot(d_block, block.read_matrix(weights), 1, 1))
    return d_rows, block.add_matrix(d_weights, dot(block.read(rows), d_block, 0, 0))

  carry = jnp.zeros_like(rows), jnp.zeros_like(weights, dtype=jnp.float32)
  d_rows, d_weights = blocks.for_each(body, carry)
  return d_rows, d_weights.astype(weights.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


class Projection(NamedTuple):
  """A linear map of each expert.

  Attributes:
    kernels: [E, K, N].
    biases: [E, 1, N], or None.
  """

  kernels: jax.Array
  biases: jax.Array | None

  def apply(self, block: RowBlock, x: jax.Array, gates: jax.Array | None = None) -> jax.Array:
    """Returns float32 [S, N] for rows x [S, K] of the block's group; gates [S, 1] multiply the biases only."""
    y = dot(x, block.read_matrix(self.kernels), 1, 0)
    if self.biases is None:
      return y
    bias = block.read_matrix(self.biases)
    return y + (bias if gates is None else gates * bias)

  def add_gradient(self, block: RowBlock, x: jax.Array, d_y: jax.Array, gates: jax.Array | None = None) -> 'Projection':
    """Returns these sums of gradients, [E, K, N] and [E, 1, N], with those of a block added."""
    kernels = block.add_matrix(self.kernels, dot(x, d_y, 0, 0))
    if self.biases is None:
      return Projection(kernels, None)
    d_bias = d_y if gates is None else gates * d_y
    return Projection(kernels, block.add_matrix(self.biases, jnp.sum(d_bias, axis=0, keepdims=True, dtype=jnp.float32)))


def ffn_by_loop(
  activation: str,
  rows: jax.Array,
  gates: jax.Array | None,
  group_sizes: jax.Array,
  inputs: Sequence[Pair],
  down: Pair,
  *,
  sums: Sequence[Pair] | None = None,
  saves_pre_activations: bool = True,
) -> jax.Array:
  """Computes `grouped_ffn` block by block, always recomputing the activation.

  Args:
    activation: see `hidden_layer`.
    rows: [R, D], sorted by expert.
    gates: float32 [R], or None.
    group_sizes: int32 [E].
    inputs: kernels [E, D, F] into the hidden layer with their biases [E, F] or None, in the order of `hidden_layer`'s
      arguments.
    down: the kernel [E, F, D] with its bias [E, D] or None.
    sums: float32, of the shapes of `inputs` and `down`: their own gradient is the sums with the gradients of these
      weights added, which then have none.
    saves_pre_activations: False computes them again in the backward pass, block by block.
  """

  def projections(pairs: Sequence[Pair]) -> Iterator[Projection]:
    for kernels, biases in pairs:
      yield Projection(kernels, None if biases is None else biases[:, None, :])

  tree = rows, gates, group_sizes, tuple(projections(inputs)), *projections([down]), None
  if sums is not None:
    tree = *tree[:-1], tuple(projections(sums))
  arrays, structure = jax.tree.flatten(tree)
  rows, gates, group_sizes, inner, outer, totals = jax.tree.unflatten(structure, vary_alike(*arrays))
  gates = None if gates is None else gates[:, None]
  blocks = _locate(rows, group_sizes)
  return _ffn(activation, saves_pre_activations, rows, gates, blocks, inner, outer, totals)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ffn(activation, saves_pre_activations, rows, gates, blocks, inputs, down, sums):
  """`gates` are [R, 1], or None; `inputs` the projections into the hidden layer, in the order of its arguments."""
  del saves_pre_activations, sums
  return _run_ffn(activation, rows, gates, blocks, inputs, down, saved=())[0]


def _run_ffn(activation, rows, gates, blocks, inputs, down, saved):
  """Returns the result and `saved`: arrays [R, F], one per input projection or none, with the pre-activations."""

  def body(block: RowBlock, carry):
    result, saved = carry
    x, gate = block.read(rows), None if gates is None else block.read(gates)
    pre_activations = [projection.apply(block, x).astype(rows.dtype) for projection in inputs]
    saved = tuple(block.write(*pair) for pair in zip(saved, pre_activations))
    hidden = _weigh(hidden_layer(activation, *pre_activations), gate)
    return block.write(result, down.apply(block, hidden, gate)), saved

  return blocks.for_each(body, (jnp.zeros_like(rows), saved))


def _weigh(hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
  return hidden if gate is None else (gate * hidden).astype(hidden.dtype)


def _ffn_forward(activation, saves_pre_activations, rows, gates, blocks, inputs, down, sums):
  empty: tuple[jax.Array, ...] = ()
  if saves_pre_activations:
    empty = (jnp.zeros_like(rows, shape=(rows.shape[0], down.kernels.shape[1])),) * len(inputs)
  result, saved = _run_ffn(activation, rows, gates, blocks, inputs, down, empty)
  saved = tuple(checkpoint_name(each, PRE_ACTIVATIONS_NAME) for each in saved)
  return result, (rows, gates, blocks, inputs, down, sums, saved)


def _ffn_backward(activation, saves_pre_activations, residuals, d_result):
  rows, gates, blocks, inputs, down, sums, saved = residuals

  def body(block: RowBlock, carry):
    d_rows, d_gates, d_inputs, d_down = carry
    x, d_block = block.read(rows), block.read(d_result)
    gate = None if gates is None else block.read(gates)
    if saves_pre_activations:
      pre_activations = [block.read(pre) for pre in saved]
    else:
      pre_activations = [projection.apply(block, x).astype(rows.dtype) for projection in inputs]
    hidden, pull_back = jax.vjp(functools.partial(hidden_layer, activation), *pre_activations)
    d_hidden = dot(d_block, block.read_matrix(down.kernels), 1, 1)
    if gate is not None:
      d_gate = jnp.sum(hidden * d_hidden, axis=1, keepdims=True, dtype=jnp.float32)
      if down.biases is not None:
        d_gate += jnp.sum(d_block * block.read_matrix(down.biases), axis=1, keepdims=True, dtype=jnp.float32)
      d_gates = block.write(d_gates, d_gate)
      d_hidden = gate * d_hidden
    d_down = d_down.add_gradient(block, _weigh(hidden, gate), d_block, gate)
    d_pres = pull_back(d_hidden.astype(rows.dtype))
    d_inputs = tuple(d.add_gradient(block, x, d_pre) for d, d_pre in zip(d_inputs, d_pres))
    d_xs = [dot(d_pre, block.read_matrix(projection.kernels), 1, 1) for projection, d_pre in zip(inputs, d_pres)]
    return block.write(d_rows, functools.reduce(jnp.add, d_xs)), d_gates, d_inputs, d_down

  def zeros(tree):
    return jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), tree)

  totals = zeros((inputs, down)) if sums is None else (sums[:-1], sums[-1])
  carry = jnp.zeros_like(rows), zeros(gates), *totals
  d_rows, d_gates, *totals = blocks.for_each(body, carry)
  d_gates = None if gates is None else d_gates.astype(gates.dtype)
  if sums is not None:
    return d_rows, d_gates, None, None, None, (*totals[0], totals[1])
  d_inputs, d_down = jax.tree.map(lambda d, weights: d.astype(weights.dtype), tuple(totals), (inputs, down))
  return d_rows, d_gates, None, d_inputs, d_down, None


_ffn.defvjp(_ffn_forward, _ffn_backward)
