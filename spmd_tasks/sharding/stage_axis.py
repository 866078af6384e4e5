"""The mesh axis along which the stages of a pipeline lie: the one that the axis rules give to `layers`.

    axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES)

Each stage then holds a run of layers, which is all that checkpoints and optimizers need to know. The batch is split
over the stages too, outside of the pipeline, so that embeddings and logits are not computed once for every stage.
"""

from collections.abc import Sequence

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import (
  AxisRules,
  SplitDim,
  spec_axes,
  split_dims_to_partition_spec,
)


def stage_axis_rules(base_rules: AxisRules, axis: str = 'stage') -> AxisRules:
  """The base rules with `layers` split over `axis` and `batch` over it too, as the innermost of its axes."""
  rules = [(name, axes) for name, axes in base_rules if name != 'layers']

  def widened(name: str, axes: SplitDim) -> SplitDim:
    return (*_names(axes), axis) if name == 'batch' else axes

  return (('layers', axis), *((name, widened(name, axes)) for name, axes in rules))


def stage_axis(mesh_axis_names: Sequence[str], axis_rules: AxisRules) -> str | None:
  """The mesh axis that splits layers, None if there is none.

  Raises:
    UserError: several axes do.
  """
  spec = split_dims_to_partition_spec(('layers',), mesh_axis_names, axis_rules)
  axes = spec_axes(spec, 1)[0]
  if len(axes) > 1:
    raise UserError(
      f"the axis rules split 'layers' over {axes}, but the stages of a pipeline lie along one mesh axis: name one."
    )
  return axes[0] if axes else None


def without_axis(axis: str, axis_rules: AxisRules) -> AxisRules:
  """The axis rules without an axis: for a region in which it is manual, and no sharding may name it."""

  def remove(axes: SplitDim) -> SplitDim:
    kept = tuple(name for name in _names(axes) if name != axis)
    return kept[0] if len(kept) == 1 else kept or None

  return tuple((name, remove(axes)) for name, axes in axis_rules)


def _names(axes: SplitDim) -> tuple[str, ...]:
  if axes is None or isinstance(axes, int):
    return ()
  return (axes,) if isinstance(axes, str) else tuple(axes)
