"""Arranges devices on a mesh, so that axes inside a granule have ICI and those between granules DCN.

    device_array((2, 32, 4), (1, 1, 1), devices)  # the 256 chips of a v5p:8x8x4 -> [2, 32, 4]

What DCN runs between are the *granules*: the slices of TPUs; the hosts of GPUs, which XLA numbers as slices; or else
the processes. A DCN shape that is not theirs is refused, because an axis across them would be taken for fast.

A TPU slice is a torus of chips with coordinates (x, y, z). jax's mesh_utils gives each mesh axis whole dims of the
torus where the sizes allow that, and so rings with the bandwidth of all their links. Where they do not, dims of the
torus are split among axes here: mesh_utils would take every n-th chip of a dim that an inner axis has begun, and fails
for sizes such as 10 or 28.
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
  """Returns the devices as an array [ici * dcn ...], with granules (slices, hosts or processes) along the DCN part.

  On CPUs and on a single machine there are no granules; equal runs of devices stand for them. `ici` and `dcn` are one
  size per mesh axis, and multiply to the number of devices.

  Raises a UserError: there are several granules, and their number is not the DCN size.
  """
  num_granules = math.prod(dcn)
  granules = _granules(num_granules, devices, dcn)
  if granules is not None:
    is_tpu = devices[0].platform == 'tpu'  # where neighbours are to be near in the torus
    arrays = np.stack([(arrange if is_tpu else mesh_utils.create_device_mesh)(ici, each) for each in granules])
  else:
    arrays = np.asarray(devices, dtype=object)
  ndim = len(ici)
  interleaved = [dim for pair in zip(range(ndim), range(ndim, 2 * ndim)) for dim in pair]
  return arrays.reshape(*dcn, *ici).transpose(interleaved).reshape([d * i for d, i in zip(dcn, ici)])


def _granules(wanted: int, devices: Sequence[Any], dcn: Sequence[int]) -> list[list[Any]] | None:
  """Returns the devices of each granule in order; None: there are none, and any run of devices may be one."""
  slices, processes = _grouped(devices, 'slice_index'), _grouped(devices, 'process_index')
  platform = devices[0].platform
  if wanted == 1 and not (platform == 'tpu' and len(slices) > 1):  # GPUs of several hosts may be one mesh without DCN
    return [list(devices)]
  for groups in (slices, processes):
    if len(groups) == wanted:
      if len({len(group) for group in groups}) > 1:
        raise UserError(
          f'the slices or processes have {sorted({len(group) for group in groups})} devices, but a mesh needs as many '
          'of each: take slices of one topology.'
        )
      return groups
  if platform == 'cpu' or max(len(slices), len(processes)) <= 1:
    return None
  groups = slices if len(slices) > 1 else processes
  names = [f'{len(found)} {name}' for name, found in (('slice(s)', slices), ('process(es)', processes)) if found]
  raise UserError(
    f'dcn_mesh_shape {tuple(dcn)} is for {wanted} slice{"s" * (wanted > 1)}, but the {len(devices)} devices belong to '
    f'{" and ".join(names)}: set --dcn_mesh_shape to sizes whose product is the number of slices or processes, and '
    f'--ici_mesh_shape to sizes whose product is {len(devices) // len(groups)}, the devices of one.'
  )


def _grouped(devices: Sequence[Any], attribute: str) -> list[list[Any]]:
  """Returns the devices by the value of an attribute, in its order; no groups where a device lacks it."""
  groups: dict[Any, list[Any]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None)].append(device)  # a TPU of one slice raises AttributeError
  return [] if None in groups else [groups[key] for key in sorted(groups)]


def arrange(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the chips of one slice as an array [*shape]. Raises a UserError if they form no box of the torus."""
  torus = _torus(devices)
  try:
    return mesh_utils.create_device_mesh(shape, devices)
  except (NotImplementedError, AssertionError):  # dims must be split; two devices per chip where one is usual
    return split_torus(torus, shape)


def split_torus(torus: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """Returns a torus of devices as a mesh [*shape] of the same number of devices, of any sizes.

  The innermost axis, which has the most traffic, chooses first: whole dims of the torus if they make up its size, else
  parts of as few dims as possible, and of dims that no other axis has begun. Of a dim that several axes share, the
  inner axis gets neighbouring chips.
  """
  left = list(torus.shape)
  parts = np.ones((torus.ndim, len(shape)), dtype=np.int64)  # [torus dim, mesh axis]
  for axis in reversed(range(len(shape))):

    def preference(sizes: tuple[int, ...], left: Sequence[int] = tuple(left)) -> tuple:
      whole = [size for size, dim in zip(sizes, torus.shape) if size == dim > 1]
      taken = [at for at, size in enumerate(sizes) if size > 1]
      return -math.prod(whole), len(taken), sum(left[at] < torus.shape[at] for at in taken), sizes

    parts[:, axis] = min(factorizations(shape[axis], left), key=preference)
    left = [size // part for size, part in zip(left, parts[:, axis])]
  dims = np.arange(parts.size).reshape(parts.shape)
  return torus.reshape(parts.reshape(-1)).transpose(dims.T.reshape(-1)).reshape(shape)


def _torus(devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices by their coordinates: [x, y, z, core on chip]. Raises a UserError if they leave holes."""
  places = np.array([(*device.coords, device.core_on_chip) for device in devices])
  places -= places.min(axis=0)
  shape = places.max(axis=0) + 1
  torus = np.full(shape, None, dtype=object)
  for place, device in zip(places, devices):
    torus[tuple(place)] = device
  if len(devices) != math.prod(shape) or any(device is None for device in torus.flat):
    box = 'x'.join(map(str, shape[:3]))
    raise UserError(
      f'the {len(devices)} devices lie in a box of {box} chips of the torus but are not all of it, so that the mesh '
      'has no network of its own: take all devices of the slice, or a box of them.'
    )
  return torus
