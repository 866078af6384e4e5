"""How much memory of each device the KV cache may take."""

import math
import os
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh


def local_bytes(leaf: Any) -> int:
  """Returns the bytes that an abstract array with a sharding takes on each device."""
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def free_bytes(mesh: Mesh | AbstractMesh, weights: Any, fraction: float) -> float:
  """Returns how many bytes are left of this fraction of a device's memory beside the weights.

  Also beside what is in use now, in a job of one process; several must come to the same number. Infinity where the mesh
  has no device of this process, as that of a plan for other machines. CPU devices share the host's memory.
  """
  devices: Any = [] if isinstance(mesh, AbstractMesh) else mesh.devices.flat
  local = [device for device in jax.local_devices() if device in devices]
  if not local:
    return math.inf
  stats = [device.memory_stats() or {} for device in local]
  host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // len(local)
  used = sum(local_bytes(leaf) for leaf in jax.tree.leaves(weights))
  if jax.process_count() == 1:
    used = max(used, *(each.get('bytes_in_use', 0) for each in stats))
  return fraction * min(each.get('bytes_limit', host) for each in stats) - used
