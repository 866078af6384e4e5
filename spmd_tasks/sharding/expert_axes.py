"""Combines expert parallelism with data and model parallelism: three forms, each a mesh with its axis rules.

    axes = data_model_axes(num_devices=8, num_experts=4, num_partitions=1, base_rules=DEFAULT_AXIS_RULES)
    axes.mesh_axis_names, axes.ici_mesh_shape, axes.axis_rules    # for the fields of an Experiment with these names

mesh_layouts.py wraps each form as a layout, which an experiment has in one field: `mesh = DataModelMesh(...)`.

* `data_model_axes`: (replica, data, mdl). `data` splits the experts. With fewer experts than devices and no model
  parallelism, `mdl` becomes a second data axis, along which experts are replicated (first form of T5X contrib/moe).
* `data_expert_model_axes`: (replica, data, expert, mdl). The experts have their own axis, so model parallelism works
  beside them; experts are replicated along `data` (newer form of T5X contrib/moe).
* `hidden_sharding_axes`: (replica, data, expert, mdl). With fewer experts than devices, `data` splits the hidden layer
  of every expert (MegaBlocks' expert and hidden sharding).

Layers read only the axis rules, so an experiment may also write its rules by hand. T5X's `model` is `mdl` here. Only
the product of T5X's (x, y, z, cores) submesh counts, because `MeshSpec` places the devices.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from absl import logging
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import AxisRules, SplitDim, spec_axes, split_dims_to_partition_spec

_EXPERT_NAMES = ('expert', 'expert_mlp', 'expert_group', 'expert_replicas', 'unmodeled')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertAxes:
  """A mesh and its axis rules, for the fields of an Experiment with the same names.

  Attributes:
    mesh_axis_names, ici_mesh_shape: the mesh's axes, outermost first, and their sizes.
    axis_rules: the base rules, the rules for experts and the user's additional rules, in this order.
    data_axes: the mesh axes that replace `data` in the split of the batch, such as ('data', 'mdl').
  """

  mesh_axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  axis_rules: AxisRules
  data_axes: tuple[str, ...]

  @property
  def two_data_axes(self) -> bool:
    """Returns whether `mdl` splits the batch instead of the model."""
    return 'mdl' in self.data_axes

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """Returns the mesh axes that split the batch, the slowest first."""
    return spec_axes(split_dims_to_partition_spec(('batch',), self.mesh_axis_names, self.axis_rules), 1)[0]

  def override_partition_specs(self, specs: Any) -> Any:
    """Replaces `data` by these data axes in the raw specs of a step's inputs or outputs, one spec or a sequence.

    P('data') becomes P(data_axes); P('mdl') becomes None if `mdl` is a data axis. Every other spec stays the same. So
    does a tree of specs, because weights take theirs from the axis rules. For steps that are partitioned by hand,
    outside of `partition_spmd_model` (T5X contrib/moe).
    """

    def override(spec: Any) -> Any:
      if not isinstance(spec, PartitionSpec):
        return spec
      if spec == PartitionSpec('data'):
        return PartitionSpec(self.data_axes if len(self.data_axes) > 1 else self.data_axes[0])
      if spec == PartitionSpec('mdl') and self.two_data_axes:
        return None
      return spec

    if isinstance(specs, list | tuple):
      return tuple(override(spec) for spec in specs)
    return override(specs)


def standard_logical_axis_rules(parameter_partitioning_dims: int = 1) -> AxisRules:
  """Returns T5X's rules for everything but experts, in our names, as base rules: only `mdl` splits weights.

  Raises:
    UserError: parameter_partitioning_dims is not 1. T5X does not combine 2 with experts either.
  """
  if parameter_partitioning_dims != 1:
    raise UserError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported beside experts: leave it at 1, or '
      'use DEFAULT_AXIS_RULES as base_rules, which split dense weights over data too.'
    )
  split = ('vocab', 'mlp', 'heads', 'kv_heads', 'act_vocab', 'act_mlp', 'act_heads', 'act_kv_heads')
  unsharded = ('embed', 'expert_embed', 'head_dim', 'layers', 'norm', 'seq', 'act_embed')
  return (('batch', 'data'), *((name, 'mdl') for name in split), *((name, None) for name in unsharded))


def data_model_axes(
  *,
  num_devices: int,
  num_experts: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
  base_rules: AxisRules,
  additional_rules: AxisRules = (),
) -> ExpertAxes:
  """Returns axes in which `data` splits the experts; surplus devices make `mdl` a second data axis (T5X contrib/moe).

  Args:
    num_devices: of the mesh.
    num_experts: 0 for a model without experts.
    num_partitions, model_parallel_submesh: the number of devices that share one replica of the model, or their submesh;
      give exactly one. Without model parallelism and with more devices than experts, `mdl` has size
      num_devices / num_experts instead.
    base_rules: for everything but experts: DEFAULT_AXIS_RULES, or T5X's `standard_logical_axis_rules`.
    additional_rules: appended to all other rules.

  Raises:
    UserError: both or neither of num_partitions and the submesh are given, or sizes do not divide.
  """
  model_size = _model_size(num_partitions, model_parallel_submesh)
  two_data_axes = 0 < num_experts < num_devices and model_size <= 1
  if two_data_axes:
    if num_devices % num_experts:
      raise UserError(
        f'{num_devices} devices are not a multiple of {num_experts} experts, so experts cannot be replicated evenly: '
        f'choose a number of experts that divides {num_devices}, or use data_expert_model_axes, which chooses an '
        'expert axis that divides the devices.'
      )
    if model_parallel_submesh is not None:
      logging.info('A second data axis replaces model_parallel_submesh %s.', tuple(model_parallel_submesh))
    model_size = num_devices // num_experts
  expert_rules = (
    ('expert', 'data'),
    ('expert_mlp', 'mdl'),
    ('expert_group', None),
    ('expert_replicas', None),
    ('unmodeled', None),
  )
  rules = (*_without_expert_names(base_rules), *expert_rules, *additional_rules)
  if two_data_axes:
    rules = tuple((name, 'mdl' if name == 'expert_replicas' else _without_mdl(axes)) for name, axes in rules)
  data_axes = ('data', 'mdl') if two_data_axes else ('data',)
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'mdl'),
    ici_mesh_shape=(1, _data_size(num_devices, model_size), model_size),
    axis_rules=_replace_data_of_batch(data_axes, rules),
    data_axes=data_axes,
  )


def data_expert_model_axes(
  *,
  num_devices: int,
  num_expert_partitions: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
  base_rules: AxisRules,
  additional_rules: AxisRules = (),
) -> ExpertAxes:
  """Returns axes in which `expert` splits the experts, `data` replicates them, and both split the batch (T5X).

  The size of `expert` is the largest divisor of num_devices / model parallelism that is at most
  `num_expert_partitions`. The logical name `expert` needs no rule, because it is the name of the mesh axis. Other
  arguments are as in `data_model_axes`.

  Raises:
    UserError: both or neither of num_partitions and the submesh are given, or sizes do not divide.
  """
  model_size = _model_size(num_partitions, model_parallel_submesh)
  if num_expert_partitions < 1:
    raise UserError(f'num_expert_partitions={num_expert_partitions} must be at least 1, and at most the experts.')
  base_size = _data_size(num_devices, model_size)
  expert_size = next(size for size in range(min(num_expert_partitions, base_size), 0, -1) if base_size % size == 0)
  expert_rules = (('expert_mlp', 'mdl'), ('expert_group', None), ('expert_replicas', 'data'), ('unmodeled', None))
  rules = (*_without_expert_names(base_rules), *expert_rules, *additional_rules)
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
    ici_mesh_shape=(1, base_size // expert_size, expert_size, model_size),
    axis_rules=_replace_data_of_batch(('expert', 'data'), rules),
    data_axes=('expert', 'data'),
  )


def hidden_sharding_axes(
  *,
  num_devices: int,
  num_experts: int,
  hidden_dim: int,
  num_partitions: int = 1,
  base_rules: AxisRules,
  additional_rules: AxisRules = (),
) -> ExpertAxes:
  """Returns axes in which `expert` splits the experts, `data` their hidden layers, and both the batch (MegaBlocks).

  Device r of the devices that share the batch holds group r mod size(expert) of the experts, and part
  r div size(expert) of their hidden layers. With at least as many experts as devices, `data` has size 1.

  Args:
    num_devices: of the mesh.
    num_experts: E.
    hidden_dim: F of one expert.
    num_partitions: model parallelism, which splits the hidden layers further.
    base_rules, additional_rules: as in `data_model_axes`.

  Raises:
    UserError: sizes do not divide.
  """
  world_size = _data_size(num_devices, num_partitions)
  expert_size, hidden_size = expert_parallel_degrees(world_size, num_experts=num_experts, hidden_dim=hidden_dim)
  base_rules = [(name, axes) for name, axes in _without_expert_names(base_rules) if name != 'expert_embed']
  # `data` splits the experts' hidden dim and so cannot split their embed dim too.
  expert_rules = (('expert_embed', None), ('expert_mlp', ('data', 'mdl')))
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
    ici_mesh_shape=(1, hidden_size, expert_size, num_partitions),
    axis_rules=_replace_data_of_batch(('data', 'expert'), (*base_rules, *expert_rules, *additional_rules)),
    data_axes=('data', 'expert'),
  )


def expert_parallel_degrees(world_size: int, *, num_experts: int, hidden_dim: int) -> tuple[int, int]:
  """Returns the degrees of expert sharding and hidden sharding (MegaBlocks); their product is `world_size`.

  Expert sharding is min(world_size, num_experts); hidden sharding uses the remaining factor.

  Raises:
    UserError: the experts, the devices or the hidden layer do not divide.
  """
  if num_experts < 1 or world_size < 1:
    raise UserError(f'{num_experts} experts on {world_size} devices: both numbers must be at least 1.')
  expert_sharding = min(world_size, num_experts)
  hidden_sharding = world_size // expert_sharding
  for name, size, parts in (
    (f'num_experts={num_experts}', num_experts, expert_sharding),
    (f'{world_size} devices', world_size, expert_sharding),
    (f'hidden_dim={hidden_dim}', hidden_dim, hidden_sharding),
  ):
    if size % parts:
      raise UserError(
        f'{name} must be a multiple of {parts} for {num_experts} experts on {world_size} devices: change one of them, '
        'or use data_expert_model_axes, under which uneven sizes are padded.'
      )
  return expert_sharding, hidden_sharding


def _model_size(num_partitions: int | None, model_parallel_submesh: Sequence[int] | None) -> int:
  if num_partitions is not None and model_parallel_submesh is None:
    return num_partitions
  if num_partitions is None and model_parallel_submesh is not None:
    return math.prod(model_parallel_submesh)
  raise UserError(
    f'num_partitions={num_partitions} and model_parallel_submesh={model_parallel_submesh}: give exactly one of them.'
  )


def _data_size(num_devices: int, model_size: int) -> int:
  if model_size < 1 or num_devices % model_size:
    raise UserError(
      f'{num_devices} devices are not a multiple of the model parallelism {model_size}: choose a divisor of '
      f'{num_devices}.'
    )
  return num_devices // model_size


def _without_expert_names(rules: AxisRules) -> AxisRules:
  """Drops the rules for names that a form sets itself, because an earlier rule of the same name would win."""
  return [(name, axes) for name, axes in rules if name not in _EXPERT_NAMES]


def _without_mdl(axes: SplitDim) -> SplitDim:
  return _replace_each_axis(axes, lambda axis: () if axis == 'mdl' else (axis,))


def _replace_data_of_batch(data_axes: tuple[str, ...], rules: AxisRules) -> AxisRules:
  """Replaces `data` by `data_axes` in the rules for the batch."""

  def widened(axes: SplitDim) -> SplitDim:
    return _replace_each_axis(axes, lambda axis: data_axes if axis == 'data' else (axis,))

  return tuple((name, widened(axes) if name == 'batch' else axes) for name, axes in rules)


def _replace_each_axis(axes: SplitDim, replace: Callable[[str], tuple[str, ...]]) -> SplitDim:
  """Replaces each mesh axis of a rule by other axes or none."""
  if axes is None or isinstance(axes, int):
    return None
  names = tuple(new for axis in ((axes,) if isinstance(axes, str) else axes) for new in replace(axis))
  return names[0] if len(names) == 1 else names or None
