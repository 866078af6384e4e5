"""Target: the accelerators that a plan is made for, as devices that programs are compiled for but cannot run on.

    target = parse_target('2x v5p:8x8x4')       # two slices of 256 chips
    mesh = experiment.mesh_spec().build(target.devices())

| text | devices | compiler |
|---|---|---|
| `v5p:4x4x2`, `v4:`, `v5e:8x4`, `v6e:16x16` | a TPU slice: the shape of its torus | libtpu |
| `2x v5p:8x8x4` | that many slices | libtpu |
| `h200:8`, `h100:8x4` | one node of 8 GPUs, 4 nodes of 8 | XLA's for CUDA |
| `cpu`, `cpu:2048` | fake devices; without a number as many as the mesh needs | XLA's for CPUs |

Where libtpu or CUDA is not installed, the CPU compiler takes their place, on as many fake devices, and `note` says so.
Both compilers are talkative, ask the network for a machine that is not there, or look for a device: environment
variables keep them from it. They are set when the first such device is made, and in no other mode of the binary.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.errors import UserError
from spmd_tasks.planning.chips import CHIPS, CPU, Chip
from spmd_tasks.sharding import factorizations

MAX_FAKE_DEVICES = 2048
_GRAMMAR = re.compile(r'(?:(?P<slices>\d+)\s*x\s*(?=[a-z]))?(?P<chip>[a-z]\w*)(?::(?P<shape>\d+(?:x\d+)*))?')
_EXAMPLES = 'v5p:4x4x2, v6e:16x16, v5e:8x4, 2x v5p:8x8x4 (two slices), h200:8, h100:8x4 (four nodes), cpu:8'
_PACKAGES = {'tpu': ('libtpu',), 'gpu': ('jax_cuda13_plugin', 'jax_cuda12_plugin')}
_REMEDIES = {'tpu': "pip install 'spmd-tasks[plan-tpu]'", 'gpu': "pip install 'spmd-tasks[plan-gpu]'"}
_LIBTPU_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',  # no metadata server of a cloud machine
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',  # any: the topology's name decides
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # two plans at once
  'TPU_LOG_DIR': 'disabled',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
}
_CUDA_ENVIRONMENT = {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'}  # it asks the driver for its version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Some slices (GPU: nodes) of one kind of chip.

  Attributes:
    name: as given, in its shortest form.
    chip: the published figures.
    num_slices: slices of TPUs, nodes of GPUs; a mesh's DCN axes lie across them.
    slice_shape: chips of one slice along the dims of its torus; GPU and CPU: one number.
    compiler: 'tpu', 'gpu' or 'cpu': what compiles; 'cpu' also where the chip's own compiler is not installed.
  """

  name: str
  chip: Chip
  num_slices: int
  slice_shape: tuple[int, ...]
  compiler: str

  @property
  def num_devices(self) -> int:
    """All chips together."""
    return self.num_slices * math.prod(self.slice_shape)

  @property
  def note(self) -> str | None:
    """A sentence where another compiler than the chip's own is used; otherwise None."""
    if self.compiler == self.chip.platform:
      return None
    missing = {'tpu': 'libtpu, the TPU compiler,', 'gpu': "XLA's compiler for CUDA"}[self.chip.platform]
    return (
      f"{missing} is not installed ({_REMEDIES[self.chip.platform]}): this plan is the CPU compiler's, for "
      f'{self.num_devices:,} fake devices, so that temporaries, collectives and time can differ much from {self.name}.'
    )

  def devices(self) -> list[jax.Device]:
    """Returns the devices: compile-only ones, or fake CPU devices.

    Raises:
      UserError: the compiler knows no such slice, or JAX has already started with fewer fake devices.
    """
    return list(_devices(self))


