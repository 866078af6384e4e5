"""The default axis rules, and mesh layouts: an experiment's mesh and rules in one field, which --set can change.

    class Mixture(MoeLanguageModel):
      mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=4)

    spmd-tasks --exp my.Mixture --set mesh.num_expert_partitions=2 ...

A layout fills the experiment's fields `mesh_axis_names`, `ici_mesh_shape`, `dcn_mesh_shape` and `axis_rules`. Those for
mixtures of experts are in expert_meshes.py.
"""

import dataclasses
from typing import Protocol

from spmd_tasks.sharding.specs import AxisRules

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
