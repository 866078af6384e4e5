"""Which mesh axis holds a pipeline's stages, and axis rules for regions in which an axis has no part."""

from collections.abc import Sequence

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import AxisRules, axes_of, spec_axes, spec_entry, split_dims_to_partition_spec


def stage_axis(mesh_axis_names: Sequence[str], axis_rules: AxisRules) -> str | None:
  """Returns the mesh axis of the pipeline's stages, which is the one that splits `layers`; None if there is none.

  Raises a UserError: several axes split `layers`.
  """
  if 'layers' not in {*mesh_axis_names, *(name for name, _ in axis_rules)}:  # as in a Pax experiment
    return None
  spec = split_dims_to_partition_spec(('layers',), mesh_axis_names, axis_rules)
  axes = spec_axes(spec, 1)[0]
  if len(axes) > 1:
    raise UserError(
      f"the axis rules split 'layers' over {axes}, but the stages of a pipeline lie along one mesh axis: name one."
    )
  return axes[0] if axes else None


def without_axis(axis: str, axis_rules: AxisRules) -> AxisRules:
  """Returns the axis rules without an axis: no split dim then resolves to the axis, not even by the axis's own name.

  For a region in which the axis is manual and no sharding may name it, or in which it has no part.
  """
  others = ((name, spec_entry([each for each in axes_of(axes) if each != axis])) for name, axes in axis_rules)
  return ((axis, None), *others)
