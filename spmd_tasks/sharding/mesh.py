"""MeshSpec: names of mesh axes with their ICI and DCN sizes, and the jax Mesh built from them.

ICI is the fast network within a slice (or within one host), DCN the slow network between slices. An axis of ICI size i
and DCN size d has i * d devices; its DCN part is the outer one, as in Pax and T5X. granules.py arranges the devices.

A MeshLayout computes the mesh and its axis rules from a few settings: it is one field of an experiment that replaces
`mesh_axis_names`, `ici_mesh_shape`, `dcn_mesh_shape` and `axis_rules`, and whose own fields --set can change.
"""

from collections.abc import Sequence
import dataclasses
import glob
import math
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.axis_rules import DEFAULT_AXIS_RULES
from spmd_tasks.sharding.granules import device_array
from spmd_tasks.sharding.mesh_shapes import nearest_shapes
from spmd_tasks.sharding.specs import AxisRules


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
      raise UserError(f'mesh_axis_names {self.axis_names} name an axis twice: give each mesh axis its own name.')
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
        raise UserError(f'{field} {shape} must have positive sizes; one ICI size may be -1, for the remaining devices.')

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
    num_needed = math.prod(ici) * math.prod(dcn)
    if num_needed != num_devices:
      dcn_text = f' x dcn_mesh_shape {tuple(dcn)}' if self.dcn_mesh_shape else ''
      num_slices = math.prod(dcn)
      shapes = nearest_shapes(ici, max(1, num_devices // num_slices))
      rest = self.axis_names.index('data') if 'data' in self.axis_names else 0
      if -1 not in self.ici_mesh_shape and num_devices % (num_needed // ici[rest]) == 0:
        shapes.append((*ici[:rest], -1, *ici[rest + 1 :]))
      remedy = (
        f'set --ici_mesh_shape to {len(ici)} sizes whose product is {num_devices // num_slices}, such as '
        f'{" or ".join(",".join(map(str, shape)) for shape in shapes)}'
        f'{" (-1 takes all remaining devices)" if -1 in shapes[-1] else ""}'
      )
      if num_devices % num_slices:
        remedy = f'{num_slices} slices do not divide them, so set --dcn_mesh_shape to sizes whose product does'
      raise UserError(
        f'ici_mesh_shape {self.ici_mesh_shape}{dcn_text} needs {num_needed} device{"s" * (num_needed != 1)} but there '
        f'{"is" if num_devices == 1 else "are"} {num_devices}: {remedy}, or on a CPU pass --num_fake_devices '
        f'{num_needed}.'
      )
    return ici, dcn

  def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the jax Mesh over `devices` (default: all). Its axes are automatic: the compiler shards arrays."""
    devices = list(jax.devices() if devices is None else devices)
    try:
      array = self.arrange(devices)
    except UserError as error:
      is_fake = jax.config.jax_num_cpu_devices > 0  # type: ignore[attr-defined]  # set by --num_fake_devices
      if is_fake or devices[0].platform != 'cpu' or not glob.glob('/dev/nvidia[0-9]*'):
        raise
      raise UserError(
        f"{error} JAX has found no GPU though this machine has one: pip install 'jax[cuda13]'."
      ) from error
    return Mesh(array, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))

  def arrange(self, devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices, or what stands for them, as an array of the mesh's sizes: neighbours near each other."""
    ici, dcn = self._shapes(len(devices))
    if self.dcn_mesh_shape is None and devices[0].platform == 'cpu':  # CPU devices are equally near
      return np.asarray(devices, dtype=object).reshape(ici)
    return device_array(ici, dcn, devices)

  def build_abstract(self, num_devices: int | None = None) -> AbstractMesh:
    """Returns a mesh without devices, for planning on another machine.

    Raises a UserError if an ICI size is -1 and the number of devices is not given.
    """
    if -1 not in self.ici_mesh_shape:
      num_devices = math.prod(self.ici_mesh_shape) * math.prod(self.dcn_mesh_shape or (1,))
    elif num_devices is None:
      raise UserError(f'ici_mesh_shape {self.ici_mesh_shape} has a size of -1, but there are no devices: replace -1.')
    sizes = self.sizes(num_devices)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """A MeshLayout with every value given: axis names, outermost first, their sizes as in MeshSpec, and axis rules."""

  mesh_axis_names: tuple[str, ...]
  ici_mesh_shape: tuple[int, ...]
  dcn_mesh_shape: tuple[int, ...] | None = None
  axis_rules: AxisRules = DEFAULT_AXIS_RULES

  def axes(self) -> 'MeshAxes':
    return self


class MeshLayout(Protocol):
  """The settings of a mesh. Implement it as a frozen dataclass, so that --set can change its fields."""

  def axes(self) -> MeshAxes:
    """Returns the mesh and its axis rules. Raises a UserError if the sizes are inconsistent."""
