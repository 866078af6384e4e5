"""Arranges devices in a mesh, so that ICI axes run within a granule and DCN axes between granules.

    device_array((2, 32, 4), (1, 1, 1), devices)  # the 256 chips of a v5p:8x8x4 -> [2, 32, 4]

A *granule* is a group of devices with a fast network: a slice of TPUs, a host of GPUs (which XLA numbers as a slice),
or else a process. The DCN size must be the number of granules, or ICI axes would cross the slow network; only GPU hosts
may form one mesh without DCN axes.

A TPU slice is a torus of chips with coordinates (x, y, z). If sizes allow, jax's mesh_utils gives each mesh axis whole
dims of the torus, whose rings have the bandwidth of all their links. If not, `split_torus` splits dims of the torus
among axes: mesh_utils would give an axis every n-th chip of a dim that it shares with an inner axis, and fails for
sizes such as 10 or 28.
"""

import collections
from collections.abc import Sequence
import math
from typing import Any

from jax.experimental import mesh_utils
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.mesh_shapes import factorizations


def device_array(ici: Sequence[int], dcn: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices as an array [ici * dcn ...] whose DCN part runs over granules (slices, hosts or processes).

  On CPUs and on a single machine, consecutive devices stand for granules. `ici` and `dcn` have one size per mesh axis;
  their product is the number of devices.

  Raises a UserError if there are several granules, and not as many as the DCN size.
  """
  num_granules = math.prod(dcn)
  granules = _granules(num_granules, devices, dcn)
  if granules is not None:
    arrange = arrange_chips if devices[0].platform == 'tpu' else mesh_utils.create_device_mesh
    arrays = np.stack([arrange(ici, granule) for granule in granules])
  else:
    arrays = np.asarray(devices, dtype=object)
  ndim = len(ici)
  interleaved = [dim for pair in zip(range(ndim), range(ndim, 2 * ndim)) for dim in pair]
  return arrays.reshape(*dcn, *ici).transpose(interleaved).reshape([d * i for d, i in zip(dcn, ici)])


def _granules(num_granules: int, devices: Sequence[Any], dcn: Sequence[int]) -> list[list[Any]] | None:
  """Returns the devices of each granule in order; None if there are no granules."""
  slices, processes = _group(devices, 'slice_index'), _group(devices, 'process_index')
  platform = devices[0].platform
  if num_granules == 1 and not (platform == 'tpu' and len(slices) > 1):  # GPU hosts may form one mesh without DCN
    return [list(devices)]
  for groups in (slices, processes):
    if len(groups) == num_granules:
      return groups
  if platform == 'cpu' or max(len(slices), len(processes)) <= 1:
    return None
  num_devices = len(devices) // len(slices if len(slices) > 1 else processes)
  counts = [f'{len(groups)} {name}' for name, groups in (('slice(s)', slices), ('process(es)', processes)) if groups]
  raise UserError(
    f'dcn_mesh_shape {tuple(dcn)} is for {num_granules} slice{"s" * (num_granules > 1)}, but the {len(devices)} '
    f'devices belong to {" and ".join(counts)}: set --dcn_mesh_shape to sizes whose product is the number of slices or '
    f'processes, and --ici_mesh_shape to sizes whose product is {num_devices}, the devices of one.'
  )


def _group(devices: Sequence[Any], attribute: str) -> list[list[Any]]:
  """Groups devices by an attribute, in the order of its values; returns no groups if a device lacks it."""
  groups: dict[Any, list[Any]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None)].append(device)  # a TPU of one slice raises AttributeError
  return [] if None in groups else [groups[key] for key in sorted(groups)]


def arrange_chips(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the chips of one slice as an array [*shape]. Raises a UserError if they are no box of the torus."""
  torus = _torus(devices)
  try:
    return mesh_utils.create_device_mesh(shape, devices)
  except (NotImplementedError, AssertionError):  # it cannot split dims, nor arrange two devices per chip
    return split_torus(torus, shape)


def split_torus(torus: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """Returns a torus of devices as a mesh [*shape] of as many devices.

  The innermost axis, which has the most traffic, chooses first: whole dims of the torus if they make up its size, else
  parts of as few dims as possible, preferably of dims that no other axis uses. If axes share a dim, the inner axis gets
  neighbouring chips.
  """
  remaining = list(torus.shape)
  parts = np.ones((torus.ndim, len(shape)), dtype=np.int64)  # [torus dim, mesh axis]
  for axis in reversed(range(len(shape))):

    def cost(sizes: tuple[int, ...], remaining: Sequence[int] = tuple(remaining)) -> tuple:
      whole = [size for size, full in zip(sizes, torus.shape) if size == full > 1]
      used_dims = [dim for dim, size in enumerate(sizes) if size > 1]
      num_shared = sum(remaining[dim] < torus.shape[dim] for dim in used_dims)
      return -math.prod(whole), len(used_dims), num_shared, sizes

    parts[:, axis] = min(factorizations(shape[axis], remaining), key=cost)
    remaining = [size // part for size, part in zip(remaining, parts[:, axis])]
  dims = np.arange(parts.size).reshape(parts.shape)
  return torus.reshape(parts.reshape(-1)).transpose(dims.T.reshape(-1)).reshape(shape)


def _torus(devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices by their coordinates: [x, y, z, core on chip]. Raises a UserError if they are no full box."""
  coordinates = np.array([(*device.coords, device.core_on_chip) for device in devices])
  coordinates -= coordinates.min(axis=0)
  shape = coordinates.max(axis=0) + 1
  torus = np.full(shape, None, dtype=object)
  for coordinate, device in zip(coordinates, devices):
    torus[tuple(coordinate)] = device
  if any(device is None for device in torus.flat):
    box = 'x'.join(map(str, shape[:3]))
    raise UserError(
      f'the {len(devices)} devices are only a part of a box of {box} chips of the torus: use all devices of the slice, '
      'or a full box of them.'
    )
  return torus
