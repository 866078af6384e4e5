"""Compile-only devices: TPUs by libtpu, GPUs by XLA's compiler for CUDA, on a machine that has neither.

Both compilers are talkative, ask the network for a machine that is not there, or look for a device: the environment
below keeps them from it. It is set when the first such device is made, and in no other mode of the binary.
"""

from collections.abc import Sequence
import contextlib
import os
from typing import Any

import jax
from jax.experimental import topologies

from spmd_tasks.planning.chips import Chip

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


class TopologyError(Exception):
  """The compiler knows no such slice; the message is its own first line."""


def tpu_devices(chip: Chip, slice_shape: Sequence[int], num_slices: int) -> list[jax.Device]:
  """Makes compile-only TPUs: slices of a torus of `slice_shape`."""
  _without_accelerators(_LIBTPU_ENVIRONMENT)
  name = f'{chip.name}:{"x".join(map(str, slice_shape))}'
  options: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
  if chip.name == 'v4':
    options['chip_config_name'] = 'megacore'  # its two cores as one device, as JAX has them on Cloud TPUs
  if set(slice_shape) == {1}:
    options['chips_per_host_bounds'] = [1, 1, 1]
  return _make('tpu', name, **options)


def gpu_devices(chip: Chip, slice_shape: Sequence[int], num_nodes: int) -> list[jax.Device]:
  """Makes compile-only GPUs: nodes of `slice_shape[0]`."""
  _without_accelerators(_CUDA_ENVIRONMENT)
  from jax.extend import backend

  backend.backends()  # registers the plugin
  return _make('cuda', chip.name, topology=f'1x{num_nodes}x{slice_shape[0]}', target_config=_cuda_config(chip))


def _without_accelerators(environment: dict[str, str]) -> None:
  for name, value in environment.items():
    os.environ.setdefault(name, value)
  with contextlib.suppress(RuntimeError):  # JAX has started
    jax.config.update('jax_platforms', 'cpu')


def _make(platform: str, name: str, **options) -> list[jax.Device]:
  try:
    return topologies.get_topology_desc(name, platform, **options).devices
  except Exception as error:  # whatever the library raises for a name that it does not know
    raise TopologyError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


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
