"""Cuts rows sorted by group into blocks of a few static sizes, each with rows of one group, and loops over the blocks.

Compared with one dense matmul of as many rows, three things cost extra: fetching a matrix (about as much as 30 of its
rows), adding up the gradients that several blocks give to one matrix, and the rows by which a block extends past its
group. Every size is traced and compiled as a loop of its own, so there are at most five: one that fits the groups of
balanced routing, with an eighth to spare, its double, half, quarter and eighth. A table says which blocks cover a group
at the least cost. The work follows the groups' sizes, not R.

Shapes: R rows, E groups (experts), S rows of a block; K and N the dims of a matrix.
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple, TypeVar

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

Carry = TypeVar('Carry')

SIZE_MULTIPLE = 8
MAX_SIZE = 576  # larger blocks would only take memory
SIZES_IN_MEAN_GROUPS = (9 / 64, 9 / 32, 9 / 16, 9 / 8, 9 / 4)
BLOCK_COST = 40  # of a block beside its rows, in rows


class RowBlock(NamedTuple):
  """S consecutive rows; a mask marks the rows that belong to the block's group.

  Attributes:
    group: int32 scalar.
    start: int32 scalar, the first row; start + S <= R.
    mask: bool [S, 1], True for the rows that the block covers.
  """

  group: jax.Array
  start: jax.Array
  mask: jax.Array

  def read(self, rows: jax.Array) -> jax.Array:
    """Returns [S, K]: the block's rows of rows [R, K], with zeros where the mask is False."""
    return jnp.where(self.mask, self._read_all(rows), jnp.zeros((), rows.dtype))

  def write(self, rows: jax.Array, block: jax.Array) -> jax.Array:
    """Returns `rows` [R, K] with the rows of `block` [S, K] where the mask is True, cast to the rows' dtype."""
    merged = jnp.where(self.mask, block.astype(rows.dtype), self._read_all(rows))
    return jax.lax.dynamic_update_slice_in_dim(rows, merged, self.start, axis=0, allow_negative_indices=False)

  def read_matrix(self, matrices: jax.Array) -> jax.Array:
    """Returns the group's matrix [K, N] of matrices [E, K, N]."""
    return _index(matrices, self.group)

  def add_matrix(self, matrices: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `matrices` [E, K, N] with `matrix` [K, N] added to the group's."""
    total = matrix + self.read_matrix(matrices)
    return jax.lax.dynamic_update_index_in_dim(matrices, total, self.group, axis=0, allow_negative_indices=False)

  def _read_all(self, rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, self.start, self.mask.shape[0], allow_negative_indices=False)


def _index(array: jax.Array, i: jax.Array) -> jax.Array:
  """Returns array[i] for an i that is in bounds."""
  return jax.lax.dynamic_index_in_dim(array, i, keepdims=False, allow_negative_indices=False)


def block_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
  """Returns the sizes of blocks for R rows in E groups, ascending."""
  mean = min(num_rows / num_groups, MAX_SIZE / SIZES_IN_MEAN_GROUPS[-2])
  multiples = {math.ceil(mean * size / SIZE_MULTIPLE) for size in SIZES_IN_MEAN_GROUPS}
  return tuple(sorted({min(SIZE_MULTIPLE * multiple, MAX_SIZE, num_rows) for multiple in multiples}))


@functools.cache
def block_counts(sizes: tuple[int, ...]) -> np.ndarray:
  """Returns int32 [1 + ceil(largest / SIZE_MULTIPLE), sizes]: how many blocks of each size cover a group at least cost.

  Row i is for groups of up to SIZE_MULTIPLE * i rows.
  """
  num_covered = 1 + math.ceil(sizes[-1] / SIZE_MULTIPLE)
  costs, counts = [0], np.zeros((num_covered, len(sizes)), np.int32)
  for i in range(1, num_covered):
    left = [max(0, i - math.ceil(size / SIZE_MULTIPLE)) for size in sizes]  # after a block of each size
    options = [costs[rest] + size + BLOCK_COST for rest, size in zip(left, sizes)]
    best = int(np.argmin(options))
    costs.append(options[best])
    counts[i] = counts[left[best]]
    counts[i, best] += 1
  return counts


class RowBlocks(struct.PyTreeNode):
  """The blocks that together cover every row of every group once. `locate_blocks` makes it.

  Attributes:
    table: int32 [blocks + 1, 5], a block's group, its first row, the first row of the group in the block and the row
      after the last one, counted in the block, and its size; in the order of sizes. The size is 0 after the last block.
    sizes: of blocks, ascending.
  """

  table: jax.Array
  sizes: tuple[int, ...] = struct.field(pytree_node=False)

  def for_each(self, body: Callable[[RowBlock, Carry], Carry], carry: Carry) -> Carry:
    """Runs `carry = body(block, carry)` for every block.

    Args:
      body: traced once for each size.
      carry: a tree of arrays. Arrays that `body` only writes to are updated in place.
    """
    i = jnp.zeros_like(self.table[0, 0])
    for size in self.sizes:

      def is_of_size(state, size=size):
        return _index(self.table, state[0])[-1] == size

      def step(state, size=size):
        i, carry = state
        group, start, first, end, _ = _index(self.table, i)
        row = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return i + 1, body(RowBlock(group, start, (row >= first) & (row < end)), carry)

      i, carry = jax.lax.while_loop(is_of_size, step, (i, carry))
    return carry


def locate_blocks(num_rows: int, group_sizes: jax.Array) -> RowBlocks:
  """Cuts R rows into blocks of `block_sizes`.

  XLA compiles a kernel for nearly every operation, so these are few: one product has all sums over groups (a `cumsum`
  has five kernels), and all that a block takes from its size and group is read at once.

  Args:
    num_rows: R.
    group_sizes: int32 [E], with a sum of at most R.
  """
  num_groups = group_sizes.shape[0]
  if not num_rows:
    return RowBlocks(jnp.zeros((1, 5), jnp.int32), ())
  sizes = block_sizes(num_rows, num_groups)
  num_sizes, largest = len(sizes), sizes[-1]
  covering = block_counts(sizes)
  most = min(num_rows, num_groups * int(covering.sum(1).max()) + num_rows // largest)
  widths = np.array(sizes, np.int32)
  groups = jnp.arange(num_groups, dtype=jnp.int32)[:, None]

  # Blocks of each size and group, [E, sizes].
  rest = jax.lax.div(jax.lax.rem(group_sizes, largest) + (SIZE_MULTIPLE - 1), SIZE_MULTIPLE)
  counts = _take(jnp.asarray(covering), rest)
  counts += jax.lax.div(group_sizes, largest)[:, None] * (widths == largest)[None, :]
  # Sums over the groups up to each one: of its blocks, by size, and of rows.
  sums = (groups >= groups.T).astype(jnp.int32) @ jnp.concatenate([counts, group_sizes[:, None]], axis=1)
  is_smaller = (widths[:, None] < widths[None, :]).astype(np.int32)
  block_ends = sums[:, :-1] + (sums[-1:, :-1] @ is_smaller)
  # In a group, blocks of a smaller size come first.
  starts = (sums[:, -1] - group_sizes)[:, None] + counts @ (widths[:, None] * is_smaller)
  columns = (groups, starts - (block_ends - counts) * widths[None, :], sums[:, -1:], widths[None, :])
  of_slot = jnp.stack([jnp.broadcast_to(column, counts.shape).T.reshape(-1) for column in columns], axis=1)
  of_slot = jnp.pad(of_slot, ((0, 1), (0, 0)))  # no blocks follow the last one

  block = jnp.arange(most + 1, dtype=jnp.int32)
  slot = jnp.sum(block_ends[None] <= block[:, None, None], axis=(1, 2), dtype=jnp.int32)  # of size and group
  group, start, end, size = jnp.split(_take(of_slot, jnp.minimum(slot, num_sizes * num_groups)), 4, axis=1)
  start += block[:, None] * size
  shifted = jnp.minimum(start, num_rows - size)  # a block does not extend past the last row
  table = [group, shifted, start - shifted, jnp.minimum(start + size, end) - shifted, size]
  return RowBlocks(jnp.concatenate(table, axis=1), sizes)


def _take(array: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns array[ids] for ids that are in bounds."""
  return array.at[ids].get(mode='promise_in_bounds', wrap_negative_indices=False)
