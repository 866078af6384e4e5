"""Lists the collectives of a compiled program: which data goes along which mesh axes, how often, over which network.

    for collective in collectives(read_program(compiled), mesh):
      print(collective.kind, collective.axes, collective.bytes_per_device, collective.count)

Bytes are those that one device sends in one execution, by the algorithms that need the least (a ring, or its
equivalent on a torus), for n devices in a group and x bytes of operand per device:

    all_gather          (n - 1) x            each device's shard goes to the n - 1 others
    reduce_scatter      (n - 1) / n x        all but the own part, summed on the way
    all_reduce          2 (n - 1) / n x      a reduce scatter, then an all gather of the result
    all_to_all          (n - 1) / n x        all but the part that stays
    ragged_all_to_all   (n - 1) / n x        at most: the program decides how many of its rows it sends
    collective_permute  x                    sent by the busiest device; pairs on one device send nothing

Compilers write an asynchronous collective in four ways:

    all-gather-start, all-gather-done             a pair of instructions; in between runs other work
    async-start, async-done                       the same around a computation that holds the collective, or that calls
                                                  one which does (SparseCores)
    fusion ... fusion ... fusion (TPU)            the first holds the collective and `AsyncCollectiveStart`, the last
                                                  `AsyncCollectiveDone`; those in between compute and move data on;
                                                  all of them repeat the collective, with its chain_id and channel_id
    send, recv, send-done, recv-done (TPU)        between slices: the host's runtime does what the note
                                                  `_xla_megascale_transfer_type` says; the program waits at recv-done

A TPU writes a reduce scatter as a fusion of an all-reduce and the slice of its result that is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple

from google.protobuf import unknown_fields
import jax
from jax.sharding import Mesh
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.planning.hlo import Computation, Instruction, nested
from spmd_tasks.planning.hlo_schema import NEW_FIELDS_FROM
from spmd_tasks.planning.program import Program, op_name_of

_KINDS = (
  'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'ragged-all-to-all', 'collective-permute',
  'collective-broadcast',
)  # fmt: skip
WRAPPER = 'async-start'  # runs another computation meanwhile
# Instructions that take no time of the device, and so hide nothing of a collective.
_FREE = frozenset({
  'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'after-all', 'partition-id', 'send', 'recv',
})  # fmt: skip
_RENDEZVOUS = '_xla_host_transfer_rendezvous'

Groups = Sequence[np.ndarray]


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
    start, end: the instructions that start it and wait for it; `end` is None if one instruction does both.
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
  start: Instruction
  end: Instruction | None

  @property
  def bytes_per_step(self) -> float:
    """The bytes that one device sends in all executions of a step."""
    return self.bytes_per_device * self.count


def slice_of_device(device: jax.Device) -> int:
  """Returns the slice (TPU) or the process (GPU: the node) of a device: between two of them there is DCN alone."""
  index = getattr(device, 'slice_index', None)
  return index if index is not None else 0 if device.platform == 'tpu' else device.process_index


def collectives(
  program: Program, mesh: Mesh, slice_of: Callable[[jax.Device], int] = slice_of_device
) -> list[Collective]:
  """Lists the collectives that a step runs, in the program's order; those of one device alone are left out.

  `program` is a step that was compiled for `mesh`; `slice_of` gives the index of a device's slice (node).

  Raises:
    UserError: a collective's groups of devices are written in a way that is not known here.
  """
  slices = np.array([slice_of(device) for device in mesh.devices.flat])
  found = (
    _collective(each, computation, count, dict(mesh.shape), slices)
    for computation, count in unwrapped_computations(program)
    for each in _scheduled(computation)
  )
  return [each for each in found if each is not None]


def unwrapped_computations(program: Program) -> Iterator[tuple[Computation, float]]:
  """Yields the computations that run, and how often, but for those that a start wraps, which count with it."""
  waiting = [called for each in program.module.home if each.opcode == WRAPPER for called in each.called]
  wrapped = set[Computation]()
  while waiting:
    wrapped.add(computation := waiting.pop())
    waiting += [called for each in computation.instructions if each.opcode == 'call' for called in each.called]
  return ((computation, count) for computation, count in program.executions.items() if computation not in wrapped)


def end_of_pair(computation: Computation, start: Instruction) -> Instruction | None:
  """Returns the `-done` of a `-start`, by way of updates and copies of the handle."""
  handles = {start}
  for each in _after(computation, start):
    if handles & set(each.operands):
      if each.opcode.endswith('-done'):
        return each
      handles.add(each)
  return None


def is_collective(instruction: Instruction) -> bool:
  """Returns whether an instruction is a collective or starts one."""
  return instruction.opcode.removesuffix('-start') in _KINDS or bool(_between_slices(instruction))


class _Scheduled(NamedTuple):
  """A collective with the instructions that start it and wait for it in the computation that runs it."""

  instruction: Instruction
  start: Instruction
  end: Instruction | None


def _scheduled(computation: Computation) -> Iterator[_Scheduled]:
  """Yields the collectives that a computation runs, each once, in the order of the schedule."""
  started: set[tuple[str, str, object]] = set()
  for start in computation.instructions:
    found = _collectives_in(start)
    is_fused = start.opcode == 'fusion' and bool(found)
    targets = _targets(start) if is_fused else frozenset()
    if 'AsyncCollectiveDone' in targets:
      continue
    for instruction in found:
      identity = _identity(instruction)
      if is_fused and 'AsyncCollectiveStart' not in targets and identity in started:
        continue  # a fusion that moves the data of a collective on
      end = None
      if 'AsyncCollectiveStart' in targets:
        started.add(identity)
        end = _end_of_fused(computation, start, identity)
      elif start.opcode.endswith('-start'):
        end = end_of_pair(computation, start)
      elif start.opcode == 'send':
        end = _end_of_transfer(computation, start)
      yield _Scheduled(instruction, start, end)


def _collectives_in(instruction: Instruction, holders: Sequence[str] = ('fusion', WRAPPER)) -> list[Instruction]:
  """Returns the collectives that an instruction is or holds; what it calls by a `call` inside counts too."""
  if is_collective(instruction):
    return [instruction]
  if instruction.opcode not in holders:
    return []
  inside = instruction.called[0].instructions
  return [inner for each in inside for inner in _collectives_in(each, ('fusion', WRAPPER, 'call'))]


def _between_slices(instruction: Instruction) -> str:
  """Returns what the host's runtime does with a `send` between slices, such as 'all_gather'; '' for all others."""
  return instruction.note('_xla_megascale_transfer_type').lower() if instruction.opcode == 'send' else ''


