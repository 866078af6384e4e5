"""Cuts a batch into microbatches, and moves these between the stages of a pipeline.

Shapes: B batch rows, P stages, M microbatches, K = M / P microbatches of each stage, T sequence, D model.

Microbatch m has rows [m B / M, (m + 1) B / M) of the batch, whatever the mesh: which rows share a dropout mask or a
group of an expert's capacity does not depend on the mesh. Stage p stores microbatches p K to (p + 1) K - 1. No row
moves between stages if the stage axis is the outermost of those that split the batch, as `stage_axis_rules` has it.
Within a stage the other axes first split its rows, then the rows of each microbatch: an all-to-all, or nothing if K is
1.

Data moves by one neighbour per tick. Stage p stores the K microbatches from p K on in K slots. In every tick one slot,
the same on all stages, moves one stage down: stage 0 takes its own entry as input, and the last stage has room for a
result. Slot t mod K moves in tick t, so that stage 0 processes microbatch t in tick t, and no stage ever stores more
than K. These functions run in a region that is manual over the stage axis, on trees of arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.axis_rules import without_axis
from spmd_tasks.sharding.specs import ShardingScope, even_spec, spec_axes


class Microbatch(NamedTuple):
  """The data that moves from stage to stage: x [B, T, D], and int32 [B, T] or None as blocks take them."""

  x: jax.Array
  segment_ids: jax.Array | None = None
  segment_pos: jax.Array | None = None


def split_rows(tree: Any, num_microbatches: int, scope: ShardingScope, axis: str) -> Any:
  """Reshapes leaves [B, ...] to [M, B / M, ...]; the stages split M, the batch's other axes the rows of a microbatch.

  `axis` is the mesh axis of the stages; rows are split as the split dim 'batch' says.
  """
  axes = _data_axes(scope, axis)
  tree = _constrain(tree, scope, (axis, *axes))
  tree = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), tree)
  return _constrain(tree, scope, axis, axes)


def merge_rows(tree: Any, scope: ShardingScope, axis: str) -> Any:
  """Reshapes leaves [M, B / M, ...] back to [B, ...]: the inverse of `split_rows`."""
  axes = _data_axes(scope, axis)
  tree = _constrain(tree, scope, axis, axes)
  tree = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
  return _constrain(tree, scope, (axis, *axes))


def _data_axes(scope: ShardingScope, axis: str) -> tuple[str, ...]:
  """Returns the mesh axes other than the stages' that split the batch."""
  rules = without_axis(axis, scope.axis_rules)
  return spec_axes(split_dims_to_partition_spec(('batch',), scope.mesh.axis_names, rules), 1)[0]


def _constrain(tree: Any, scope: ShardingScope, *spec: Any) -> Any:
  """Constrains the first dims of every array, over axes that divide them."""

  def constrain_leaf(x: jax.Array) -> jax.Array:
    even = even_spec(PartitionSpec(*spec), x.shape, scope.mesh.shape)
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(spec))  # the other dims keep their sharding
    return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, PartitionSpec(*even, *rest)))

  return jax.tree.map(constrain_leaf, tree)


def check_microbatches_divide(batch_size: int, num_microbatches: int) -> None:
  """Raises a UserError if the microbatches do not divide the batch."""
  if batch_size % num_microbatches:
    raise UserError(
      f'num_microbatches={num_microbatches} of a pipeline must divide the batch of {batch_size} rows: change one.'
    )


def tree_read(tree: Any, index: jax.Array) -> Any:
  """Returns the entries at `index` of the leading dim."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def tree_write(tree: Any, index: jax.Array, entries: Any) -> Any:
  """Returns the tree with `entries` at `index` of the leading dim."""
  return jax.tree.map(lambda x, e: jax.lax.dynamic_update_index_in_dim(x, e, index, 0), tree, entries)


def tree_where(condition: jax.Array, if_true: Any, if_false: Any) -> Any:
  """Applies `jnp.where` with one scalar condition to all leaves."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def send(tree: Any, axis: str, by: int) -> Any:
  """Sends the tree one stage up (1) or down (-1): returns the tree of stage p - `by`, around the ring of stages."""
  num_stages = jax.lax.axis_size(axis)
  neighbours = [(p, (p + by) % num_stages) for p in range(num_stages)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, neighbours), tree)


def read_slot(slots: Any, turn: jax.Array, axis: str) -> tuple[Any, Any]:
  """Reads slot `turn` mod K: returns (this stage's own entry, the entry that arrives from the stage above)."""
  leaving = tree_read(slots, turn % _num_slots(slots))
  return leaving, send(leaving, axis, -1)


def write_slot(slots: Any, turn: jax.Array, arriving: Any, result: Any, axis: str) -> Any:
  """Writes slot `turn` mod K: the entry that arrived, or on the last stage the result."""
  is_last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
  return tree_write(slots, turn % _num_slots(slots), tree_where(is_last, result, arriving))


def slots_in_order(slots: Any, num_extra_turns: int) -> Any:
  """Orders the slots by microbatch, if the result of microbatch m was written `num_extra_turns` turns after turn m."""
  return jax.tree.map(lambda x: jnp.roll(x, -num_extra_turns, axis=0), slots)


def _num_slots(slots: Any) -> int:
  return jax.tree.leaves(slots)[0].shape[0]
