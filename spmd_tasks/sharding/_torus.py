"""Arranges the devices of one slice as a mesh, so that neighbours along an axis are near each other in the network.

    arrange((2, 32, 4), devices)  # the 256 chips of a v5p:8x8x4 -> [2, 32, 4]

A TPU slice is a torus of chips with coordinates (x, y, z). jax's mesh_utils gives each mesh axis whole dims of the
torus where the sizes allow that, and so rings with the bandwidth of all their links. Where they do not, dims of the
torus are split among axes here. (mesh_utils can split too, but of a dim that an inner axis has begun it takes every
n-th chip although another dim is free, and sizes such as 10 or 28 fail: their prime factors lose the small ones.)
"""

from collections.abc import Iterator, Sequence
import math
from typing import Any

from jax.experimental import mesh_utils
import numpy as np

from spmd_tasks.errors import UserError


def arrange(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the chips of one slice as an array [*shape]; `shape` multiplies to their number.

  Raises:
    UserError: they form no box of the torus.
  """
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

    parts[:, axis] = min(_ways(shape[axis], left), key=preference)
    left = [size // part for size, part in zip(left, parts[:, axis])]
  dims = np.arange(parts.size).reshape(parts.shape)
  return torus.reshape(parts.reshape(-1)).transpose(dims.T.reshape(-1)).reshape(shape)


def _ways(size: int, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields every way to write `size` as a product of one divisor of each dim; what others leave has at least one."""
  if len(dims) == 1:
    if dims[0] % size == 0:
      yield (size,)
    return
  for part in range(1, math.gcd(size, dims[0]) + 1):
    if size % part == 0 and dims[0] % part == 0:
      for rest in _ways(size // part, dims[1:]):
        yield (part, *rest)


def _torus(devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices by their coordinates: [x, y, z, core on chip].

  Raises:
    UserError: they leave holes.
  """
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
