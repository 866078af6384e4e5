"""Refuses a batch or a training state that memory cannot hold, before anything is traced or allocated."""

from collections.abc import Mapping
import math
import os
from typing import Any

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.runtime.partition import PartitionedModel


def check_batch_fits(spec: Mapping[str, Any]) -> None:
  """Raises a UserError if a process's part of a batch of these shapes and dtypes is larger than its memory."""
  num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in spec.values()) // jax.process_count()
  _check_fits('a batch', num_bytes, _host_memory(), 'batch_size or seq_len')


def check_state_fits(model: PartitionedModel) -> None:
  """Raises a UserError if the training state alone is larger than the memory of this process's devices."""
  local = jax.local_devices()
  limits = [(device.memory_stats() or {}).get('bytes_limit', 0) for device in local]
  available = sum(limits) if all(limits) else _host_memory()
  num_bytes = len(local) * sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(model.padded_state)
  )
  _check_fits('the training state', num_bytes, available, 'the number of layers, the dims or vocab_size')


def _check_fits(what: str, num_bytes: int, available: int, setting: str) -> None:
  if num_bytes > available:
    raise UserError(
      f'{what} has {num_bytes / 1e9:,.0f} GB, and this process {available / 1e9:,.0f} GB of memory for it: lower '
      f'{setting}, or take more devices or processes.'
    )


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
