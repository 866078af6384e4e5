"""The backend 'loop': grouped matmuls and experts' networks block by block, written for CPU.

XLA's CPU backend has no grouped matmul, but multiplies one block of rows by one matrix as fast as a whole array.
Rows sorted by group are therefore cut into blocks of a few static sizes, each with rows of one group; a loop multiplies
each block by its group's matrix and writes the product in place.

Compared with one dense matmul of as many rows, three things cost extra: fetching a matrix (about as much as 30 of its
rows), adding up the gradients that several blocks give to one matrix, and the rows by which a block extends past its
group. A group is therefore one block if some size fits, and the sizes are close together around the mean group, the
size of balanced groups. A larger group (skewed routing) is split into blocks of the largest size and one block for the
rest. The work follows the groups' sizes, not R.

`ffn_by_loop` applies an expert's whole network, gates included, to a block while the block is in the cache. It saves
only the pre-activation of the hidden layer, because computing an activation again costs less than writing it to memory
and reading it back. The gradient of a weight is written once per expert, not summed over all experts.

Shapes: R rows, E groups (experts), S rows of a block; K and N the dims of a matrix; D model, F ffn.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.feed_forward import PRE_ACTIVATIONS_NAME, hidden_layer

Carry = TypeVar('Carry')

SIZE_MULTIPLE = 8
MAX_SIZE = 1024
# Entries slightly above 1/8, 1/4 and 1/2 serve expert parallelism, where R is several times the number of rows in
# groups and the true mean size is a fraction of R / E. With 8 times as many rows as in groups, 64 experts
# take 1.4 times as long as with R rows in groups.
SIZES_IN_MEAN_GROUPS = (0.16, 0.24, 0.32, 0.48, 0.64, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


class RowBlock(NamedTuple):
  """S consecutive rows; a mask marks the rows that belong to the block's group.

  Attributes:
    group: int32 scalar.
    start: int32 scalar, the first row; start + S <= R.
    mask: bool [S, 1], True for the rows that the block covers.
    is_first: whether the block is the first of its group.
  """

  group: jax.Array
  start: jax.Array
  mask: jax.Array
  is_first: bool

  def read(self, rows: jax.Array) -> jax.Array:
    """Returns [S, K]: the block's rows of rows [R, K], with zeros where the mask is False."""
    return jnp.where(self.mask, self._read_all(rows), jnp.zeros((), rows.dtype))

  def write(self, rows: jax.Array, block: jax.Array) -> jax.Array:
    """Returns `rows` [R, K] with the rows of `block` [S, K] where the mask is True, cast to the rows' dtype."""
    merged = jnp.where(self.mask, block.astype(rows.dtype), self._read_all(rows))
    return jax.lax.dynamic_update_slice_in_dim(rows, merged, self.start, axis=0)

  def read_matrix(self, matrices: jax.Array) -> jax.Array:
    """Returns the group's matrix [K, N] of matrices [E, K, N]."""
    return jax.lax.dynamic_index_in_dim(matrices, self.group, keepdims=False)

  def add_matrix(self, matrices: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `matrices` [E, K, N] with `matrix` [K, N] added to the group's; `matrices` must have started as zeros."""
    total = matrix if self.is_first else matrix + self.read_matrix(matrices)
    return jax.lax.dynamic_update_index_in_dim(matrices, total, self.group, axis=0)

  def _read_all(self, rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, self.start, self.mask.shape[0])


def block_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
  """Returns the sizes of blocks for R rows in E groups, ascending."""
  mean = min(num_rows / num_groups, MAX_SIZE / 2)
  multiples = {math.ceil(mean * size / SIZE_MULTIPLE) for size in SIZES_IN_MEAN_GROUPS}
  return tuple(sorted({min(SIZE_MULTIPLE * multiple, MAX_SIZE, num_rows) for multiple in multiples}))


def for_each_block(
  body: Callable[[RowBlock, Carry], Carry], carry: Carry, num_rows: int, group_sizes: jax.Array
) -> Carry:
  """Runs `carry = body(block, carry)` for blocks that together cover every row of every group once.

  Args:
    body: traced twice for the largest size and once for each other size.
    carry: a tree of arrays. Arrays that `body` only writes to are updated in place.
    num_rows: R.
    group_sizes: int32 [E], with a sum of at most R.
  """
  if not num_rows:
    return carry
  sizes = block_sizes(num_rows, group_sizes.shape[0])
  largest = sizes[-1]
  group_starts = jnp.cumsum(group_sizes) - group_sizes
  num_full, rest = group_sizes // largest, group_sizes % largest

  def run(carry: Carry, size: int, lower, upper, locate, is_first: bool) -> Carry:
    def step(i, carry):
      group, start, num_used = locate(i)
      shifted = jnp.minimum(start, num_rows - size)  # as lax.dynamic_slice would shift it, which the mask must know
      row = shifted + jnp.arange(size, dtype=jnp.int32)
      mask = (row >= start) & (row < start + num_used)
      # Without the barrier, XLA fuses the mask into its readers and computes it again for every element.
      group, shifted, mask = jax.lax.optimization_barrier((group, shifted, mask[:, None]))
      return body(RowBlock(group, shifted, mask, is_first), carry)

    return jax.lax.fori_loop(lower, upper, step, carry)

  # Sort the groups by their rest, so that groups whose rest fits one block size are contiguous. Rests of 0 come first.
  order = jnp.argsort(rest)
  thresholds = jnp.array((0, *sizes), jnp.int32)
  size_bounds = jnp.sum(rest[:, None] <= thresholds[None, :], axis=0, dtype=jnp.int32)

  def locate_rest(i):
    group = order[i]
    return group, group_starts[group] + num_full[group] * largest, rest[group]

  for i, size in enumerate(sizes):
    carry = run(carry, size, size_bounds[i], size_bounds[i + 1], locate_rest, is_first=True)

  full_ends = jnp.cumsum(num_full)

  def locate_full(i):
    group = jnp.sum(full_ends <= i, dtype=jnp.int32)
    return group, group_starts[group] + (i - full_ends[group] + num_full[group]) * largest, largest

  return run(carry, largest, 0, full_ends[-1], locate_full, is_first=False)


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
  return _multiply(*vary_alike(rows, weights, group_sizes))


@jax.custom_vjp
def _multiply(rows, weights, group_sizes):
  def body(block: RowBlock, result):
    return block.write(result, dot(block.read(rows), block.read_matrix(weights), 1, 0))

  result = jnp.zeros_like(rows, shape=(rows.shape[0], weights.shape[2]))
  return for_each_block(body, result, rows.shape[0], group_sizes)


def _multiply_forward(rows, weights, group_sizes):
  return _multiply(rows, weights, group_sizes), (rows, weights, group_sizes)


def _multiply_backward(saved, d_result):
  rows, weights, group_sizes = saved

  def body(block: RowBlock, carry):
    d_rows, d_weights = carry
    d_block = block.read(d_result)
    d_rows = block.write(d_rows, dot(d_block, block.read_matrix(weights), 1, 1))
    return d_rows, block.add_matrix(d_weights, dot(block.read(rows), d_block, 0, 0))

  carry = jnp.zeros_like(rows), jnp.zeros_like(weights, dtype=jnp.float32)
  d_rows, d_weights = for_each_block(body, carry, rows.shape[0], group_sizes)
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
  inputs: Sequence[tuple[jax.Array, jax.Array | None]],
  down: tuple[jax.Array, jax.Array | None],
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
  """
  weights = [weight for pair in (*inputs, down) for weight in pair]
  rows, gates, group_sizes, *arrays = vary_alike(rows, gates, group_sizes, *weights)
  projections = [
    Projection(kernels, None if biases is None else biases[:, None, :])
    for kernels, biases in zip(arrays[::2], arrays[1::2])
  ]
  gates = None if gates is None else gates[:, None]
  return _ffn(activation, rows, gates, group_sizes, tuple(projections[:-1]), projections[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(activation, rows, gates, group_sizes, inputs, down):
  """`gates` are [R, 1], or None; `inputs` the projections into the hidden layer, in the order of its arguments."""
  return _run_ffn(activation, rows, gates, group_sizes, inputs, down, saved=())[0]


def _run_ffn(activation, rows, gates, group_sizes, inputs, down, saved):
  """Returns the result and `saved`: arrays [R, F], one per input projection or none, with the pre-activations."""

  def body(block: RowBlock, carry):
    result, saved = carry
    x, gate = block.read(rows), None if gates is None else block.read(gates)
    pre_activations = [projection.apply(block, x).astype(rows.dtype) for projection in inputs]
    saved = tuple(block.write(*pair) for pair in zip(saved, pre_activations))
    hidden = _weigh(hidden_layer(activation, *pre_activations), gate)
    return block.write(result, down.apply(block, hidden, gate)), saved

  return for_each_block(body, (jnp.zeros_like(rows), saved), rows.shape[0], group_sizes)


def _weigh(hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
  return hidden if gate is None else (gate * hidden).astype(hidden.dtype)


def _ffn_forward(activation, rows, gates, group_sizes, inputs, down):
  empty = jnp.zeros_like(rows, shape=(rows.shape[0], down.kernels.shape[1]))
  result, saved = _run_ffn(activation, rows, gates, group_sizes, inputs, down, (empty,) * len(inputs))
  saved = tuple(checkpoint_name(each, PRE_ACTIVATIONS_NAME) for each in saved)
  return result, (rows, gates, group_sizes, inputs, down, saved)


def _ffn_backward(activation, residuals, d_result):
  rows, gates, group_sizes, inputs, down, saved = residuals

  def body(block: RowBlock, carry):
    d_rows, d_gates, d_inputs, d_down = carry
    x, d_block = block.read(rows), block.read(d_result)
    gate = None if gates is None else block.read(gates)
    hidden, pull_back = jax.vjp(functools.partial(hidden_layer, activation), *[block.read(pre) for pre in saved])
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

  zeros = jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), (gates, inputs, down))
  d_rows, d_gates, *sums = for_each_block(body, (jnp.zeros_like(rows), *zeros), rows.shape[0], group_sizes)
  d_inputs, d_down = jax.tree.map(lambda d, weights: d.astype(weights.dtype), tuple(sums), (inputs, down))
  return d_rows, None if gates is None else d_gates.astype(gates.dtype), None, d_inputs, d_down


_ffn.defvjp(_ffn_forward, _ffn_backward)
