"""Axis rules: the default ones, and functions that adapt them to pipelines and to other layouts of activations.

`specs.py` resolves split dims by axis rules.
"""

from collections.abc import Sequence

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import AxisRules, axes_of, spec_axes, spec_entry, split_dims_to_partition_spec

# Weights are fully sharded over `data` on their embed dim and tensor-parallel over `mdl`; experts are split over
# `data`, as in T5X. Activations are split over `replica` and `data` by batch, and over `mdl` by their wide dims.
DEFAULT_AXIS_RULES: AxisRules = (
  ('batch', ('replica', 'data')),
  ('vocab', 'mdl'),
  ('mlp', 'mdl'),
  ('heads', 'mdl'),
  ('kv_heads', 'mdl'),
  ('embed', 'data'),
  ('head_dim', None),
  ('layers', None),
  ('norm', None),
  ('expert', 'data'),
  ('expert_embed', 'data'),  # unsharded if `expert` is split over `data`
  ('expert_mlp', 'mdl'),
  ('seq', None),
  ('act_embed', None),
  ('act_vocab', 'mdl'),
  ('act_mlp', 'mdl'),
  ('act_heads', 'mdl'),
  ('act_kv_heads', 'mdl'),
)


def stage_axis_rules(base_rules: AxisRules, axis: str = 'stage') -> AxisRules:
  """Returns the base rules with `layers` split over `axis`, and `batch` split over it too, as its outermost axis.

  Each stage then holds consecutive layers. Outside of the pipeline the batch is split over the stages, so that they
  share the work of embeddings and logits. Because `axis` is the outermost axis of the batch, each stage holds
  consecutive rows, and so consecutive microbatches. An axis named `layers` needs no rule for `layers`.
  """
  stages = () if axis == 'layers' else (('layers', axis),)
  rules = [(name, (axis, *axes_of(axes)) if name == 'batch' else axes) for name, axes in base_rules]
  return (*stages, *(rule for rule in rules if rule[0] != 'layers'))


def residual_axis_rules(base_rules: AxisRules, axis: str = 'mdl') -> AxisRules:
  """Returns the base rules with `act_embed`, the features of the residual stream, split over `axis`.

  Between sublayers each device of a tensor-parallel group then holds a shard of the activations instead of all of them,
  which divides the memory of remat and the traffic of a pipeline by the size of the axis. The all-reduce after a
  sublayer becomes a reduce-scatter, and an all-gather before the next sublayer. Megatron's sequence parallelism splits
  tokens instead of features (Korthikanti et al., 2022).
  """
  return tuple((name, axis if name == 'act_embed' else axes) for name, axes in base_rules)


def context_axis_rules(base_rules: AxisRules, axis: str = 'context') -> AxisRules:
  """Returns the base rules with `seq`, the tokens of a sequence, split over `axis` (context parallelism).

  Weights are fully sharded over `axis` too: it is added to the rule of `embed`.
  """
  rules = [(name, (*axes_of(axes), axis) if name == 'embed' else axes) for name, axes in base_rules]
  return (('seq', axis), *(rule for rule in rules if rule[0] != 'seq'))


def stage_axis(mesh_axis_names: Sequence[str], axis_rules: AxisRules) -> str | None:
  """Returns the mesh axis that splits `layers` into the stages of a pipeline; None if there is none.

  Raises a UserError if several axes split `layers`.
  """
  if 'layers' not in {*mesh_axis_names, *(name for name, _ in axis_rules)}:  # as in a Pax experiment
    return None
  spec = split_dims_to_partition_spec(('layers',), mesh_axis_names, axis_rules)
  axes = spec_axes(spec, 1)[0]
  if len(axes) > 1:
    raise UserError(
      f"the axis rules split 'layers' over {axes}, but a pipeline's stages use one mesh axis: name one axis."
    )
  return axes[0] if axes else None


def without_axis(axis: str, axis_rules: AxisRules) -> AxisRules:
  """Returns axis rules by which no split dim resolves to `axis`, not even the axis's own name.

  Use them inside a `shard_map` that makes the axis manual, or if the axis does not split any array.
  """
  others = ((name, spec_entry([other for other in axes_of(axes) if other != axis])) for name, axes in axis_rules)
  return ((axis, None), *others)
