"""Meshes for mixtures of experts: expert parallelism with data and model parallelism.

    mesh = DataExpertModelMesh(num_devices=64, num_expert_partitions=8, num_partitions=4)   # a field of an experiment

`DataModelMesh` and `DataExpertModelMesh` are the older and the newer mesh of T5X contrib/moe, with `mdl` for T5X's
`model`. `HiddenShardingMesh` is MegaBlocks' expert and hidden sharding. For any other layout, give the mesh and its
axis rules as `MeshAxes`: layers read only the axis rules.

Each mesh replaces the rules for experts' dims in `base_rules`.
"""

import dataclasses

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.axis_rules import DEFAULT_AXIS_RULES, stage_axis_rules
from spmd_tasks.sharding.mesh import MeshAxes
from spmd_tasks.sharding.specs import AxisRules, SplitDim, axes_of, spec_entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExpertMesh:
  """Fields of all meshes for experts.

  Fields:
    num_devices: the size of the whole mesh.
    num_partitions: the size of `mdl` (model parallelism).
    base_rules: the axis rules of all other dims.
  """

  num_devices: int
  num_partitions: int = 1
  base_rules: AxisRules = DEFAULT_AXIS_RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataModelMesh(_ExpertMesh):
  """Mesh (replica, data, mdl): the model's `num_experts` experts are split over `data`.

  With num_partitions=1 and fewer experts than devices, `mdl` has size num_devices / num_experts and is a second data
  axis, over which experts are replicated.
  """

  num_experts: int

  def axes(self) -> MeshAxes:
    """Returns the mesh and its axis rules. Raises a UserError if sizes do not divide."""
    model_size = self.num_partitions
    two_data_axes = 0 < self.num_experts < self.num_devices and model_size == 1
    if two_data_axes:
      if self.num_devices % self.num_experts:
        raise UserError(
          f'num_devices={self.num_devices} is not divisible by num_experts={self.num_experts}: choose a number of '
          'experts that divides it, or use DataExpertModelMesh.'
        )
      model_size = self.num_devices // self.num_experts
    rules = _with_expert_rules(self.base_rules, expert='data', expert_mlp='mdl', expert_replicas=None)
    if two_data_axes:
      rules = tuple(
        (name, 'mdl' if name == 'expert_replicas' else _replace_axis(axes, 'mdl', ())) for name, axes in rules
      )
    return MeshAxes(
      mesh_axis_names=('replica', 'data', 'mdl'),
      ici_mesh_shape=(1, _data_size(self.num_devices, model_size), model_size),
      axis_rules=_with_batch_over(('data', 'mdl') if two_data_axes else ('data',), rules),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataExpertModelMesh(_ExpertMesh):
  """Mesh (replica, data, expert, mdl): experts are split over `expert` and replicated over `data`; both split batches.

  Fields:
    num_expert_partitions: the size of `expert`; `data` gets the remaining devices.
    num_stages: the number of pipeline stages; more than one adds the axis `stage` after `replica`.
    num_replicas: the size of `replica`, over which weights are replicated, so that they are gathered from fewer
      devices.
  """

  num_expert_partitions: int
  num_stages: int = 1
  num_replicas: int = 1

  def axes(self) -> MeshAxes:
    """Returns the mesh and its axis rules. Raises a UserError if sizes do not divide."""
    num_devices = self.num_devices
    for name in ('num_replicas', 'num_stages'):
      if (size := getattr(self, name)) < 1 or num_devices % size:
        raise UserError(f'{name}={size} must be at least 1 and divide {num_devices} devices: choose a divisor.')
      num_devices //= size
    data_size = _data_size(num_devices, self.num_partitions)
    if self.num_expert_partitions < 1 or data_size % self.num_expert_partitions:
      largest = max(1, min(data_size, self.num_expert_partitions))
      nearest = next(size for size in range(largest, 0, -1) if data_size % size == 0)
      raise UserError(
        f'num_expert_partitions={self.num_expert_partitions} must be at least 1 and divide the {data_size} devices '
        f'that num_partitions={self.num_partitions} and the other axes leave: choose {nearest}.'
      )
    expert_rules = _with_expert_rules(self.base_rules, expert='expert', expert_mlp='mdl', expert_replicas='data')
    rules = _with_batch_over(('expert', 'data'), expert_rules)
    names: tuple[str, ...] = ('data', 'expert', 'mdl')
    sizes: tuple[int, ...] = (data_size // self.num_expert_partitions, self.num_expert_partitions, self.num_partitions)
    if self.num_stages > 1:
      names, sizes, rules = ('stage', *names), (self.num_stages, *sizes), stage_axis_rules(rules)
    return MeshAxes(mesh_axis_names=('replica', *names), ici_mesh_shape=(self.num_replicas, *sizes), axis_rules=rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenShardingMesh(_ExpertMesh):
  """Mesh (replica, data, expert, mdl): `expert` splits experts, `data` and `mdl` their hidden dim.

  `expert` and `data` split the batch. With n = num_devices / num_partitions, `expert` has min(n, num_experts) devices
  and `data` the remaining ones. `num_experts` and `hidden_dim` are the model's.
  """

  num_experts: int
  hidden_dim: int

  def axes(self) -> MeshAxes:
    """Returns the mesh and its axis rules. Raises a UserError if experts, devices or the hidden dim do not divide."""
    num_devices = _data_size(self.num_devices, self.num_partitions)
    if self.num_experts < 1:
      raise UserError(f'num_experts={self.num_experts} must be at least 1.')
    expert_size = min(num_devices, self.num_experts)
    hidden_size = num_devices // expert_size
    for name, size, parts in (
      (f'num_experts={self.num_experts}', self.num_experts, expert_size),
      (f'{num_devices} devices', num_devices, expert_size),
      (f'hidden_dim={self.hidden_dim}', self.hidden_dim, hidden_size),
    ):
      if size % parts:
        raise UserError(
          f'{name} must be a multiple of {parts} for {self.num_experts} experts on {num_devices} devices: change one '
          'of them, or use DataExpertModelMesh, which pads uneven sizes.'
        )
    # `data` splits the experts' hidden dim, so it cannot split their embed dim.
    rules = _with_expert_rules(self.base_rules, expert='expert', expert_embed=None, expert_mlp=('data', 'mdl'))
    return MeshAxes(
      mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
      ici_mesh_shape=(1, hidden_size, expert_size, self.num_partitions),
      axis_rules=_with_batch_over(('data', 'expert'), rules),
    )


def _data_size(num_devices: int, model_size: int) -> int:
  if min(num_devices, model_size) < 1 or num_devices % model_size:
    raise UserError(
      f'num_devices={num_devices} must be a positive multiple of num_partitions={model_size}: choose a divisor.'
    )
  return num_devices // model_size


def _with_expert_rules(base_rules: AxisRules, **rules: SplitDim) -> AxisRules:
  """Replaces the first base rule of each name; inserts the new rules before all base rules for experts, or at the end.

  Later base rules of the same name remain: they apply if the axes of the first one are taken.
  """
  names = [name for name, _ in base_rules]
  start = next((i for i, name in enumerate(names) if name.startswith('expert')), len(base_rules))
  replaced = {names.index(name) for name in rules if name in names}
  rest = (rule for i, rule in enumerate(base_rules) if i >= start and i not in replaced)
  return (*base_rules[:start], *rules.items(), *rest)


def _with_batch_over(data_axes: tuple[str, ...], rules: AxisRules) -> AxisRules:
  """Replaces `data` by `data_axes` in the rules for the batch."""
  return tuple((name, _replace_axis(axes, 'data', data_axes) if name == 'batch' else axes) for name, axes in rules)


def _replace_axis(axes: SplitDim, old: str, new: tuple[str, ...]) -> SplitDim:
  """Replaces one mesh axis of a rule by any number of axes."""
  return spec_entry([axis for name in axes_of(axes) for axis in (new if name == old else (name,))])
