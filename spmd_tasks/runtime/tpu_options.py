"""Options of the TPU's compiler for training steps."""

from collections.abc import Mapping
import os
import re

import jax

from spmd_tasks.errors import UserError

# Options of the TPU's compiler that let the gathers of weights run beside products, as MaxText's published commands for
# v5p and v6e set them by LIBTPU_INIT_ARGS. Without them each layer waits for its weights.
_TPU_OPTIONS = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  'xla_tpu_overlap_compute_collective_tc': 'true',
}

# The libtpu of jax 0.11 (0.0.48) refuses to compile where this is on, but for a v5e; Ironwood's published commands turn
# it off.
_FUSE_GATHERS = 'xla_tpu_enable_async_collective_fusion_fuse_all_gather'

_OPTIONS_BY_KIND = {
  'TPU v6 lite': {
    # A v6e does four times the FLOPs of a v5e with twice the bandwidth, so its products need large tiles in vector
    # memory, of which it has 128 MiB; MaxText's figure. With it the compiler estimates a product of [8192, 8192] and
    # [8192, 28672] at 90% of peak instead of 71%.
    'xla_tpu_scoped_vmem_limit_kib': '98304',
    # Reduce-scatters that layers write out (layers/scattered_gradients.py): by these three each stays one, whichever
    # dim of a gradient is split; otherwise some are whole sums and a slice. By the others SparseCores run them beside
    # products. MaxText's.
    'xla_tpu_use_minor_sharding_for_major_trivial_input': 'true',
    'xla_tpu_relayout_group_size_threshold_for_reduce_scatter': '1',
    'xla_tpu_assign_all_reduce_scatter_layout': 'true',
    'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true',
    'xla_sc_disable_megacore_partitioning': 'true',
    'xla_tpu_use_tc_device_shape_on_sc': 'true',
  },
  # An Ironwood's vector units compute in bfloat16 too, and its SparseCores run gathers and sums beside products;
  # MaxText's published commands give its tiles 60 MiB.
  'TPU7x': {
    _FUSE_GATHERS: 'false',
    'xla_tpu_scoped_vmem_limit_kib': '61440',
    'xla_tpu_bf16_emission_mode': 'NATIVE_EMISSION',
    'xla_tpu_enable_sparse_core_collective_offload_all_reduce': 'true',
    'xla_tpu_use_single_sparse_core_for_all_gather_offload': 'true',
    # Without it a gather from all devices is a sum of zeroed buffers, with twice the bytes.
    'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
    # Of 64 MiB, tiles that have 60 leave little to scavenge, and the search for it is most of a compilation.
    'xla_tpu_vmem_scavenging_mode': 'NONE',
  },
}


def tpu_options(device_kind: str, of_experiment: Mapping[str, str]) -> dict[str, str]:
  """Returns the options for devices of a kind, but those that the environment variable LIBTPU_INIT_ARGS names."""
  given = os.environ.get('LIBTPU_INIT_ARGS', '')
  options = _TPU_OPTIONS | _OPTIONS_BY_KIND.get(device_kind, {})
  if device_kind != 'TPU v5 lite' and jax.__version_info__ >= (0, 11):
    options[_FUSE_GATHERS] = 'false'
  options |= of_experiment
  return {name: value for name, value in options.items() if not re.search(rf'\b{name}\b', given)}


def refused_option(error: jax.errors.JaxRuntimeError) -> UserError | None:
  """Returns what to say if the compiler refuses an option, by its name or its value; None of other errors."""
  refusal = re.search('No such compile option: .*|Failed to parse .* into flag .*', str(error))
  return refusal and UserError(f'the compiler refuses an option ({refusal[0].strip(": ")}): correct tpu_options.')
