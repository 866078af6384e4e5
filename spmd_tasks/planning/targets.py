"""Target: the accelerators that a plan is made for, as devices that programs are compiled for but cannot run on.

    target = parse_target('2x v5p:8x8x4')       # two slices of 256 chips
    mesh = experiment.mesh_spec().build(target.devices())

docs/planning.md has the table of targets. The compilers of TPUs and GPUs are talkative, ask the network for a machine
that is not there, or look for a device: environment variables keep them from it. They are set when the first such
device is made, and in no other mode of the binary.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.errors import UserError
from spmd_tasks.planning.chips import CHIPS, CPU, Chip
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.mesh_shapes import factorizations

MAX_FAKE_DEVICES = 2048
_GRAMMAR = re.compile(r'(?:(?P<slices>\d+)\s*x\s*(?=[a-z]))?(?P<chip>[a-z]\w*)(?::(?P<shape>\d+(?:x\d+)*))?')
_EXAMPLES = 'v5p:4x4x2, v6e:16x16, v5e:8x4, 2x v5p:8x8x4 (two slices), h200:8, h100:8x4 (four nodes), cpu:8'
_MAX_DEVICES = 1_000_000
_EXAMPLE_OF = {0: '{}:8', 2: '{}:8x4', 3: '{}:4x4x2'}  # by the dims of the torus
_PACKAGES = {'tpu': ('libtpu',), 'gpu': ('jax_cuda13_plugin', 'jax_cuda12_plugin')}
REMEDIES = {'tpu': "pip install 'spmd-tasks[plan-tpu]'", 'gpu': "pip install 'spmd-tasks[plan-gpu]'"}
_LIBTPU_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',  # no metadata server of a cloud machine
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',  # any: the topology's name decides
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # two plans at once
  'TPU_LOG_DIR': 'disabled',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
}
# No plan reads the machine code of SparseCores. With its loops unrolled three gathers compile in 20 CPU s, else in 6;
# the scheduled program, its cycles and its memory are the same.
_NO_UNROLLING = 'xla_sc_disable_mlo_loop_unroll'
_CUDA_ENVIRONMENT = {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'}  # it asks the driver for its version


@dataclasses.dataclass(frozen=True)
class PlannedDevice(jax.sharding.AbstractDevice):
  """What tracing asks of a device that is not there."""

  compute_capability: str = ''


def mesh_of(mesh_spec: MeshSpec, device: PlannedDevice, num_devices: int | None = None) -> AbstractMesh:
  """Returns a mesh without devices: steps that are traced on it have the kernels of such a device.

  `num_devices` are all devices, for a mesh with a size of -1.
  """
  mesh = mesh_spec.build_abstract(num_devices)
  return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where a device of a target is: its slice, and its chip's coordinates in the torus; on GPUs there are none."""

  id: int
  platform: str
  device_kind: str
  slice_index: int
  coords: tuple[int, ...]
  core_on_chip: int = 0
  process_index: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Some slices (GPU: nodes) of one kind of chip.

  Attributes:
    name: as given, in its shortest form.
    chip: the published figures.
    num_slices: slices of TPUs, nodes of GPUs; a mesh's DCN axes lie across them.
    slice_shape: chips of one slice along the dims of its torus; GPU and CPU: one number.
  """

  name: str
  chip: Chip
  num_slices: int
  slice_shape: tuple[int, ...]

  @property
  def num_devices(self) -> int:
    """All devices of JAX together: chips, or their cores."""
    return self.num_slices * math.prod(self.slice_shape) * self.chip.cores

  def abstract_mesh(self, mesh_spec: MeshSpec) -> AbstractMesh:
    """Returns the mesh without devices, which knows the kind of chip."""
    capability = re.search(r'major: (\d+)', self.chip.gpu_target_config)
    device = PlannedDevice(
      device_kind=self.chip.device_kind or 'cpu',
      num_cores=1,
      platform=self.chip.platform,
      compute_capability=f'{capability[1]}.0' if capability else '',
    )
    return mesh_of(mesh_spec, device, self.num_devices)

  def places(self) -> list[Place]:
    """Returns where each device is, for `MeshSpec.arrange`."""
    sizes = [*self.slice_shape, *[1] * (3 - len(self.slice_shape))] if self.chip.torus_dims else [1, 1, 1]
    count = 1 if self.chip.torus_dims else math.prod(self.slice_shape)
    chips = [(z, y, x) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
    found = itertools.product(range(self.num_slices), chips, range(count), range(self.chip.cores))
    return [
      Place(
        id=i,
        platform=self.chip.platform,
        device_kind=self.chip.device_kind,
        slice_index=slice_index,
        process_index=slice_index,
        coords=(x, y, z),
        core_on_chip=core,
      )
      for i, (slice_index, (z, y, x), _, core) in enumerate(found)
    ]

  def devices(self) -> list[jax.Device]:
    """Returns the devices: compile-only ones, or fake CPU devices.

    Raises:
      UserError: the compiler is not installed or knows no such slice, or JAX has started with fewer fake devices.
    """
    return list(_devices(self))


@functools.cache
def _devices(target: Target) -> tuple[jax.Device, ...]:
  platform = target.chip.platform
  if platform == 'cpu':
    return _fake_devices(target.num_devices)
  if not has_compiler(platform):
    raise UserError(
      f'the compiler for {target.name} is not installed: {REMEDIES[platform]}, or plan for '
      f'--target cpu:{target.num_devices}, where weights and padding are the same.'
    )
  make = _tpu_devices if platform == 'tpu' else _gpu_devices
  try:
    devices = make(target.chip, target.slice_shape, target.num_slices)
    if len(devices) != target.num_devices:
      raise ValueError(f'it makes {len(devices)} devices of it')
  except Exception as error:  # whatever the library raises for a name that it does not know
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    raise UserError(
      f'target {target.name!r} is not a slice that its compiler knows ({first_line}): take another shape, such as '
      f'{target_of(target.chip, target.num_devices, target.num_slices) or _EXAMPLES}.'
    ) from None
  return tuple(devices)


def _fake_devices(num_devices: int) -> tuple[jax.Device, ...]:
  with contextlib.suppress(RuntimeError):  # JAX has started, as in a notebook
    use_fake_devices(num_devices, num_threads=num_devices)  # nothing runs on them
  devices = jax.devices('cpu')
  if len(devices) < num_devices:
    raise UserError(
      f'the plan needs {num_devices} fake devices but JAX has started with {len(devices)}: plan in a new process.'
    )
  return tuple(devices[:num_devices])


def parse_target(text: str, *, num_cpu_devices: int | None = None) -> Target:
  """Reads a target.

  Args:
    text: such as 'v5p:4x4x2'.
    num_cpu_devices: how many devices `cpu` alone means.

  Raises:
    UserError: no such chip or shape.
  """
  found = _GRAMMAR.fullmatch(text.strip().lower())
  if found is None:
    raise UserError(f'target {text!r} is not written as CHIP:SHAPE: take one such as {_EXAMPLES}.')
  name, num_slices = found['chip'], int(found['slices'] or 1)
  shape = tuple(int(size) for size in (found['shape'] or '').split('x') if size)
  chip = {**CHIPS, 'cpu': CPU}.get(name)
  if chip is None:
    raise UserError(
      f'target {text!r} names the chip {name!r}, of which no figures are known here: choose from '
      f'{", ".join((*CHIPS, "cpu"))}.'
    )
  if name == 'cpu' and not shape and num_cpu_devices is not None:
    shape = (num_cpu_devices,)
  num_devices = num_slices * math.prod(shape) * chip.cores
  if num_devices > _MAX_DEVICES:
    raise UserError(f'target {text!r} has {num_devices:,} devices: take at most {_MAX_DEVICES:,}.')
  example = (shape and target_of(chip, num_devices, num_slices)) or _EXAMPLE_OF[chip.torus_dims].format(chip.name)
  wrong = _wrong_shape(chip, num_slices, shape)
  if wrong is not None:
    raise UserError(f'target {text!r} {wrong}: take one such as {example}.')
  if chip.platform == 'gpu' and len(shape) == 2:
    per_node, num_slices = shape
    shape = (per_node,)
  if chip.platform == 'tpu':
    written = (f'{num_slices}x ' if num_slices > 1 else '') + f'{name}:{"x".join(map(str, shape))}'
  else:
    written = f'{name}:{shape[0]}' + (f'x{num_slices}' if num_slices > 1 else '')
  return Target(name=written, chip=chip, num_slices=num_slices, slice_shape=shape)


def _wrong_shape(chip: Chip, num_slices: int, shape: tuple[int, ...]) -> str | None:
  """Says what is wrong with a shape; None if nothing is."""
  if not shape:
    return 'has no shape: say how many devices'
  if num_slices < 1 or 0 in shape:
    return 'has no chips'
  if chip.platform == 'cpu':
    too_many = num_slices > 1 or len(shape) > 1 or shape[0] > MAX_FAKE_DEVICES
    return f'is not one number of fake devices, at most {MAX_FAKE_DEVICES:,}' if too_many else None
  if chip.platform == 'gpu':
    if len(shape) > 2 or (len(shape) == 2 and num_slices > 1):
      return f'is not a number of GPUs, such as {chip.name}:8 for one node, {chip.name}:8x4 for four nodes of 8'
    most = chip.host_chips[0]
    return f'has {shape[0]} GPUs in a node, of which NVLink connects {most}' if shape[0] > most else None
  if len(shape) != chip.torus_dims:
    return f'has {len(shape)} sizes but a slice of {chip.name} is a torus of {chip.torus_dims} dims'
  if not _is_slice(chip, shape):
    host, largest = 'x'.join(map(str, chip.host_chips)), '16x16' if chip.torus_dims == 2 else 'as many as there are'
    return f'is no slice, which consists of whole hosts of {host} chips, at most {largest}'
  return None


def has_compiler(platform: str) -> bool:
  """Whether the compiler of 'tpu', 'gpu' or 'cpu' is installed."""
  if platform == 'cpu':
    return True
  return any(importlib.util.find_spec(package) is not None for package in _PACKAGES[platform])


def target_of(chip: Chip, num_devices: int, num_slices: int = 1) -> str | None:
  """Returns a target with so many devices of a kind, as near to a cube or square as there is; None if there is none."""
  if not num_devices or num_devices % (num_slices * chip.cores):
    return None
  count = num_devices // (num_slices * chip.cores)
  prefix = f'{num_slices}x ' if num_slices > 1 else ''
  if chip.platform == 'cpu':
    return f'cpu:{num_devices}'
  if chip.platform == 'gpu':
    most = chip.host_chips[0]
    if num_devices <= most:
      return f'{chip.name}:{num_devices}'
    return None if num_devices % most else f'{chip.name}:{most}x{num_devices // most}'
  # Slices are named with their longest side first.
  sides = factorizations(count, [count] * chip.torus_dims)
  shapes = [each for each in sides if each == tuple(sorted(each, reverse=True)) and _is_slice(chip, each)]
  if not shapes:
    return None
  return f'{prefix}{chip.name}:{"x".join(map(str, min(shapes, key=max)))}'


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
  """Whether a slice can have this shape: whole hosts, at most 16 chips along a side of a 2D torus; or one chip."""
  if set(shape) == {1}:
    return chip.torus_dims == 2
  if chip.torus_dims == 2 and max(shape) > 16:
    return False
  return all(size % host == 0 for size, host in zip(shape, chip.host_chips))


def _tpu_devices(chip: Chip, slice_shape: Sequence[int], num_slices: int) -> list[jax.Device]:
  """Makes compile-only TPUs: slices of a torus of `slice_shape`."""
  given = os.environ.get('LIBTPU_INIT_ARGS', '')
  if _NO_UNROLLING not in given:
    os.environ['LIBTPU_INIT_ARGS'] = f'{given} --{_NO_UNROLLING}=true'.strip()
  _without_accelerators(_LIBTPU_ENVIRONMENT)
  name = f'{chip.name}:{"x".join(map(str, slice_shape))}'
  options: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
  if chip.name == 'v4':
    options['chip_config_name'] = 'megacore'  # its two cores as one device, as JAX has them on Cloud TPUs
  if set(slice_shape) == {1}:
    options['chips_per_host_bounds'] = [1, 1, 1]
  return topologies.get_topology_desc(name, 'tpu', **options).devices


def _gpu_devices(chip: Chip, slice_shape: Sequence[int], num_nodes: int) -> list[jax.Device]:
  """Makes compile-only GPUs: nodes of `slice_shape[0]`."""
  _without_accelerators(_CUDA_ENVIRONMENT)
  from jax.extend import backend

  backend.backends()  # registers the plugin
  topology, config = f'1x{num_nodes}x{slice_shape[0]}', chip.gpu_target_config
  return topologies.get_topology_desc(chip.name, 'cuda', topology=topology, target_config=config).devices


def _without_accelerators(environment: dict[str, str]) -> None:
  for name, value in environment.items():
    os.environ.setdefault(name, value)
  with contextlib.suppress(RuntimeError):  # JAX has started
    jax.config.update('jax_platforms', 'cpu')