@functools.cache
def _devices(target: Target) -> tuple[jax.Device, ...]:
  if target.compiler == 'cpu':
    return _fake_devices(target.num_devices)
  make = _tpu_devices if target.compiler == 'tpu' else _gpu_devices
  try:
    devices = make(target.chip, target.slice_shape, target.num_slices)
  except _TopologyError as error:
    raise UserError(
      f'target {target.name!r} is not a slice that its compiler knows ({error}): take another shape, such as '
      f'{target_of(target.chip, target.num_devices, target.num_slices) or _EXAMPLES}.'
    ) from error
  if len(devices) != target.num_devices:
    raise UserError(
      f'target {target.name!r} should have {target.num_devices} chips but its compiler makes {len(devices)} devices of '
      f'it: take another shape, such as {target_of(target.chip, target.num_devices, target.num_slices) or _EXAMPLES}.'
    )
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
    text: see the module's docstring.
    num_cpu_devices: how many devices `cpu` alone means.

  Raises:
    UserError: no such chip or shape.
  """
  found = _GRAMMAR.fullmatch(text.strip().lower())
  if found is None:
    raise UserError(f'target {text!r} is not written as CHIP:SHAPE: take one such as {_EXAMPLES}.')
  name, num_slices = found['chip'], int(found['slices'] or 1)
  shape = tuple(int(size) for size in (found['shape'] or '').split('x') if size)
  if name != 'cpu' and name not in CHIPS:
    raise UserError(
      f'target {text!r} names the chip {name!r}, of which no figures are known here: choose from '
      f'{", ".join((*CHIPS, "cpu"))}.'
    )
  if num_slices < 1 or 0 in shape:
    raise UserError(f'target {text!r} has no chips: take one such as {_EXAMPLES}.')
  if name == 'cpu':
    return _cpu_target(text, num_slices, shape, num_cpu_devices)
  chip = CHIPS[name]
  if not shape:
    raise UserError(f'target {text!r} has no shape: say how many chips, such as {_example_of(chip)}.')
  if chip.platform == 'gpu':
    return _gpu_target(text, chip, num_slices, shape)
  if len(shape) != chip.torus_dims:
    raise UserError(
      f'target {text!r} has {len(shape)} sizes but a slice of {name} is a torus of {chip.torus_dims} dims: write it '
      f'such as {target_of(chip, math.prod(shape)) or _example_of(chip)}.'
    )
  if not _is_slice(chip, shape):
    host, largest = 'x'.join(map(str, chip.host_chips)), '16x16' if chip.torus_dims == 2 else 'as many as there are'
    raise UserError(
      f'target {text!r} is no slice: it must consist of whole hosts of {host} chips, at most {largest}; take one '
      f'such as {target_of(chip, math.prod(shape) * num_slices, num_slices) or _example_of(chip)}.'
    )
  return _make(chip, num_slices, shape, 'x'.join(map(str, shape)))


def _cpu_target(text: str, num_slices: int, shape: tuple[int, ...], num_cpu_devices: int | None) -> Target:
  if not shape and num_cpu_devices is None:
    raise UserError("target 'cpu' has no number of devices here: write it such as cpu:8.")
  num_devices = math.prod(shape) if shape else (num_cpu_devices or 1)
  if num_devices * num_slices > MAX_FAKE_DEVICES:
    raise UserError(
      f'target {text!r} needs {num_devices * num_slices:,} fake devices: at most {MAX_FAKE_DEVICES:,} are supported; '
      'plan a smaller mesh.'
    )
  return _make(CPU, num_slices, (num_devices,), str(num_devices))


def _gpu_target(text: str, chip: Chip, num_nodes: int, shape: tuple[int, ...]) -> Target:
  if len(shape) > 2 or (len(shape) == 2 and num_nodes > 1):
    raise UserError(
      f'target {text!r} is not a number of GPUs: write {chip.name}:8 for one node, {chip.name}:8x4 for four nodes of 8.'
    )
  per_node, num_nodes = (shape[0], shape[1]) if len(shape) == 2 else (shape[0], num_nodes)
  most = chip.host_chips[0]
  if per_node > most:
    nodes = math.ceil(per_node / most)
    raise UserError(
      f'target {text!r} has {per_node} GPUs in a node, of which NVLink connects {most}: write '
      f'{chip.name}:{most}x{nodes} for {nodes} nodes.'
    )
  written = f'{per_node}x{num_nodes}' if num_nodes > 1 else str(per_node)
  return dataclasses.replace(_make(chip, num_nodes, (per_node,), written), name=f'{chip.name}:{written}')


def _make(chip: Chip, num_slices: int, shape: tuple[int, ...], written: str) -> Target:
  prefix = f'{num_slices}x ' if num_slices > 1 else ''
  return Target(
    name=f'{prefix}{chip.name}:{written}',
    chip=chip,
    num_slices=num_slices,
    slice_shape=shape,
    compiler=chip.platform if has_compiler(chip.platform) else 'cpu',
  )


def has_compiler(platform: str) -> bool:
  """Whether the compiler of 'tpu', 'gpu' or 'cpu' is installed."""
  if platform == 'cpu':
    return True
  return any(importlib.util.find_spec(package) is not None for package in _PACKAGES[platform])


def target_of(chip: Chip, num_devices: int, num_slices: int = 1) -> str | None:
  """Returns a target with so many chips of a kind, as near to a cube or square as there is; None if there is none."""
  if num_devices % num_slices:
    return None
  count = num_devices // num_slices
  prefix = f'{num_slices}x ' if num_slices > 1 else ''
  if chip.platform == 'cpu':
    return f'cpu:{num_devices}'
  if chip.platform == 'gpu':
    most = chip.host_chips[0]
    if num_devices <= most:
      return f'{chip.name}:{num_devices}'
    return None if num_devices % most else f'{chip.name}:{most}x{num_devices // most}'
  # Slices are named with their longest side first.
  sides = (shape for shape in factorizations(count, chip.torus_dims) if shape == tuple(sorted(shape, reverse=True)))
  shapes = [shape for shape in sides if _is_slice(chip, shape)]
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


def _example_of(chip: Chip) -> str:
  return {2: f'{chip.name}:8x4', 3: f'{chip.name}:4x4x2'}.get(chip.torus_dims, f'{chip.name}:8')


class _TopologyError(Exception):
  """The compiler knows no such slice; the message is its own first line."""


def _tpu_devices(chip: Chip, slice_shape: Sequence[int], num_slices: int) -> list[jax.Device]:
  """Makes compile-only TPUs: slices of a torus of `slice_shape`."""
  _without_accelerators(_LIBTPU_ENVIRONMENT)
  name = f'{chip.name}:{"x".join(map(str, slice_shape))}'
  options: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
  if chip.name == 'v4':
    options['chip_config_name'] = 'megacore'  # its two cores as one device, as JAX has them on Cloud TPUs
  if set(slice_shape) == {1}:
    options['chips_per_host_bounds'] = [1, 1, 1]
  return _compile_only('tpu', name, **options)


def _gpu_devices(chip: Chip, slice_shape: Sequence[int], num_nodes: int) -> list[jax.Device]:
  """Makes compile-only GPUs: nodes of `slice_shape[0]`."""
  _without_accelerators(_CUDA_ENVIRONMENT)
  from jax.extend import backend

  backend.backends()  # registers the plugin
  return _compile_only('cuda', chip.name, topology=f'1x{num_nodes}x{slice_shape[0]}', target_config=_cuda_config(chip))


def _without_accelerators(environment: dict[str, str]) -> None:
  for name, value in environment.items():
    os.environ.setdefault(name, value)
  with contextlib.suppress(RuntimeError):  # JAX has started
    jax.config.update('jax_platforms', 'cpu')


def _compile_only(platform: str, name: str, **options) -> list[jax.Device]:
  try:
    return topologies.get_topology_desc(name, platform, **options).devices
  except Exception as error:  # whatever the library raises for a name that it does not know
    raise _TopologyError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _cuda_config(chip: Chip) -> str:
  """Returns the `stream_executor.GpuTargetConfigProto` of an H100 or H200 SXM in text form, by NVIDIA's figures."""
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bandwidth or 0)}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {chip.hbm_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {chip.name.upper()}"
"""
