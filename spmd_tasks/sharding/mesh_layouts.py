"""Mesh layouts: axis names, sizes and axis rules of an experiment in one field, which --set can change.

    class Mixture(MoeLanguageModel):
      mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=4)

    spmd-tasks --exp my.Mixture --set mesh.num_expert_partitions=2 ...

A layout fills the experiment's fields `mesh_axis_names`, `ici_mesh_shape`, `dcn_mesh_shape` and `axis_rules`.
"""

import dataclasses
from typing import Any, Protocol

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.expert_axes import data_expert_model_axes, data_model_axes, hidden_sharding_axes
from spmd_tasks.sharding.specs import AxisRules, stage_axis_rules

# Weights: fully sharded over `data` on the embed dim, tensor-parallel over `mdl`, experts over `data` too (T5X).
# Activations: batch over `replica` and `data`, the wide dims over `mdl`.
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
  ('expert_embed', 'data'),  # where `expert` has taken `data`, unsharded
  ('expert_mlp', 'mdl'),
  ('seq', None),
  ('act_embed', None),
  ('act_vocab', 'mdl'),
  ('act_mlp', 'mdl'),
  ('act_heads', 'mdl'),
  ('act_kv_heads', 'mdl'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """A mesh that is written out: axis names, outermost first, their sizes, and the axis rules.

  Fields:
    mesh_axis_names: the axes.
    ici_mesh_shape, dcn_mesh_shape: their sizes inside a slice and across slices; None: one slice.
    axis_rules: ordered (logical name, mesh axes) pairs.
  """

  mesh_axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  dcn_mesh_shape: tuple[int, ...] | None = None
  axis_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> 'MeshAxes':
    return self


class MeshLayout(Protocol):
  """The settings of a mesh; a frozen dataclass, so that --set reaches its fields."""

  def axes(self) -> MeshAxes:
    """Returns the mesh and its rules.

    Raises:
      UserError: the sizes do not fit together.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataExpertModelMesh:
  """Mesh (replica, data, expert, mdl): an axis for the experts, see `data_expert_model_axes`.

  Fields:
    num_devices: of the whole mesh; `data` gets what the other two axes leave.
    num_expert_partitions: over how many devices the experts are split.
    num_stages: stages of a pipeline; more than one adds the axis `stage` after `replica`.
    num_partitions: the size of `mdl`.
    num_replicas: the size of `replica`, over which weights are not split, so that they are gathered from fewer devices.
    base_rules: the axis rules of everything but experts.
  """

  num_devices: int
  num_expert_partitions: int
  num_partitions: int = 1
  num_stages: int = 1
  num_replicas: int = 1
  base_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> MeshAxes:
    if self.num_replicas < 1 or self.num_devices % self.num_replicas:
      raise UserError(f'num_replicas={self.num_replicas} must be at least 1 and divide num_devices={self.num_devices}.')
    num_devices = self.num_devices // self.num_replicas
    if self.num_stages < 1 or num_devices % self.num_stages:
      raise UserError(
        f'num_stages={self.num_stages} must be at least 1 and divide num_devices={self.num_devices} over num_replicas='
        f'{self.num_replicas}.'
      )
    of_stage = data_expert_model_axes(
      num_devices=num_devices // self.num_stages,
      num_expert_partitions=self.num_expert_partitions,
      num_partitions=self.num_partitions,
      base_rules=self.base_rules,
    )
    num_expert_partitions = of_stage.ici_mesh_shape[of_stage.mesh_axis_names.index('expert')]
    if num_expert_partitions != self.num_expert_partitions:
      raise UserError(
        f'num_expert_partitions={self.num_expert_partitions} must divide the devices of a stage over num_partitions='
        f'{self.num_partitions}; the next smaller number that does is {num_expert_partitions}.'
      )
    (replica, *names), (_, *sizes) = of_stage.mesh_axis_names, of_stage.ici_mesh_shape
    if self.num_stages == 1:
      return dataclasses.replace(_of_experts(of_stage), ici_mesh_shape=(self.num_replicas, *sizes))
    return MeshAxes(
      mesh_axis_names=(replica, 'stage', *names),
      ici_mesh_shape=(self.num_replicas, self.num_stages, *sizes),
      axis_rules=stage_axis_rules(of_stage.axis_rules),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataModelMesh:
  """Mesh (replica, data, mdl): experts along `data`, and `mdl` as a second data axis, see `data_model_axes`.

  Fields:
    num_devices: of the whole mesh.
    num_experts: of the model.
    num_partitions: model parallelism; with 1 and fewer experts than devices, `mdl` splits the batch.
    base_rules: the axis rules of everything but experts.
  """

  num_devices: int
  num_experts: int
  num_partitions: int = 1
  base_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> MeshAxes:
    return _of_experts(data_model_axes(**_fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenShardingMesh:
  """Mesh (replica, data, expert, mdl): `data` splits the hidden layer of experts, see `hidden_sharding_axes`.

  Fields:
    num_devices: of the whole mesh.
    num_experts, hidden_dim: of the model.
    base_rules: the axis rules of everything but experts.
  """

  num_devices: int
  num_experts: int
  hidden_dim: int
  base_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> MeshAxes:
    return _of_experts(hidden_sharding_axes(**_fields(self)))


def _fields(layout: Any) -> dict[str, Any]:
  return {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}


def _of_experts(axes: Any) -> MeshAxes:
  return MeshAxes(mesh_axis_names=axes.mesh_axis_names, ici_mesh_shape=axes.ici_mesh_shape, axis_rules=axes.axis_rules)
