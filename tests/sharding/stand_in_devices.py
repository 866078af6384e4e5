"""Stand-ins for the devices of TPU slices and GPU nodes: the attributes that building a mesh looks at, and no more.

tests/sharding/test_real_tori.py proves that they agree with the compile-only devices of libtpu.
"""

import dataclasses
import itertools
import math

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
  """A chip of one of several slices; with one slice the attribute does not exist."""

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
  """The devices of `num_slices` slices such as ('v5p', '8x8x4'), in the order of libtpu.

  They are listed host by host; ids count chips along x, y, z. Without megacore a v4 has a device per core.
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
