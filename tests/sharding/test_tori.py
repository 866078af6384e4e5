"""Meshes of pods: every shape of the right size builds on every torus and on GPU nodes, and neighbours stay near.

The devices are fakes with the attributes that building a mesh reads.
"""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.granules import device_array

KINDS = {'v4': 'TPU v4', 'v5e': 'TPU v5 lite', 'v5p': 'TPU v5', 'v6e': 'TPU v6 lite'}
_HOST = (2, 2, 1)  # chips of one host


@dataclasses.dataclass(frozen=True)
class TpuDevice:
  """A chip of a TPU slice."""

  id: int
  device_kind: str
  coords: tuple[int, int, int]
  process_index: int
  core_on_chip: int = 0
  platform: str = 'tpu'


@dataclasses.dataclass(frozen=True)
class TpuDeviceOfSlices(TpuDevice):
  """A chip of one of several slices; with one slice, devices have no `slice_index`."""

  slice_index: int = 0


@dataclasses.dataclass(frozen=True)
class GpuDevice:
  """A GPU; XLA numbers the hosts as slices, whether a host runs one process or one per GPU."""

  id: int
  process_index: int
  slice_index: int
  device_kind: str = 'NVIDIA H200'
  platform: str = 'gpu'


def tpu_devices(chip: str, topology: str, num_slices: int = 1, num_cores: int = 1) -> list[TpuDevice]:
  """The devices of `num_slices` slices such as ('v5p', '8x8x4'), host by host as in libtpu.

  Ids count chips along x, y, z. Without megacore a v4 has a device per core.
  """
  dims = tuple(map(int, topology.split('x')))
  dims += (1,) * (3 - len(dims))
  host = tuple(math.gcd(size, part) for size, part in zip(dims, _HOST))
  corners = itertools.product(*(range(0, size, part) for size, part in zip(dims[::-1], host[::-1])))
  places = [
    (process, (x + dx, y + dy, z + dz), core)
    for process, (z, y, x) in enumerate(corners)
    for dz, dy, dx in itertools.product(*(range(part) for part in host[::-1]))
    for core in range(num_cores)
  ]
  num_processes = math.prod(dims) // math.prod(host)
  devices: list[TpuDevice] = []
  for slice_index in range(num_slices):
    first_id = (slice_index + 1) * 100_000 if num_slices > 1 else 0
    for process, (x, y, z), core in places:
      number = (x + dims[0] * (y + dims[1] * z)) * num_cores + core
      fields = (first_id + number, KINDS[chip], (x, y, z), process + slice_index * num_processes, core)
      devices.append(TpuDeviceOfSlices(*fields, slice_index=slice_index) if num_slices > 1 else TpuDevice(*fields))
  return devices


