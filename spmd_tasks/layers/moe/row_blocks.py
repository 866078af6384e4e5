"""Row blocks: rows sorted by group, cut into blocks of a few static sizes, each with rows of one group.

XLA's CPU backend has no grouped matmul, but it multiplies a block by a matrix as well as it does a whole array. So a
loop takes a block and its group's matrix, and writes the product in its place. Three things cost more than one dense
matmul of as many rows: fetching a matrix (about as much as 30 of its rows), adding up what several blocks of one group
give to one gradient, and the rows by which a block reaches past its group. So a group is one block where there is
a size for it, and sizes are close together around the mean group, where balanced groups lie. A larger group, as skewed
routing has them, is some blocks of the largest size, and one for the rest. The work follows the groups' sizes, not R.

Shapes: R rows, E groups, S rows of a block, K and N the dims of a matrix.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar('Carry')

SIZE_MULTIPLE = 8
MAX_SIZE = 1024
# A bit more than 1/8, 1/4 and 1/2: under expert parallelism R is several times the rows in groups, whose true mean size
# is then there. With 8 times the room, 64 experts take 1.4 times as long as with R rows in groups.
SIZES_IN_MEAN_GROUPS = (0.16, 0.24, 0.32, 0.48, 0.64, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


class RowBlock(NamedTuple):
  """S consecutive rows, of which those of one group count.

  Attributes:
    group: int32 scalar.
    start: int32 scalar, the first row; start + S <= R.
    mask: bool [S, 1], True for the rows that this block stands for.
    is_first: whether no other block of its group comes before.
  """

  group: jax.Array
  start: jax.Array
  mask: jax.Array
  is_first: bool

  def read(self, rows: jax.Array) -> jax.Array:
    """[S, K] of rows [R, K], with zeros where the mask is False."""
    return jnp.where(self.mask, self._read_all(rows), jnp.zeros((), rows.dtype))

  def write(self, rows: jax.Array, block: jax.Array) -> jax.Array:
    """`rows` [R, K] with those of `block` [S, K] where the mask is True, cast to the rows' dtype."""
    merged = jnp.where(self.mask, block.astype(rows.dtype), self._read_all(rows))
    return jax.lax.dynamic_update_slice_in_dim(rows, merged, self.start, axis=0)

  def read_matrix(self, matrices: jax.Array) -> jax.Array:
    """The group's matrix [K, N] of matrices [E, K, N]."""
    return jax.lax.dynamic_index_in_dim(matrices, self.group, keepdims=False)

  def add_matrix(self, matrices: jax.Array, matrix: jax.Array) -> jax.Array:
    """`matrices` [E, K, N], which began as zeros, with `matrix` [K, N] added to the group's."""
    total = matrix if self.is_first else matrix + self.read_matrix(matrices)
    return jax.lax.dynamic_update_index_in_dim(matrices, total, self.group, axis=0)

  def _read_all(self, rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, self.start, self.mask.shape[0])


def block_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
  """The sizes of blocks for R rows in E groups, ascending."""
  mean = min(num_rows / num_groups, MAX_SIZE / 2)
  multiples = {math.ceil(mean * size / SIZE_MULTIPLE) for size in SIZES_IN_MEAN_GROUPS}
  return tuple(sorted({min(SIZE_MULTIPLE * multiple, MAX_SIZE, num_rows) for multiple in multiples}))


def for_each_block(
  body: Callable[[RowBlock, Carry], Carry], carry: Carry, num_rows: int, group_sizes: jax.Array
) -> Carry:
  """Runs `carry = body(block, carry)` for blocks that together stand for every row of every group once.

  Args:
    body: traced twice for the largest size and once for each other one.
    carry: a tree of arrays. Arrays that `body` only writes to are written in place.
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
      shifted = jnp.minimum(start, num_rows - size)  # lax.dynamic_slice would shift it too, and not say so
      row = shifted + jnp.arange(size, dtype=jnp.int32)
      mask = (row >= start) & (row < start + num_used)
      # Without a barrier, XLA computes the mask anew for every element of all that is fused with it.
      group, shifted, mask = jax.lax.optimization_barrier((group, shifted, mask[:, None]))
      return body(RowBlock(group, shifted, mask, is_first), carry)

    return jax.lax.fori_loop(lower, upper, step, carry)

  # The groups by their rests, those without one first; each size's are contiguous.
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
  """The arrays, each of them varying over every mesh axis that any of them varies over.

  Loops inside a `shard_map` that checks which axes its values vary over need that; elsewhere nothing changes.
  """
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays if x is not None))

  def cast(x):
    missing = () if x is None else tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  return tuple(cast(x) for x in arrays)
