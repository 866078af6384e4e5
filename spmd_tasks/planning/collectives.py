"""Lists the collectives of a compiled program: which data goes along which mesh axes, how often, over which network.

    for collective in collectives(read_program(compiled.as_text()), mesh):
      print(collective.kind, collective.axes, collective.bytes_per_device, collective.count)

Bytes are those that one device sends in one execution, by the algorithms that need the least (a ring, or its
equivalent on a torus), for n devices in a group and x bytes of operand per device:

    all_gather          (n - 1) x            each device's shard goes to the n - 1 others
    reduce_scatter      (n - 1) / n x        all but the own part, summed on the way
    all_reduce          2 (n - 1) / n x      a reduce scatter, then an all gather of the result
    all_to_all          (n - 1) / n x        all but the part that stays
    ragged_all_to_all   (n - 1) / n x        at most: the program decides how many of its rows it sends
    collective_permute  x                    sent by the busiest device; pairs on one device send nothing
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Literal

import jax
from jax.sharding import Mesh
import numpy as np

from spmd_tasks.planning._async_pairs import ScheduledCollective, between_slices, scheduled_collectives
from spmd_tasks.planning._hlo_text import Shape
from spmd_tasks.planning._names import op_name_of
from spmd_tasks.planning._replica_groups import Groups, replica_groups, source_target_pairs, varying_axes
from spmd_tasks.planning.scheduled_program import ScheduledProgram


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective of a program.

  Attributes:
    kind: 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', 'ragged_all_to_all', 'collective_permute' or
      'collective_broadcast'.
    axes: the mesh axes along which the devices of a group lie, in the mesh's order.
    group_size: devices in a group; 2 of a permute, which is a list of pairs.
    group: positions in the mesh's flattened array of devices of one group of that size.
    bytes_per_device: sent over the network by one device in one execution.
    count: executions per step, loops counted.
    network: 'dcn' if devices of one group lie in different slices (nodes), else 'ici'.
    is_asynchronous: whether other work runs between its start and its end.
    is_collective_matmul: whether it belongs to a loop that moves an operand of a product piece by piece meanwhile.
    op_name: JAX's name of what it belongs to.
    dtype, shape: of the operand (of the largest one of several).
    computation, start, end: the computation that runs it, and the instructions there that start it and wait for it;
      `end` is None if one instruction does both.
  """

  kind: str
  axes: tuple[str, ...]
  group_size: int
  group: tuple[int, ...]
  bytes_per_device: float
  count: float
  network: Literal['ici', 'dcn']
  is_asynchronous: bool
  is_collective_matmul: bool
  op_name: str
  dtype: str
  shape: tuple[int, ...]
  computation: str
  start: str
  end: str | None

  @property
  def bytes_per_step(self) -> float:
    """The bytes that one device sends in all executions of a step."""
    return self.bytes_per_device * self.count


def slice_of_device(device: jax.Device) -> int:
  """Returns the slice (TPU) or the process (GPU: the node) of a device: between two of them there is DCN alone."""
  index = getattr(device, 'slice_index', None)
  return index if index is not None else 0 if device.platform == 'tpu' else device.process_index


def collectives(
  program: ScheduledProgram, mesh: Mesh, slice_of: Callable[[jax.Device], int] = slice_of_device
) -> list[Collective]:
  """Lists the collectives that a step runs, in the program's order; those of one device alone are left out.

  Args:
    program: a compiled step.
    mesh: the mesh that it was compiled for.
    slice_of: device -> the index of its slice (node).
  """
  slices = np.array([slice_of(device) for device in mesh.devices.flat])
  found = (_collective(program, each, dict(mesh.shape), slices) for each in scheduled_collectives(program))
  return [each for each in found if each is not None]


def _collective(
  program: ScheduledProgram, scheduled: ScheduledCollective, axis_sizes: Mapping[str, int], slices: np.ndarray
) -> Collective | None:
  kind, attributes = scheduled.kind, scheduled.instruction.attributes
  is_permute = kind == 'collective_permute'
  if between_slices(scheduled.instruction):
    groups = _one_device_per_slice(slices)
  else:
    groups = tuple(source_target_pairs(attributes)) if is_permute else replica_groups(attributes, len(slices))
  one_group = max(groups, key=len, default=np.array([], dtype=np.int64))
  size = len(one_group)
  if size < 2 or max(int(group.max()) for group in groups) >= len(slices):
    return None
  shapes = list(_operand_shapes(scheduled))
  if is_permute or kind == 'ragged_all_to_all' or scheduled.instruction.opcode == 'send':
    shapes = shapes[:1]  # the others are buffers to write to, offsets and sizes, tokens
  largest = max(shapes, key=lambda shape: shape.num_bytes, default=scheduled.instruction.shape)
  operand_bytes = sum(shape.num_bytes for shape in shapes)
  if kind == 'all_reduce' and scheduled.instruction.opcode == 'all-reduce':
    operand_bytes = min(operand_bytes, scheduled.instruction.shape.num_bytes)  # a TPU converts it on the way
  return Collective(
    kind=kind,
    axes=varying_axes(groups, axis_sizes),
    group_size=size,
    group=tuple(one_group.tolist()),
    bytes_per_device=_sent_bytes(kind, operand_bytes, size),
    count=scheduled.count,
    network='dcn' if any((slices[group] != slices[group[0]]).any() for group in groups) else 'ici',
    is_asynchronous=scheduled.hides_work,
    is_collective_matmul='windowed_dot_general' in scheduled.computation.name,
    op_name=scheduled.instruction.op_name or op_name_of(program, scheduled.computation, scheduled.start),
    dtype=largest.dtype,
    shape=largest.dims,
    computation=scheduled.computation.name,
    start=scheduled.start.name,
    end=scheduled.end.name if scheduled.end else None,
  )


def _one_device_per_slice(slices: np.ndarray) -> Groups:
  """Returns the groups of a transfer between slices: devices at the same place in each slice."""
  members = [np.flatnonzero(slices == index) for index in np.unique(slices)]
  return tuple(np.stack(members, axis=1)) if len({len(each) for each in members}) == 1 else ()


def _sent_bytes(kind: str, operand_bytes: int, size: int) -> float:
  match kind:
    case 'all_gather':
      return (size - 1) * operand_bytes
    case 'all_reduce':
      return 2 * (size - 1) / size * operand_bytes
    case 'reduce_scatter' | 'all_to_all' | 'ragged_all_to_all':
      return (size - 1) / size * operand_bytes
    case _:
      return operand_bytes


def _operand_shapes(scheduled: ScheduledCollective) -> Iterator[Shape]:
  for name in scheduled.instruction.operands:
    operand = scheduled.inside.by_name.get(name)
    if operand is not None:
      yield from operand.shape.leaves()
