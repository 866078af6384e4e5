"""Meshes for mixtures of experts: expert parallelism beside data and model parallelism, in three forms.

    mesh = DataExpertModelMesh(num_devices=64, num_expert_partitions=8, num_partitions=4)   # a field of an experiment

`DataModelMesh` and `DataExpertModelMesh` are the first and the newer form of T5X contrib/moe, `HiddenShardingMesh` is
MegaBlocks' expert and hidden sharding.

Layers read only the axis rules, so an experiment may also write its rules by hand (`MeshAxes`). T5X's `model` is `mdl`
here. The forms replace the first rule of each name of experts in `base_rules`, at the place of the first of them.
"""

import dataclasses

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.mesh import DEFAULT_AXIS_RULES, MeshAxes, stage_axis_rules
from spmd_tasks.sharding.specs import AxisRules, SplitDim, axes_of, spec_entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExpertMesh:
  """What the forms have in common.

  Fields:
    num_devices: of the whole mesh.
    num_partitions: model parallelism, the size of `mdl`.
    base_rules: the axis rules of everything but experts.
  """

  num_devices: int
  num_partitions: int = 1
  base_rules: AxisRules = DEFAULT_AXIS_RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataModelMesh(_ExpertMesh):
  """Mesh (replica, data, mdl): `data` splits the experts of the model, `num_experts`.

  With num_partitions=1 and fewer experts than devices, `mdl` has size num_devices / num_experts and is a second data
  axis, along which experts are replicated.
  """

  num_experts: int

  def axes(self) -> MeshAxes:
    """Returns the mesh and its rules. Raises a UserError if sizes do not divide."""
    model_size = self.num_partitions
    two_data_axes = 0 < self.num_experts < self.num_devices and model_size == 1
    if two_data_axes:
      if self.num_devices % self.num_experts:
        raise UserError(
          f'{self.num_devices} devices are not a multiple of {self.num_experts} experts, so experts cannot be '
          f'replicated evenly: choose a number of experts that divides {self.num_devices}, or use DataExpertModelMesh.'
        )
      model_size = self.num_devices // self.num_experts
    rules = _with_expert_rules(self.base_rules, expert='data', expert_mlp='mdl', expert_replicas=None)
    if two_data_axes:
      rules = tuple((name, 'mdl' if name == 'expert_replicas' else _replaced(axes, 'mdl', ())) for name, axes in rules)
    return MeshAxes(
      mesh_axis_names=('replica', 'data', 'mdl'),
      ici_mesh_shape=(1, _data_size(self.num_devices, model_size), model_size),
      axis_rules=_with_batch_over(('data', 'mdl') if two_data_axes else ('data',), rules),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataExpertModelMesh(_ExpertMesh):
  """Mesh (replica, data, expert, mdl): `expert` splits the experts, `data` replicates them, and both split the batch.

  Model parallelism works beside them.

  Fields, beside those of the other forms:
    num_expert_partitions: over how many devices the experts are split; `data` gets what the other axes leave.
    num_stages: stages of a pipeline; more than one adds the axis `stage` after `replica`.
    num_replicas: the size of `replica`, over which weights are not split, so that they are gathered from fewer devices.
  """

  num_expert_partitions: int
  num_stages: int = 1
  num_replicas: int = 1

  def axes(self) -> MeshAxes:
    """Returns the mesh and its rules. Raises a UserError if sizes do not divide."""
    num_devices = self.num_devices
    for name in ('num_replicas', 'num_stages'):
      if (size := getattr(self, name)) < 1 or num_devices % size:
        raise UserError(f'{name}={size} must be at least 1 and divide what is left of the devices, {num_devices}.')
      num_devices //= size
    data_size = _data_size(num_devices, self.num_partitions)
    if self.num_expert_partitions < 1 or data_size % self.num_expert_partitions:
      largest = max(1, min(data_size, self.num_expert_partitions))
      nearest = next(size for size in range(largest, 0, -1) if data_size % size == 0)
      raise UserError(
        f'num_expert_partitions={self.num_expert_partitions} must be at least 1 and divide the devices of a stage over '
        f'num_partitions={self.num_partitions}, {data_size}: choose {nearest}.'
      )
    own = _with_expert_rules(self.base_rules, expert='expert', expert_mlp='mdl', expert_replicas='data')
    rules = _with_batch_over(('expert', 'data'), own)
    names: tuple[str, ...] = ('data', 'expert', 'mdl')
    sizes: tuple[int, ...] = (data_size // self.num_expert_partitions, self.num_expert_partitions, self.num_partitions)
    if self.num_stages > 1:
      names, sizes, rules = ('stage', *names), (self.num_stages, *sizes), stage_axis_rules(rules)
    return MeshAxes(mesh_axis_names=('replica', *names), ici_mesh_shape=(self.num_replicas, *sizes), axis_rules=rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenShardingMesh(_ExpertMesh):
  """Mesh (replica, data, expert, mdl): `expert` splits the experts, `data` their hidden layers, and both the batch.

  `expert` has min(devices, num_experts) devices and `data` the remaining factor, each without those of `mdl`, which
  splits the hidden layers further. `num_experts` and `hidden_dim` are those of the model.
  """

  num_experts: int
  hidden_dim: int

  def axes(self) -> MeshAxes:
    """Returns the mesh and its rules. Raises a UserError if experts, devices or the hidden layer do not divide."""
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
          'of them, or use DataExpertModelMesh, under which uneven sizes are padded.'
        )
    # `data` splits the experts' hidden dim and so cannot split their embed dim too.
    rules = _with_expert_rules(self.base_rules, expert='expert', expert_embed=None, expert_mlp=('data', 'mdl'))
    return MeshAxes(
      mesh_axis_names=('replica', 'data', 'expert', 'mdl'),
      ici_mesh_shape=(1, hidden_size, expert_size, self.num_partitions),
      axis_rules=_with_batch_over(('data', 'expert'), rules),
    )


def _data_size(num_devices: int, model_size: int) -> int:
  if num_devices < 1:
    raise UserError(f'num_devices={num_devices} must be at least 1.')
  if model_size < 1 or num_devices % model_size:
    raise UserError(
      f'{num_devices} devices are not a multiple of the model parallelism {model_size}: choose a divisor of '
      f'{num_devices}.'
    )
  return num_devices // model_size


def _with_expert_rules(base_rules: AxisRules, **rules: SplitDim) -> AxisRules:
  """Replaces the first base rule of each name, at the place of the first base rule for experts, or at the end.

  Further rules of a name are for dims whose axes the first one cannot have.
  """
  names = [name for name, _ in base_rules]
  place = next((i for i, name in enumerate(names) if name.startswith('expert')), len(base_rules))
  replaced = {names.index(name) for name in rules if name in names}
  after = (rule for i, rule in enumerate(base_rules) if i >= place and i not in replaced)
  return (*base_rules[:place], *rules.items(), *after)


def _with_batch_over(data_axes: tuple[str, ...], rules: AxisRules) -> AxisRules:
  """Replaces `data` by `data_axes` in the rules for the batch."""
  return tuple((name, _replaced(axes, 'data', data_axes) if name == 'batch' else axes) for name, axes in rules)


def _replaced(axes: SplitDim, old: str, new: tuple[str, ...]) -> SplitDim:
  """Replaces a mesh axis of a rule by other axes or none."""
  return spec_entry([each for axis in axes_of(axes) for each in (new if axis == old else (axis,))])
