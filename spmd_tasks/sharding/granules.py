"""Arranges devices on a mesh, so that axes inside a granule have ICI and those between granules DCN.

Every shape that multiplies to the devices can be built, on tori of TPU chips too (_torus.py). What DCN runs between are
the *granules*: the slices of TPUs; the hosts of GPUs, which XLA numbers as slices; or else the processes. A DCN shape
that is not theirs is refused, because an axis across them would be taken for fast.
"""

import collections
from collections.abc import Sequence
import math
from typing import Any

from jax.experimental import mesh_utils
import numpy as np

from spmd_tasks.errors import UserError


def device_array(ici: Sequence[int], dcn: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices as an array [ici * dcn ...], with granules (slices, hosts or processes) along the DCN part.

  On CPUs and on a single machine there are no granules; equal runs of devices stand for them.

  Args:
    ici, dcn: one size per mesh axis; together they multiply to the devices.
    devices: of any platform; of a TPU's they are asked for `coords`, `core_on_chip` and `device_kind`.

  Raises:
    UserError: there are several granules, and their number is not the DCN size.
  """
  num_granules = math.prod(dcn)
  granules = _granules(num_granules, devices, ici, dcn)
  if granules is not None:
    arrays = np.stack([_arrange(ici, granule) for granule in granules])
  else:
    arrays = np.asarray(devices, dtype=object)
  ndim = len(ici)
  interleaved = [dim for pair in zip(range(ndim), range(ndim, 2 * ndim)) for dim in pair]
  return arrays.reshape(*dcn, *ici).transpose(interleaved).reshape([d * i for d, i in zip(dcn, ici)])


def _arrange(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices of one granule as an array [*shape], on TPUs so that neighbours are near in the torus."""
  if devices[0].platform != 'tpu':
    return mesh_utils.create_device_mesh(shape, devices)
  from spmd_tasks.sharding._torus import arrange

  return arrange(shape, devices)


def _granules(wanted: int, devices: Sequence[Any], ici: Sequence[int], dcn: Sequence[int]) -> list[list[Any]] | None:
  """Returns the devices of each granule in order; None: there are none, and any run of devices may be one."""
  slices, processes = _grouped(devices, 'slice_index'), _grouped(devices, 'process_index')
  platform = devices[0].platform
  if wanted == 1 and not (platform == 'tpu' and len(slices) > 1):  # GPUs of several hosts may be one mesh without DCN
    return [list(devices)]
  for groups in (slices, processes):
    if len(groups) == wanted:
      return _of_equal_size(groups)
  if platform == 'cpu' or max(len(slices), len(processes)) <= 1:
    return None
  from spmd_tasks.sharding._mesh_shapes import nearest_hybrid_shape, shape_text

  groups = slices if len(slices) > 1 else processes
  names = [f'{len(found)} {name}' for name, found in (('slice(s)', slices), ('process(es)', processes)) if found]
  inner, outer = nearest_hybrid_shape(ici, dcn, len(groups), len(devices) // len(groups))
  raise UserError(
    f'dcn_mesh_shape {tuple(dcn)} is for {wanted} slice{"s" * (wanted > 1)}, but the {len(devices)} devices belong to '
    f'{" and ".join(names)}: set --dcn_mesh_shape to sizes whose product is the number of slices or processes, and '
    f'--ici_mesh_shape to the devices of one, such as --dcn_mesh_shape {shape_text(outer)} --ici_mesh_shape '
    f'{shape_text(inner)}.'
  )


def _grouped(devices: Sequence[Any], attribute: str) -> list[list[Any]]:
  """Returns the devices by the value of an attribute, in its order; no groups where a device lacks it."""
  groups: dict[Any, list[Any]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None)].append(device)  # a TPU of one slice raises AttributeError
  return [] if None in groups else [groups[key] for key in sorted(groups)]


def _of_equal_size(groups: list[list[Any]]) -> list[list[Any]]:
  sizes = sorted({len(group) for group in groups})
  if len(sizes) > 1:
    raise UserError(
      f'the slices or processes have {sizes[0]} to {sizes[-1]} devices, but a mesh needs as many of each: take slices '
      'of one topology.'
    )
  return groups
