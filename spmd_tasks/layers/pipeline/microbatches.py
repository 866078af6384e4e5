"""Cutting a batch into microbatches so that no row moves: each stage, and each data shard, keeps the rows that it has.

Shapes: B batch rows, P stages, M microbatches, K = M / P of each stage.

Rows are split over the mesh axes of `batch`, the first outermost, and `stage` is best one of them, so that embeddings
and logits are not computed by every stage. A device then has B / (devices) rows, which it cuts into K parts, one for
each microbatch of its stage. A microbatch so has rows of all data shards and of one stage.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import ShardingScope, num_parts, spec_axes, split_dims_to_partition_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchLayout:
  """How B rows lie on the mesh, and as M microbatches.

  Attributes:
    num_stages, num_microbatches: P and M.
    outer, inner: the mesh axes that split the batch, outside and inside of the stage axis.
    num_outer, num_inner: into how many parts; 1 where they do not divide a microbatch, whose rows then move.
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
    """Of the microbatches [M, B / M, ...]."""
    return PartitionSpec(self.axis, (*self.outer, *self.inner))

  def split(self, tree: Any, scope: ShardingScope) -> Any:
    """Leaves [B, ...] to [M, B / M, ...], split over the stages in M."""

    def split_leaf(x):
      rows = x.shape[0] // (self.num_outer * self.num_inner * self.num_microbatches)
      slots = self.num_microbatches // self.num_stages
      x = x.reshape(self.num_outer, self.num_stages, self.num_inner, slots, rows, *x.shape[1:])
      x = x.transpose(1, 3, 0, 2, 4, *range(5, x.ndim))
      x = x.reshape(self.num_microbatches, -1, *x.shape[5:])
      return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, self.spec))

    return jax.tree.map(split_leaf, tree)

  def merge(self, tree: Any) -> Any:
    """The inverse of `split`."""

    def merge_leaf(x):
      x = x.reshape(
        self.num_stages, -1, self.num_outer, self.num_inner, *_cut(x.shape, self.num_outer * self.num_inner)
      )
      x = x.transpose(2, 0, 3, 1, 4, *range(5, x.ndim))
      return x.reshape(-1, *x.shape[5:])

    return jax.tree.map(merge_leaf, tree)


def _cut(shape: Sequence[int], parts: int) -> tuple[int, ...]:
  """[M, B / M, ...] without M, the rows cut into parts."""
  return (shape[1] // parts, *shape[2:])


def microbatch_layout(
  scope: ShardingScope, axis: str, batch_split_dim: Any, batch_size: int, num_microbatches: int
) -> MicrobatchLayout:
  """The layout of a batch of `batch_size` rows under the axis rules.

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
  """Raises a ValueError if the microbatches do not divide the batch."""
  if batch_size % num_microbatches:
    raise UserError(
      f'num_microbatches={num_microbatches} of a pipeline must divide the batch of {batch_size} rows: change one of '
      'them.'
    )
