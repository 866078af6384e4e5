"""synthetic.Uneven with experts, with each kind of expert parallelism, for tests that compare meshes."""

import fiddle as fdl

from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.layers.moe import CapacityGather, Dropless
from spmd_tasks.recipes import MoeLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh, DataModelMesh, HiddenShardingMesh

_EXPERT = DataExpertModelMesh(num_devices=8, num_expert_partitions=4).axes()
_HIDDEN = HiddenShardingMesh(num_devices=8, num_experts=4, hidden_dim=44).axes()
_TWO_DATA = DataModelMesh(num_devices=8, num_experts=4).axes()


class AlongData(Uneven, MoeLanguageModel):
  """6 experts, top 2, split over the data axis by the default rules."""

  num_experts = 6
  hidden_dims = 45
  form: str = 'dropless'
  capacity_factor: float = 1.5  # for the form 'capacity'; drops tokens

  def computation(self):
    if self.form == 'dropless':
      return fdl.Config(Dropless)
    return fdl.Config(CapacityGather, capacity_factor=self.capacity_factor, min_capacity=1)


class ExpertAxis(AlongData):
  """Experts split over an axis of their own (T5X's three axes)."""

  mesh_axis_names = _EXPERT.mesh_axis_names
  ici_mesh_shape = _EXPERT.ici_mesh_shape
  axis_rules = _EXPERT.axis_rules


class TwoDataAxes(AlongData):
  """4 experts, replicated over the second of two data axes (T5X)."""

  num_experts = 4
  hidden_dims = 44
  mesh_axis_names = _TWO_DATA.mesh_axis_names
  ici_mesh_shape = _TWO_DATA.ici_mesh_shape
  axis_rules = _TWO_DATA.axis_rules


class HiddenSharded(TwoDataAxes):
  """The same 4 experts, with hidden layers split over the data axis (MegaBlocks)."""

  mesh_axis_names = _HIDDEN.mesh_axis_names
  ici_mesh_shape = _HIDDEN.ici_mesh_shape
  axis_rules = _HIDDEN.axis_rules
