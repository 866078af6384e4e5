"""HostDataLayout: the rows of a batch that lie on one host's devices, for inputs that users place themselves.

The programs do not need it: their `InputLayout` (runtime/input_layout.py) reads equal parts in the order of the
processes, and the step reshards them. It corresponds to T5X's `Partitioner.get_data_layout`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import num_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostDataLayout:
  """One host's part of a batch (T5X's DataLayout).

  Attributes:
    batch_size: of the whole batch.
    shard_id, num_shards: the host has part `shard_id` of `num_shards` disjoint, equal parts, which together are the
      batch. There are fewer parts than hosts if several hosts have the same rows (model parallelism over hosts).
    is_first_host_in_replica_set: whether this host is the first of those with the same rows.
    rows: the row numbers of the part; they need not be contiguous.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool
  rows: tuple[int, ...]


def host_data_layout(
  mesh: Mesh, batch_axes: Sequence[str], *, batch_size: int | None = None, host_index: int | None = None
) -> HostDataLayout:
  """Returns the part of a batch, split over `batch_axes` of the mesh, that lies on one host's devices.

  Parts are numbered by their first row. If a host's devices are a block of the mesh, this is T5X's number,
  chunk[data] + chunk[expert] * num_chunks[data] for the axes (expert, data), extended to every axis that splits the
  batch: T5X leaves out the second of two data axes, so that hosts along that axis load the same rows.

  Args:
    mesh: over the devices of all hosts.
    batch_axes: the mesh axes that split the batch, the slowest first, such as `ExpertAxes.batch_axes`.
    batch_size: default: one row for each part of the mesh.
    host_index: the process; default: this one.

  Raises:
    UserError: the mesh does not divide the batch, the host has no device in the mesh, or hosts have unequal parts.
  """
  num_cells = num_parts(batch_axes, mesh.shape)
  batch_size = num_cells if batch_size is None else batch_size
  if batch_size % num_cells:
    raise UserError(
      f'batch size {batch_size} must be a multiple of {num_cells}, the number of parts into which the axes '
      f'{tuple(batch_axes)} split it: change one of them.'
    )
  cells_of: dict[int, set[int]] = {}
  placement: Mapping[Any, Any] = NamedSharding(mesh, PartitionSpec(tuple(batch_axes))).devices_indices_map((num_cells,))
  for device, (cell,) in placement.items():
    cells_of.setdefault(device.process_index, set()).add(cell.indices(num_cells)[0])
  host = jax.process_index() if host_index is None else host_index
  if host not in cells_of:
    raise UserError(f'host_index {host} has no device in the mesh: choose one of {sorted(cells_of)}.')
  parts = sorted({tuple(sorted(cells)) for cells in cells_of.values()})
  if sum(map(len, parts)) != num_cells or num_cells % len(parts) or len(set(map(len, parts))) > 1:
    raise UserError(
      f'batch axes {tuple(batch_axes)} give the {len(cells_of)} hosts parts that overlap or differ in size, {parts}: '
      "order the mesh's devices so that each host has a block of it."
    )
  cells = tuple(sorted(cells_of[host]))
  rows_per_cell = batch_size // num_cells
  return HostDataLayout(
    batch_size=batch_size,
    shard_id=parts.index(cells),
    num_shards=len(parts),
    is_first_host_in_replica_set=all(other >= host for other in cells_of if cells_of[other] == cells_of[host]),
    rows=tuple(cell * rows_per_cell + row for cell in cells for row in range(rows_per_cell)),
  )
