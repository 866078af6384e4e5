"""MeshSpec: names of mesh axes with their ICI and DCN sizes, and the jax Mesh built from them.

ICI is the fast network within a slice (or within one host), DCN the slow network between slices. An axis of ICI size i
and DCN size d has i * d devices; its DCN part is the outer one, as in Pax and T5X. granules.py arranges the devices.

Beside it axis rules (the default ones, and others for stages and contexts made of them), and mesh layouts: one field of
an experiment, which --set can change, for `mesh_axis_names`, `ici_mesh_shape`, `dcn_mesh_shape` and `axis_rules`.
"""

from collections.abc import Sequence
import dataclasses
import glob
import math
from typing import Protocol

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import AxisRules, axes_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
  """Names and sizes of mesh axes.

  Attributes:
    axis_names: one distinct name per axis.
    ici_mesh_shape: one size per axis, within a slice; one of them may be -1 for the remaining devices.
    dcn_mesh_shape: one size per axis, between slices; None for one slice.
  """

  axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  dcn_mesh_shape: tuple[int, ...] | None = None

  def __post_init__(self):
    if len(set(self.axis_names)) != len(self.axis_names):
      raise UserError(f'mesh_axis_names {self.axis_names} name an axis twice: give every mesh axis its own name.')
    for field in ('ici_mesh_shape', 'dcn_mesh_shape'):
      shape = getattr(self, field)
      if shape is None:
        continue
      if len(shape) != len(self.axis_names):
        raise UserError(
          f'{field} {shape} has {len(shape)} entries, but the mesh has {len(self.axis_names)} axes, '
          f'{", ".join(self.axis_names)}: give one size per axis.'
        )
      smallest = -1 if field == 'ici_mesh_shape' else 1
      if any(size == 0 or size < smallest for size in shape) or list(shape).count(-1) > 1:
        raise UserError(f'{field} {shape} must hold positive sizes (one ICI size may be -1: the remaining devices).')

  def sizes(self, num_devices: int) -> dict[str, int]:
    """Returns axis name -> size (ICI x DCN). Raises a UserError if their product is not the number of devices."""
    ici, dcn = self._shapes(num_devices)
    return {name: i * d for name, i, d in zip(self.axis_names, ici, dcn)}

  def _shapes(self, num_devices: int) -> tuple[list[int], list[int]]:
    ici = list(self.ici_mesh_shape)
    dcn = list(self.dcn_mesh_shape or (1,) * len(ici))
    if -1 in ici:
      others = math.prod(size for size in ici if size != -1) * math.prod(dcn)
      ici[ici.index(-1)] = max(1, num_devices // others)
    wanted = math.prod(ici) * math.prod(dcn)
    if wanted != num_devices:
      from spmd_tasks.sharding.mesh_shapes import nearest_shapes

      dcn_text = f' x dcn_mesh_shape {tuple(dcn)}' if self.dcn_mesh_shape else ''
      num_slices = math.prod(dcn)
      nearest = nearest_shapes(ici, max(1, num_devices // num_slices))
      remedy = (
        f'set --ici_mesh_shape to {len(ici)} sizes whose product is {num_devices // num_slices}, such as '
        f'{" or ".join(",".join(map(str, shape)) for shape in nearest)}'
      )
      if num_devices % num_slices:
        remedy = f'{num_slices} slices do not divide them, so set --dcn_mesh_shape to sizes whose product does'
      raise UserError(
        f'ici_mesh_shape {self.ici_mesh_shape}{dcn_text} needs {wanted} devices but there are {num_devices}: {remedy}'
        f', or on a CPU pass --num_fake_devices {wanted}.'
      )
    return ici, dcn

  def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the jax Mesh over `devices` (default: all) with automatic (GSPMD) axes."""
    devices = list(jax.devices() if devices is None else devices)
    try:
      ici, dcn = self._shapes(len(devices))
      if self.dcn_mesh_shape is None and devices[0].platform == 'cpu':  # none is nearer to another
        array = np.asarray(devices, dtype=object).reshape(ici)
      else:
        from spmd_tasks.sharding.granules import device_array

        array = device_array(ici, dcn, devices)
    except UserError as error:
      is_fake = jax.config.jax_num_cpu_devices > 0  # type: ignore[attr-defined]  # by --num_fake_devices
      if is_fake or devices[0].platform != 'cpu' or not glob.glob('/dev/nvidia[0-9]*'):
        raise
      raise UserError(
        f"{error} JAX has found no GPU though this machine has one: pip install 'jax[cuda13]'."
      ) from error
    return Mesh(array, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))

  def build_abstract(self) -> AbstractMesh:
    """Returns the mesh without devices, for partitioning on a machine that lacks them. Refuses an ICI size of -1."""
    if -1 in self.ici_mesh_shape:
      raise UserError(f'ici_mesh_shape {self.ici_mesh_shape} of a mesh without devices needs every size: replace -1.')
    sizes = self.sizes(math.prod(self.ici_mesh_shape) * math.prod(self.dcn_mesh_shape or (1,)))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


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


def stage_axis_rules(base_rules: AxisRules, axis: str = 'stage') -> AxisRules:
  """Returns the base rules with `layers` split over `axis`, and `batch` also split over it, as its outermost axis.

  Each stage then holds a run of layers. The batch is split over the stages outside of the pipeline, so that stages
  share the work of embeddings and logits. As the outermost axis of the batch, the stages hold runs of rows, which are
  runs of microbatches. The name `layers` needs no rule if the axis itself is called so.
  """
  stages = () if axis == 'layers' else (('layers', axis),)
  rules = [(name, (axis, *axes_of(axes)) if name == 'batch' else axes) for name, axes in base_rules]
  return (*stages, *(rule for rule in rules if rule[0] != 'layers'))


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
  rules = [(name, (*axes_of(axes), axis) if name == 'embed' else axes) for name, axes in base_rules]
  return (('seq', axis), *(rule for rule in rules if rule[0] != 'seq'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """A mesh that is written out: axis names, outermost first, their sizes as in MeshSpec, and the axis rules."""

  mesh_axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  dcn_mesh_shape: tuple[int, ...] | None = None
  axis_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> 'MeshAxes':
    return self


class MeshLayout(Protocol):
  """The settings of a mesh; a frozen dataclass, so that --set reaches its fields."""

  def axes(self) -> MeshAxes:
    """Returns the mesh and its rules. Raises a UserError if the sizes do not fit together."""