def gpu_devices(num_nodes: int, gpus: int = 8, process_per_gpu: bool = False) -> list[GpuDevice]:
  """The GPUs of several nodes."""
  return [
    GpuDevice(id=i, process_index=i if process_per_gpu else i // gpus, slice_index=i // gpus)
    for i in range(num_nodes * gpus)
  ]


# ici, dcn, chip, topology: registered experiments on their pods.
RECIPES = {
  'lm.Dense1B on v5e': ((1, 8, 4), None, 'v5e', '4x8'),
  'lm.Dense1B on v5p': ((1, 8, 4), None, 'v5p', '4x4x2'),
  'lm.Dense1B on v6e': ((1, 8, 4), None, 'v6e', '4x8'),
  'lm.Dense1B on v4': ((1, 8, 4), None, 'v4', '2x4x4'),
  'lm.Dense70B': ((1, 64, 4), (4, 1, 1), 'v5p', '8x8x4'),
  'pipeline.Dense70B': ((1, 2, 32, 4), (1, 4, 1, 1), 'v5p', '8x8x4'),
  'moe on v5p': ((1, 8, 8, 4), None, 'v5p', '8x8x4'),
  'moe on v6e': ((1, 8, 8, 4), None, 'v6e', '16x16'),
}
TOPOLOGIES = [
  ('v4', '2x2x1'),
  ('v4', '4x4x4'),
  ('v4', '4x4x8'),
  ('v5e', '2x4'),
  ('v5e', '4x4'),
  ('v5e', '8x8'),
  ('v5e', '16x16'),
  ('v5p', '2x2x2'),
  ('v5p', '4x4x2'),
  ('v5p', '8x8x4'),
  ('v5p', '4x4x12'),  # a factor 3
  ('v5p', '4x4x28'),  # sizes that mesh_utils of jax 0.10.2 cannot split
  ('v5p', '4x4x20'),
  ('v6e', '2x4'),
  ('v6e', '4x8'),
  ('v6e', '16x16'),
]


def random_shape(rng, total, num_axes):
  """Sizes of `num_axes` axes with the product `total`, prime by prime."""
  sizes = [1] * num_axes
  factor = 2
  while total > 1:
    while total % factor == 0:
      sizes[rng.randrange(num_axes)] *= factor
      total //= factor
    factor += 1
  return tuple(sizes)


def random_cases(count):
  rng = random.Random(0)
  for _ in range(count):
    chip, topology = rng.choice(TOPOLOGIES)
    num_slices = rng.choice([1, 1, 2, 4, 6])
    num_axes = rng.randint(1, 5)
    per_slice = math.prod(map(int, topology.split('x')))
    ici = random_shape(rng, per_slice, num_axes)
    dcn = random_shape(rng, num_slices, num_axes) if num_slices > 1 else None
    yield pytest.param(ici, dcn, chip, topology, id=f'{num_slices}x{chip}:{topology} {ici} {dcn}')


def check_array(array, ici, dcn, devices):
  """Checks that every device occurs once, and that the DCN part of each axis runs across slices."""
  dcn = dcn or (1,) * len(ici)
  assert array.shape == tuple(i * d for i, d in zip(ici, dcn))
  assert sorted(device.id for device in array.flat) == sorted(device.id for device in devices)
  if math.prod(dcn) > 1:
    for position in np.ndindex(array.shape):
      outer = [at // i for at, i in zip(position, ici)]
      assert array[position].slice_index == np.ravel_multi_index(outer, dcn)


@pytest.mark.parametrize(
  'ici, dcn, chip, topology', [*(pytest.param(*case, id=name) for name, case in RECIPES.items()), *random_cases(20)]
)
def test_every_shape_of_the_right_size_builds_on_a_torus(ici, dcn, chip, topology):
  devices = tpu_devices(chip, topology, math.prod(dcn or (1,)))
  check_array(device_array(ici, dcn or (1,) * len(ici), devices), ici, dcn, devices)


@pytest.mark.parametrize('process_per_gpu', [False, True])
@pytest.mark.parametrize('ici, dcn', [((1, 2, 4), (4, 1, 1)), ((2, 1, 4), (1, 4, 1)), ((1, 8, 4), None), ((32,), None)])
def test_every_shape_of_the_right_size_builds_on_gpu_nodes(ici, dcn, process_per_gpu):
  devices = gpu_devices(4, process_per_gpu=process_per_gpu)
  check_array(device_array(ici, dcn or (1,) * len(ici), devices[::-1]), ici, dcn, devices)


def hops(array, axis):
  """The mean distance of neighbours along a mesh axis, in links of a torus whose dims of 4 or more wrap around."""
  torus_shape = np.max([device.coords for device in array.flat], axis=0) + 1
  steps = []
  for one, other in zip(np.moveaxis(array, axis, 0)[:-1].flat, np.moveaxis(array, axis, 0)[1:].flat):
    distances = np.abs(np.subtract(one.coords, other.coords))
    steps.append(sum(min(d, n - d) if n >= 4 else d for d, n in zip(distances, torus_shape)))
  return sum(steps) / len(steps)


@pytest.mark.parametrize('name', ['lm.Dense1B on v5p', 'lm.Dense70B', 'pipeline.Dense70B', 'moe on v5p', 'moe on v6e'])
def test_neighbours_along_the_inner_axes_are_neighbours_in_the_network(name):
  ici, _, chip, topology = RECIPES[name]
  devices = tpu_devices(chip, topology)
  array, naive = device_array(ici, (1,) * len(ici), devices), np.array(devices, dtype=object).reshape(ici)
  assert hops(array, len(ici) - 1) == 1
  for axis in (len(ici) - 1, len(ici) - 2):
    assert hops(array, axis) <= hops(naive, axis)


@pytest.mark.parametrize(
  'ici, dcn, devices, words',
  [
    ((1, 128, 4), (1, 1, 1), tpu_devices('v5p', '8x8x4', 2),
     ['dcn_mesh_shape (1, 1, 1) is for 1 slice,', '2 slice(s)', 'product is 256']),
    ((1, 16, 4), (8, 1, 1), tpu_devices('v5p', '4x4x8', 4),
     ['is for 8 slices', '4 slice(s) and 128 process(es)', 'product is 128']),
    ((3, 1), (1, 1), tpu_devices('v5e', '2x4')[:3], ['3 devices', 'box of', 'use all devices']),
  ],
)  # fmt: skip
def test_devices_that_do_not_fit_are_refused(ici, dcn, devices, words):
  with pytest.raises(UserError) as error:
    device_array(ici, dcn, devices)
  for word in words:
    assert word in str(error.value)


def test_a_mesh_of_the_wrong_size_names_the_nearest_shapes():
  spec = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 8, 4))
  with pytest.raises(UserError, match='product is 64, such as 1,16,4 or 1,8,8'):
    spec.sizes(64)
