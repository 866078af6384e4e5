"""How expert parallelism shares the mesh with data and model parallelism: three forms, each a mesh and its axis rules.

    axes = data_model_axes(num_devices=8, num_experts=4, num_partitions=1, base_rules=DEFAULT_AXIS_RULES)

    class SwitchTiny(MoeLanguageModel):
      mesh_axis_names, ici_mesh_shape, axis_rules = axes.mesh_axis_names, axes.ici_mesh_shape, axes.axis_rules

* `data_model_axes`: (replica, data, mdl). Experts lie along `data`. With fewer experts than devices and no model
  parallelism, `mdl` becomes a second data axis, along which experts are replicated (T5X contrib/moe, its first form).
* `data_expert_model_axes`: (replica, data, expert, mdl). Experts have an axis of their own, and so model parallelism
  beside them; they are replicated along `data` (T5X contrib/moe, its newer form).
* `hidden_sharding_axes`: (replica, data, expert, mdl). With fewer experts than devices the hidden layer of every expert
  is split along `data` (MegaBlocks' expert and hidden sharding).

Everything else follows from the axis rules, which an experiment may write by hand just as well. T5X's `model` is `mdl`
here. Of T5X's (x, y, z, cores) submesh only the product counts: `MeshSpec` finds the devices' places.
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
  """A mesh and its axis rules, for the fields of an Experiment that have these names.

  Attributes:
    mesh_axis_names, ici_mesh_shape: the mesh's axes, outermost first, and their sizes.
    axis_rules: the base rules, the experts' and the user's, in this order.
    data_axes: what stands for `data` wherever the batch is split: ('data',), ('data', 'mdl') or ('expert', 'data').
  """

  mesh_axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  axis_rules: AxisRules
  data_axes: tuple[str, ...]

  @property
  def two_data_axes(self) -> bool:
    """Whether `mdl` splits the batch instead of the model."""
    return 'mdl' in self.data_axes

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes over which the batch is split, the slowest first."""
    return spec_axes(split_dims_to_partition_spec(('batch',), self.mesh_axis_names, self.axis_rules), 1)[0]

  def override_partition_specs(self, specs: Any) -> Any:
    """Raw specs of a step's inputs or outputs, one or a sequence of them, with the batch where these axes have it.

    P('data') becomes P(data_axes), and P('mdl') None where `mdl` is a data axis. Every other spec stays as it is, and
    so does any tree of specs: weights have theirs from the axis rules. For steps that are partitioned by hand, outside
    of `partition_spmd_model` (T5X contrib/moe).
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
  """T5X's rules for everything but experts, as base rules: weights split over `mdl` only, in our names.

  Raises:
    UserError: two-dimensional parameter partitioning, which T5X does not offer beside experts either.
  """
  if parameter_partitioning_dims != 1:
    raise UserError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported beside experts: leave it at 1, or '
      'take DEFAULT_AXIS_RULES as base_rules, which split dense weights over data too.'
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
  """Experts along `data`; `mdl` a second data axis where there are devices left over (T5X contrib/moe).

  Args:
    num_devices: of the mesh.
    num_experts: 0 for a model without experts.
    num_partitions, model_parallel_submesh: how many devices share one replica of the model, or their submesh; one of
      the two. Without model parallelism and with more devices than experts, num_devices / num_experts takes its place.
    base_rules: of everything but experts: DEFAULT_AXIS_RULES, or T5X's `standard_logical_axis_rules`.
    additional_rules: put after all others.

  Raises:
    UserError: both or neither of num_partitions and the submesh, or sizes that do not divide.
  """
  model_size = _model_size(num_partitions, model_parallel_submesh)
  two_data_axes = 0 < num_experts < num_devices and model_size <= 1
  if two_data_axes:
    if num_devices % num_experts:
      raise UserError(
        f'{num_devices} devices are not a multiple of {num_experts} experts, so that experts cannot be replicated '
        f'evenly: choose a number of experts that divides {num_devices}, or use data_expert_model_axes, where the '
        'expert axis is a divisor of the devices.'
      )
    if model_parallel_submesh is not None:
      logging.info('model_parallel_submesh %s gives way to a second data axis.', tuple(model_parallel_submesh))
    model_size = num_devices // num_experts
  expert_rules = (
    ('expert', 'data'),
    ('expert_mlp', 'mdl'),
    ('expert_group', None),
    ('expert_replicas', None),
    ('unmodeled', None),
  )
  rules = (*_of_other_names(base_rules), *expert_rules, *additional_rules)
  if two_data_axes:
    rules = tuple((name, 'mdl' if name == 'expert_replicas' else _without_mdl(axes)) for name, axes in rules)
  data_axes = ('data', 'mdl') if two_data_axes else ('data',)
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'mdl'),
    ici_mesh_shape=(1, _data_size(num_devices, model_size), model_size),
    axis_rules=_with_batch_over(data_axes, rules),
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
  """Experts along an axis of their own, replicated along `data`; the batch over both (T5X contrib/moe).

  The expert axis is the largest divisor of num_devices / model parallelism that is at most `num_expert_partitions`.
  There is no rule for the name `expert`: it is the mesh axis itself. Other arguments as in `data_model_axes`.

  Raises:
    UserError: both or neither of num_partitions and the submesh, or sizes that do not divide.
  """
  model_size = _model_size(num_partitions, model_parallel_submesh)
  if num_expert_partitions < 1:
    raise UserError(f'num_expert_partitions={num_expert_partitions} must be at least 1, and at most the experts.')
  base_size = _data_size(num_devices, model_size)
  expert_size = next(size for size in range(min(num_expert_partitions, base_size), 0, -1) if base_size % size == 0)
  expert_rules = (('expert_mlp', 'mdl'), ('expert_group', None), ('expert_replicas', 'data'), ('unmodeled', None))
  rules = (*_of_other_names(base_rules), *expert_rules, *additional_rules)
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
    ici_mesh_shape=(1, base_size // expert_size, expert_size, model_size),
    axis_rules=_with_batch_over(('expert', 'data'), rules),
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
  """Experts along `expert`, each expert's hidden layer along `data`, the batch over both (MegaBlocks).

  Device r of those that share the batch has the experts of place r mod size(expert) and the part r div size(expert) of
  their hidden layers. With as many experts as devices, or more, `data` has size 1.

  Args:
    num_devices: of the mesh.
    num_experts: E.
    hidden_dim: F of one expert.
    num_partitions: model parallelism; it splits the hidden layers further.
    base_rules, additional_rules: as in `data_model_axes`.

  Raises:
    UserError: sizes that do not divide.
  """
  world_size = _data_size(num_devices, num_partitions)
  expert_size, hidden_size = expert_parallel_degrees(world_size, num_experts=num_experts, hidden_dim=hidden_dim)
  base_rules = [(name, axes) for name, axes in _of_other_names(base_rules) if name != 'expert_embed']
  # `data` splits the experts' hidden dim and cannot split their embed dim too.
  expert_rules = (('expert_embed', None), ('expert_mlp', ('data', 'mdl')))
  return ExpertAxes(
    mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
    ici_mesh_shape=(1, hidden_size, expert_size, num_partitions),
    axis_rules=_with_batch_over(('data', 'expert'), (*base_rules, *expert_rules, *additional_rules)),
    data_axes=('data', 'expert'),
  )


def expert_parallel_degrees(world_size: int, *, num_experts: int, hidden_dim: int) -> tuple[int, int]:
  """Over how many of `world_size` devices experts are spread, and each one's hidden layer (MegaBlocks).

  Returns:
    (expert sharding, hidden sharding), whose product is `world_size`: min(world_size, num_experts), and what is left.

  Raises:
    UserError: the experts, the devices or the hidden layer do not divide.
  """
  if num_experts < 1 or world_size < 1:
    raise UserError(f'{num_experts} experts on {world_size} devices: both must be at least 1.')
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
        'or use data_expert_model_axes, which pads what does not divide.'
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
    raise UserError(f'{num_devices} devices are not a multiple of the model parallelism {model_size}: change it.')
  return num_devices // model_size


def _of_other_names(rules: AxisRules) -> AxisRules:
  """The rules without those that a form sets itself: an earlier rule of the same name would win."""
  return [(name, axes) for name, axes in rules if name not in _EXPERT_NAMES]


def _without_mdl(axes: SplitDim) -> SplitDim:
  return _each_axis(axes, lambda axis: () if axis == 'mdl' else (axis,))


def _with_batch_over(data_axes: tuple[str, ...], rules: AxisRules) -> AxisRules:
  """The rules with `data_axes` in the place of `data` wherever the batch goes."""

  def widened(axes: SplitDim) -> SplitDim:
    return _each_axis(axes, lambda axis: data_axes if axis == 'data' else (axis,))

  return tuple((name, widened(axes) if name == 'batch' else axes) for name, axes in rules)


def _each_axis(axes: SplitDim, replace: Callable[[str], tuple[str, ...]]) -> SplitDim:
  """A rule's mesh axes, each replaced by others or none."""
  if axes is None or isinstance(axes, int):
    return None
  names = tuple(new for axis in ((axes,) if isinstance(axes, str) else axes) for new in replace(axis))
  return names[0] if len(names) == 1 else names or None
