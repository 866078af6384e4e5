"""Options of the TPU compiler for train steps."""

from collections.abc import Mapping
import os
import re

import jax

from spmd_tasks.errors import UserError

# Overlap the all-gathers of weights with matrix products. MaxText's published commands for v5p and v6e set these
# options in LIBTPU_INIT_ARGS. Without them each layer waits for its weights.
_TPU_OPTIONS = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  'xla_tpu_overlap_compute_collective_tc': 'true',
}

# The libtpu of jax 0.11 (0.0.48) can turn this option on only for v5e; Ironwood's published commands turn it off.
_FUSE_GATHERS = 'xla_tpu_enable_async_collective_fusion_fuse_all_gather'

_OPTIONS_BY_KIND = {
  'TPU v6 lite': {
    # A v6e has four times the FLOP/s of a v5e but twice its bandwidth, so products need large tiles in its 128 MiB of
    # vector memory. MaxText's value: the compiler estimates a product of [8192, 8192] and [8192, 28672] at 90% of peak
    # instead of 71%.
    'xla_tpu_scoped_vmem_limit_kib': '98304',
    # For reduce-scatters of gradients (layers/scattered_gradients.py), as in MaxText. The first three keep each of them
    # a reduce-scatter, whichever dim it splits; otherwise some become an all-reduce and a slice. The others run them on
    # SparseCores, concurrently with products.
    'xla_tpu_use_minor_sharding_for_major_trivial_input': 'true',
    'xla_tpu_relayout_group_size_threshold_for_reduce_scatter': '1',
    'xla_tpu_assign_all_reduce_scatter_layout': 'true',
    'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true',
    'xla_sc_disable_megacore_partitioning': 'true',
    'xla_tpu_use_tc_device_shape_on_sc': 'true',
  },
  # Ironwood's vector units compute in bfloat16 too, and its SparseCores run collectives concurrently with products.
  # MaxText's published commands give tiles 60 MiB.
  'TPU7x': {
    _FUSE_GATHERS: 'false',
    'xla_tpu_scoped_vmem_limit_kib': '61440',
    'xla_tpu_bf16_emission_mode': 'NATIVE_EMISSION',
    'xla_tpu_enable_sparse_core_collective_offload_all_reduce': 'true',
    'xla_tpu_use_single_sparse_core_for_all_gather_offload': 'true',
    # Without it an all-gather over all devices is an all-reduce of zero-padded buffers, with twice the bytes.
    'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
    # Tiles of 60 MiB leave little of 64 MiB to scavenge, and the search for it takes most of the compilation time.
    'xla_tpu_vmem_scavenging_mode': 'NONE',
  },
}


def tpu_options(device_kind: str, experiment_options: Mapping[str, str]) -> dict[str, str]:
  """Returns the options for a kind of device, without those that the environment variable LIBTPU_INIT_ARGS sets."""
  libtpu_args = os.environ.get('LIBTPU_INIT_ARGS', '')
  options = _TPU_OPTIONS | _OPTIONS_BY_KIND.get(device_kind, {})
  if device_kind != 'TPU v5 lite' and jax.__version_info__ >= (0, 11):
    options[_FUSE_GATHERS] = 'false'
  options |= experiment_options
  return {name: value for name, value in options.items() if not re.search(rf'\b{name}\b', libtpu_args)}


def invalid_option_error(error: jax.errors.JaxRuntimeError) -> UserError | None:
  """Returns a UserError if the compiler rejected the name or the value of an option; None for other errors."""
  match = re.search('No such compile option: .*|Failed to parse .* into flag .*', str(error))
  return match and UserError(f'the compiler rejects an option ({match[0].strip(": ")}): correct tpu_options.')