def _targets(fusion: Instruction) -> frozenset[str]:
  return frozenset(each.target for each in fusion.called[0].instructions if each.opcode == 'custom-call')


def _identity(instruction: Instruction) -> tuple[str, str, object]:
  """Returns what the fusions of one collective have in common; those that JAX writes out all have channel 1."""
  return instruction.opcode, instruction.note('chain_id'), instruction.proto.channel_id or instruction.name


def _after(computation: Computation, instruction: Instruction) -> Sequence[Instruction]:
  return computation.instructions[computation.place[instruction] + 1 :]


def _end_of_fused(computation: Computation, start: Instruction, identity: tuple) -> Instruction | None:
  """Returns the fusion after `start` that waits for the same collective."""
  for each in _after(computation, start):
    is_done = each.opcode == 'fusion' and 'AsyncCollectiveDone' in _targets(each)
    if is_done and any(_identity(instruction) == identity for instruction in _collectives_in(each)):
      return each
  return None


def _end_of_transfer(computation: Computation, send: Instruction) -> Instruction | None:
  """Returns the `recv-done` of the transfer between slices that a `send` begins."""
  for each in computation.instructions:
    if each.opcode == 'recv' and each.note(_RENDEZVOUS) == send.note(_RENDEZVOUS):
      done = end_of_pair(computation, each)
      return done if done and computation.place[done] > computation.place[send] else None
  return None


def _hides_work(computation: Computation, scheduled: _Scheduled) -> bool:
  """Whether other work stands between start and end."""
  if scheduled.end is None or nested(scheduled.instruction.backend_config, 'collective_backend_config', 'is_sync'):
    return False
  between = computation.instructions[computation.place[scheduled.start] + 1 : computation.place[scheduled.end]]
  return any(each.opcode not in _FREE and not each.opcode.endswith(('-start', '-done')) for each in between)


def _kind(scheduled: _Scheduled) -> str:
  instruction, start = scheduled.instruction, scheduled.start
  if kind := _between_slices(instruction):
    return kind if kind.replace('_', '-') in _KINDS else 'collective_permute'
  kind = instruction.opcode.removesuffix('-start').replace('-', '_')
  if kind == 'all_reduce' and start.opcode == 'fusion' and 2 * start.shape.num_bytes <= instruction.shape.num_bytes:
    return 'reduce_scatter'
  return kind


