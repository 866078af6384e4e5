"""Axis rules for pipelines, sequence parallelism and context parallelism, made of others.

axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES)    # the mesh axis of the logical name `layers` holds the stages
"""

from collections.abc import Sequence

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import AxisRules, SplitDim, axes_of, spec_axes, spec_entry, split_dims_to_partition_spec


def stage_axis_rules(base_rules: AxisRules, axis: str = 'stage') -> AxisRules:
  """Returns the base rules with `layers` split over `axis`, and `batch` also split over it, as its outermost axis.

  Each stage then holds a run of layers. The batch is split over the stages outside of the pipeline, so that stages
  share the work of embeddings and logits. As the outermost axis of the batch, the stages hold runs of rows, which are
  runs of microbatches. The name `layers` needs no rule if the axis itself is called so.
  """
  rules = [(name, axes) for name, axes in base_rules if name != 'layers']

  def widened(name: str, axes: SplitDim) -> SplitDim:
    return (axis, *axes_of(axes)) if name == 'batch' else axes

  stages = () if axis == 'layers' else (('layers', axis),)
  return (*stages, *((name, widened(name, axes)) for name, axes in rules))


def residual_axis_rules(base_rules: AxisRules, axis: str = 'mdl') -> AxisRules:
  """Returns the base rules with `act_embed`, the features of the residual stream, split over `axis` as well.

  Between sublayers a device of a tensor-parallel group then holds its part of the activations instead of all of them:
  what remat keeps and what a pipeline sends is divided by the axis. The sum behind a sublayer becomes a reduce-scatter,
  and an all-gather before the next one. Megatron's sequence parallelism splits the tokens instead (Korthikanti et al.,
  2022).
  """
  return tuple((name, axis if name == 'act_embed' else axes) for name, axes in base_rules)


def context_axis_rules(base_rules: AxisRules, axis: str = 'context') -> AxisRules:
  """Returns the base rules with `seq`, the tokens of a sequence, split over `axis` (context parallelism).

  The devices of `axis` share their rows, so they would hold the same weights: the rule of `embed`, by which weights are
  fully sharded, gets the axis too.
  """
  rules = [(name, axes) for name, axes in base_rules if name != 'seq']
  return (('seq', axis), *((name, (*axes_of(axes), axis) if name == 'embed' else axes) for name, axes in rules))


def stage_axis(mesh_axis_names: Sequence[str], axis_rules: AxisRules) -> str | None:
  """Returns the mesh axis of the pipeline's stages, which is the one that splits `layers`; None if there is none.

  Raises:
    UserError: several axes split `layers`.
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

  def remove(axes: SplitDim) -> SplitDim:
    return spec_entry([name for name in axes_of(axes) if name != axis])

  return ((axis, None), *((name, remove(axes)) for name, axes in axis_rules))
