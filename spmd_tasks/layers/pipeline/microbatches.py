"""Microbatches: how a batch is cut into them, and how they move between the stages of a pipeline.

Shapes: B batch rows, P stages, M microbatches, K = M / P microbatches of each stage, T sequence, D model.

Cutting moves no row to another device. The mesh axes of `batch` split the rows, first axis outermost; `stage` is best
one of them, so that stages share the work of embeddings and logits. A device then has B / (number of devices) rows. It
cuts them into K parts, one for each microbatch of its stage. So a microbatch has rows of all data shards and of one
stage.

Moving goes one neighbour per tick. Stage p stores the K microbatches from p K on in K slots. In every tick one slot,
the same on all stages, moves one stage down: stage 0 takes its own entry as input, and the last stage has room for a
result. Slot t mod K moves in tick t, so that stage 0 processes microbatch t in tick t, and no stage ever stores more
than K. These functions run in a region that is manual over the stage axis, on trees of arrays.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import ShardingScope, num_parts, spec_axes, split_dims_to_partition_spec


class Microbatch(NamedTuple):
  """The data that moves from stage to stage: x [B, T, D], and int32 [B, T] or None as blocks take them."""

  x: jax.Array
  segment_ids: jax.Array | None = None
  segment_pos: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchLayout:
  """The layout of B rows on the mesh, and as M microbatches.

  Attributes:
    num_stages, num_microbatches: P and M.
    outer, inner: the mesh axes that split the batch, outside and inside of the stage axis.
    num_outer, num_inner: how many parts these axes make. Both are 1 if they do not divide a microbatch; rows then move.
    axis: the stage axis.
  """

  num_stages: int
  num_microbatches: int
  outer: tuple[str, ...]
  inner: tuple[str, ...]
  num_outer: int
  num_inner: int
  axis: str

  @property
  def spec(self) -> PartitionSpec:
    """The PartitionSpec of the microbatches [M, B / M, ...]."""
    return PartitionSpec(self.axis, (*self.outer, *self.inner))

  def split(self, tree: Any, scope: ShardingScope) -> Any:
    """Reshapes leaves [B, ...] to [M, B / M, ...]; the stages split M."""

    def split_leaf(x):
      rows = x.shape[0] // (self.num_outer * self.num_inner * self.num_microbatches)
      slots = self.num_microbatches // self.num_stages
      x = x.reshape(self.num_outer, self.num_stages, self.num_inner, slots, rows, *x.shape[1:])
      x = x.transpose(1, 3, 0, 2, 4, *range(5, x.ndim))
      x = x.reshape(self.num_microbatches, -1, *x.shape[5:])
      return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, self.spec))

    return jax.tree.map(split_leaf, tree)

  def merge(self, tree: Any) -> Any:
    """Reshapes leaves [M, B / M, ...] back to [B, ...]: the inverse of `split`."""

    def merge_leaf(x):
      x = x.reshape(
        self.num_stages, -1, self.num_outer, self.num_inner, *_cut(x.shape, self.num_outer * self.num_inner)
      )
      x = x.transpose(2, 0, 3, 1, 4, *range(5, x.ndim))
      return x.reshape(-1, *x.shape[5:])

    return jax.tree.map(merge_leaf, tree)


def _cut(shape: Sequence[int], parts: int) -> tuple[int, ...]:
  """Returns [M, B / M, ...] without M, the rows cut into parts."""
  return (shape[1] // parts, *shape[2:])


def microbatch_layout(
  scope: ShardingScope, axis: str, batch_split_dim: Any, batch_size: int, num_microbatches: int
) -> MicrobatchLayout:
  """Returns the layout of a batch of `batch_size` rows under the axis rules.

  Raises:
    UserError: the microbatches do not divide the batch.
  """
  check_microbatches_divide(batch_size, num_microbatches)
  spec = split_dims_to_partition_spec((batch_split_dim,), scope.mesh.axis_names, scope.axis_rules)
  axes = spec_axes(spec, 1)[0]
  position = axes.index(axis) if axis in axes else len(axes)
  outer, inner = axes[:position], axes[position + 1 :]
  sizes = [num_parts(part, scope.mesh.shape) for part in (outer, inner)]
  if batch_size // num_microbatches % math.prod(sizes):
    sizes = [1, 1]
  return MicrobatchLayout(
    num_stages=scope.mesh.shape[axis],
    num_microbatches=num_microbatches,
    outer=outer,
    inner=inner,
    num_outer=sizes[0],
    num_inner=sizes[1],
    axis=axis,
  )


def check_microbatches_divide(batch_size: int, num_microbatches: int) -> None:
  """Raises a UserError if the microbatches do not divide the batch."""
  if batch_size % num_microbatches:
    raise UserError(
      f'num_microbatches={num_microbatches} of a pipeline must divide the batch of {batch_size} rows: change one of '
      'them.'
    )


def tree_read(tree: Any, index: jax.Array) -> Any:
  """Returns the entries at `index` of the leading dim."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def tree_write(tree: Any, index: jax.Array, entries: Any) -> Any:
  """Returns the tree with `entries` at `index` of the leading dim."""
  return jax.tree.map(lambda x, e: jax.lax.dynamic_update_index_in_dim(x, e, index, 0), tree, entries)


def tree_where(condition: jax.Array, if_true: Any, if_false: Any) -> Any:
  """`jnp.where` with one scalar condition for all leaves."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def send_up(tree: Any, axis: str) -> Any:
  """Sends the tree to the stage above: returns the tree of stage p - 1; stage 0 gets the last stage's."""
  return _rotate(tree, axis, 1)


def send_down(tree: Any, axis: str) -> Any:
  """Sends the tree to the stage below: returns the tree of stage p + 1; the last stage gets stage 0's."""
  return _rotate(tree, axis, -1)


def _rotate(tree: Any, axis: str, by: int) -> Any:
  num_stages = jax.lax.axis_size(axis)
  neighbours = [(p, (p + by) % num_stages) for p in range(num_stages)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, neighbours), tree)


def read_slot(slots: Any, turn: jax.Array, axis: str) -> tuple[Any, Any]:
  """Reads slot `turn` mod K: returns (this stage's own entry, the entry that arrives from the stage above)."""
  leaving = tree_read(slots, turn % _num_slots(slots))
  return leaving, send_down(leaving, axis)


def write_slot(slots: Any, turn: jax.Array, arriving: Any, result: Any, axis: str) -> Any:
  """Writes slot `turn` mod K: the entry that arrived, or on the last stage the result."""
  is_last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
  return tree_write(slots, turn % _num_slots(slots), tree_where(is_last, result, arriving))


def slots_in_order(slots: Any, num_extra_turns: int) -> Any:
  """Orders the slots by microbatch, if the result of microbatch m was written `num_extra_turns` turns after turn m.

  Results are on the right stage already: those of stage p have moved down P - 1 - p times.
  """
  return jax.tree.map(lambda x: jnp.roll(x, -num_extra_turns, axis=0), slots)


def _num_slots(slots: Any) -> int:
  return jax.tree.leaves(slots)[0].shape[0]