def _collective(
  scheduled: _Scheduled, computation: Computation, count: float, axis_sizes: Mapping[str, int], slices: np.ndarray
) -> Collective | None:
  instruction, kind = scheduled.instruction, _kind(scheduled)
  is_permute = kind == 'collective_permute'
  if _between_slices(instruction):
    groups = _one_device_per_slice(slices)
  else:
    pairs = [(pair.source, pair.target) for pair in instruction.proto.source_target_pairs]
    moved = [np.array(pair) for pair in pairs if pair[0] != pair[1]]  # without those that stay on their device
    groups = moved if is_permute else replica_groups(instruction.proto, len(slices))
  one_group = max(groups, key=len, default=np.array([], dtype=np.int64))
  size = len(one_group)
  if size < 2 or max(int(group.max()) for group in groups) >= len(slices):
    return None
  shapes = [leaf for operand in instruction.operands for leaf in operand.shape.leaves()]
  if is_permute or kind == 'ragged_all_to_all' or instruction.opcode == 'send':
    shapes = shapes[:1]  # the others are buffers to write to, offsets and sizes, tokens
  largest = max(shapes, key=lambda shape: shape.num_bytes, default=instruction.shape)
  operand_bytes = sum(shape.num_bytes for shape in shapes)
  if kind == 'all_reduce' and instruction.opcode == 'all-reduce':
    operand_bytes = min(operand_bytes, instruction.shape.num_bytes)  # a TPU converts it on the way
  return Collective(
    kind=kind,
    axes=varying_axes(groups, axis_sizes),
    group_size=size,
    group=tuple(one_group.tolist()),
    bytes_per_device=_sent_bytes(kind, operand_bytes, size),
    count=count,
    network='dcn' if any((slices[group] != slices[group[0]]).any() for group in groups) else 'ici',
    is_asynchronous=_hides_work(computation, scheduled),
    is_collective_matmul='windowed_dot_general' in computation.name,
    op_name=instruction.op_name or op_name_of(computation, scheduled.start),
    dtype=largest.dtype,
    shape=largest.dims,
    start=scheduled.start,
    end=scheduled.end,
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


def replica_groups(proto: Any, num_devices: int) -> Groups:
  """Returns the groups of devices of a collective, as int arrays of positions in the mesh.

  XLA writes the groups in full, as a transposed iota array, or as axes of a mesh of its own; none: all devices.

  Args:
    proto: the HloInstructionProto.
    num_devices: of the mesh.

  Raises:
    UserError: the groups are written in another way.
  """
  try:
    if proto.HasField('mesh_axes_replica_group_list'):
      return _mesh_groups(proto.mesh_axes_replica_group_list)
    for iota in (proto.iota_collective_device_list, proto.collective_device_list.iota_replica_group_list):
      if iota.num_replica_groups:
        ids = _iota(iota.iota_reshape_dims, iota.iota_transpose_perm)
        return list(ids.reshape(iota.num_replica_groups, iota.num_devices_per_group))
    written = proto.collective_device_list.replica_groups or proto.replica_groups
    groups = [np.array(group.replica_ids, dtype=np.int64) for group in written if group.replica_ids]
    if not groups:
      _refuse_unknown_fields(proto)
    return groups or [np.arange(num_devices)]
  except (ValueError, IndexError) as error:
    raise UserError(
      f'the compiled program has a collective {proto.name} whose groups of devices cannot be read ({error}): plan with '
      'the versions of jax, jaxlib and libtpu in uv.lock, or add this form to planning/collectives.py.'
    ) from None


def _mesh_groups(listed: Any) -> Groups:
  """Returns the groups along some axes, or parts of axes, of a mesh; those in a group are in the order of the axes."""
  mesh, sizes = listed.mesh, [axis.size for axis in listed.mesh.axes]
  parts = []  # (axis, start, end): its factors between sizes `start` and `end` are in a group
  for axis in listed.axes:
    index, part = axis.mesh_axis_index, axis.sub_axis_info
    is_part = axis.HasField('sub_axis_info')
    parts.append((index, part.pre_size, part.pre_size * part.size) if is_part else (index, 1, sizes[index]))
  # Each axis is split wherever a part of it starts or ends; a dimension is then in a group as a whole or not at all.
  dims: dict[tuple[int, int], int] = {}
  for index, size in enumerate(sizes):
    cuts = sorted({1, size, *(cut for part, *bounds in parts if part == index for cut in bounds)})
    if any(end % start for start, end in itertools.pairwise(cuts)):
      raise ValueError(f'parts of axis {index} do not divide its size {size}')
    dims.update({(index, start): end // start for start, end in itertools.pairwise(cuts)})
  members = [key for part, start, end in parts for key in dims if key[0] == part and start <= key[1] < end]
  order = [list(dims).index(key) for key in [*(key for key in dims if key not in members), *members]]
  devices = _mesh_devices(mesh, math.prod(sizes)).reshape(list(dims.values()))
  return list(devices.transpose(order).reshape(-1, math.prod(dims[key] for key in members)))


def _mesh_devices(mesh: Any, num_devices: int) -> np.ndarray:
  if mesh.device_ids:
    return np.array(mesh.device_ids)
  if mesh.HasField('iota_device_ids'):
    return _iota(mesh.iota_device_ids.reshape_dims, mesh.iota_device_ids.transpose_perm)
  _refuse_unknown_fields(mesh)
  return np.arange(num_devices)


def _refuse_unknown_fields(proto: Any) -> None:
  name = type(proto).__name__
  numbers = [field.field_number for field in unknown_fields.UnknownFieldSet(proto)]
  if new := [number for number in numbers if number >= NEW_FIELDS_FROM[name]]:
    raise ValueError(f'field {new[0]} of its {name} is newer than planning/hlo_schema.py')


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
  ids = np.arange(math.prod(dims)).reshape(tuple(dims))
  return ids.transpose(tuple(order)) if order else ids


def varying_axes(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ; an axis counts if it does in any group."""
  shape = tuple(axis_sizes.values())
  varies = np.zeros(len(shape), dtype=bool)
  for group in groups:
    coordinates = np.stack(np.unravel_index(group, shape))
    varies |= (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, does in zip(axis_sizes, varies) if does)
