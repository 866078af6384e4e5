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
    async-start, async-done; call-start, ...      the same around a computation that holds the collective, or that calls
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
import re
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.planning.hlo import Computation, Instruction, nested
from spmd_tasks.planning.program import Program, op_name_of

_KINDS = (
  'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'ragged-all-to-all', 'collective-permute',
  'collective-broadcast',
)  # fmt: skip
_WRAPPERS = ('async-start', 'call-start', 'fusion-start')  # run another computation meanwhile
# Instructions that take no time of the device, and so hide nothing of a collective.
_FREE = frozenset({
  'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'after-all', 'partition-id', 'send', 'recv',
})  # fmt: skip

Groups = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective of a program.

  Attributes:
    kind: 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', 'ragged_all_to_all', 'collective_permute' or
      'collective_broadcast'.
    axes: the mesh axes along which the devices of a group lie, in the mesh's order.
    group_size: devices in a group; 2 of a permute, which is a list of pairs.
    bytes_per_device: sent over the network by one device in one execution.
    count: executions per step, loops counted.
    network: 'dcn' if devices of one group lie in different slices (nodes), else 'ici'.
    is_asynchronous: whether other work runs between its start and its end.
    is_collective_matmul: whether it belongs to a loop that moves an operand of a product piece by piece meanwhile.
    op_name: JAX's name of what it belongs to.
  """

  kind: str
  axes: tuple[str, ...]
  group_size: int
  bytes_per_device: float
  count: float
  network: Literal['ici', 'dcn']
  is_asynchronous: bool
  is_collective_matmul: bool
  op_name: str

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
    for computation, count in _unwrapped_computations(program)
    for each in _scheduled(computation)
  )
  return [each for each in found if each is not None]


def _unwrapped_computations(program: Program) -> Iterator[tuple[Computation, float]]:
  """Yields the computations that run, and how often, but for those that a start wraps, which count with it."""
  waiting = [called for each in program.module.home if each.opcode in _WRAPPERS for called in each.called]
  wrapped = set[Computation]()
  while waiting:
    wrapped.add(computation := waiting.pop())
    waiting += [called for each in computation.instructions if each.opcode == 'call' for called in each.called]
  return ((computation, count) for computation, count in program.executions.items() if computation not in wrapped)


class _Scheduled(NamedTuple):
  """A collective, the instruction that starts it in the computation that runs it, and whether other work hides it."""

  instruction: Instruction
  start: Instruction
  is_asynchronous: bool


def _scheduled(computation: Computation) -> Iterator[_Scheduled]:
  """Yields the collectives that a computation runs, each once, in the order of the schedule."""
  started: set[tuple[str, ...]] = set()
  for place, start in enumerate(computation.instructions):
    targets = start.fused.targets if start.fused else frozenset()
    if 'AsyncCollectiveDone' in targets:
      continue
    for instruction in _collectives_in(start):
      identity = _identity(instruction)
      if start.fused and 'AsyncCollectiveStart' not in targets and identity in started:
        continue  # a fusion that moves the data of a collective on
      if 'AsyncCollectiveStart' in targets:
        started.add(identity)
      later = computation.instructions[place + 1 :]
      yield _Scheduled(instruction, start, start.opcode == 'send' or _is_hidden(instruction, start, later))


def _collectives_in(instruction: Instruction, holders: Sequence[str] = ('fusion', *_WRAPPERS)) -> list[Instruction]:
  """Returns the collectives that an instruction is or holds; what it calls by a `call` inside counts too."""
  if instruction.opcode.removesuffix('-start') in _KINDS or _between_slices(instruction):
    return [instruction]
  if instruction.opcode not in holders:
    return []
  inside = instruction.called[0].instructions
  return [inner for each in inside for inner in _collectives_in(each, ('fusion', *_WRAPPERS, 'call'))]


def _between_slices(instruction: Instruction) -> str:
  """Returns what the host's runtime does with a `send` between slices, such as 'all_gather'; '' for all others."""
  return instruction.attribute('_xla_megascale_transfer_type').lower() if instruction.opcode == 'send' else ''


def _identity(instruction: Instruction) -> tuple[str, ...]:
  """Returns what the fusions of one collective have in common; those that JAX writes out all have channel 1."""
  return (
    instruction.opcode,
    instruction.attribute('chain_id'),
    instruction.attribute('channel_id') or instruction.name,
  )


def _is_hidden(instruction: Instruction, start: Instruction, later: Sequence[Instruction]) -> bool:
  """Returns whether other work is between `start` and what waits for the collective in the instructions after it."""
  is_start = 'AsyncCollectiveStart' in start.fused.targets if start.fused else start.opcode.endswith('-start')
  if not is_start or nested(instruction.backend_config, 'collective_backend_config', 'is_sync'):
    return False
  handles, is_work = {start}, False
  for each in later:
    if start.fused and each.fused and 'AsyncCollectiveDone' in each.fused.targets:
      if _identity(instruction) in map(_identity, _collectives_in(each)):
        return is_work
    elif not handles.isdisjoint(each.operands):  # an update, a copy or the end of a pair
      if each.opcode.endswith('-done'):
        return is_work
      handles.add(each)
    is_work |= each.opcode not in _FREE and not each.opcode.endswith(('-start', '-done'))
  return False


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
    groups = replica_groups(instruction, len(slices))
    if is_permute:
      groups = [pair for pair in groups if pair[0] != pair[1]]  # without those that stay on their device
  one_group = max(groups, key=len, default=np.array([], dtype=np.int64))
  size = len(one_group)
  if size < 2 or max(int(group.max()) for group in groups) >= len(slices):
    return None
  shapes = [leaf for operand in instruction.operands for leaf in operand.shape.leaves()]
  if is_permute or kind == 'ragged_all_to_all' or instruction.opcode == 'send':
    shapes = shapes[:1]  # the others are buffers to write to, offsets and sizes, tokens
  operand_bytes = sum(shape.num_bytes for shape in shapes)
  if kind == 'all_reduce' and instruction.opcode == 'all-reduce':
    operand_bytes = min(operand_bytes, instruction.shape.num_bytes)  # a TPU converts it on the way
  return Collective(
    kind=kind,
    axes=varying_axes(groups, axis_sizes),
    group_size=size,
    bytes_per_device=_sent_bytes(kind, operand_bytes, size),
    count=count,
    network='dcn' if any((slices[group] != slices[group[0]]).any() for group in groups) else 'ici',
    is_asynchronous=scheduled.is_asynchronous,
    is_collective_matmul='windowed_dot_general' in computation.name,
    op_name=instruction.op_name or op_name_of(computation, scheduled.start),
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


_GROUPS = re.compile(r'\b(?:replica_groups|source_target_pairs)=(.*?)(?=, (?!device_ids)[a-z_-]+=|$)')
_IOTA = re.compile(r'\[([\d,]+)\](?:T\(([\d,]+)\))?')


def replica_groups(instruction: Instruction, num_devices: int) -> Groups:
  """Returns the groups of devices of a collective, or the pairs of a permute, as int arrays of positions in the mesh.

  XLA writes the groups in full, `{{0,1},{2,3}}`; as a transposed iota array, `[2,4]<=[4,2]T(1,0)`; or as axes of a mesh
  of its own, `mesh['a'=2,'b'=4] {'b'}`. None: all devices.

  Args:
    instruction: the collective.
    num_devices: of the mesh.

  Raises:
    UserError: the groups are written in another way.
  """
  written = _GROUPS.search(instruction.attributes)
  text = written[1] if written else '{}'
  try:
    if text == '{}':
      return [np.arange(num_devices)]
    if re.fullmatch(r'\{(\{[\d,]+\},?)+\}', text):
      return [np.array(_numbers(group)) for group in re.findall(r'\{([\d,]+)\}', text)]
    if array := re.fullmatch(rf'\[(\d+),(\d+)\]<=({_IOTA.pattern})', text):
      return list(_iota(array[3]).reshape(int(array[1]), int(array[2])))
    return _mesh_groups(text)
  except (ValueError, IndexError) as error:
    raise UserError(
      f'the compiled program has a collective {instruction.name} whose groups of devices {text} cannot be read '
      f'({error}): plan with the versions of jax, jaxlib and libtpu in uv.lock, or add this form to '
      'planning/collectives.py.'
    ) from None


def _mesh_groups(text: str) -> Groups:
  """Returns the groups along some axes, or parts of axes, of a mesh; those in a group are in the order of the axes.

  `mesh['a'=4,'b'=2], device_ids=([2,2,2]T(1,2,0)) {'a':(2)2,'b'}` has in a group the part of axis a between its factors
  2 and 2 x 2, and axis b, of a mesh whose devices are the transposed iota array.
  """
  written = re.fullmatch(r'mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*)\}', text)
  if written is None:
    raise ValueError('neither lists, nor an iota array, nor axes of a mesh')
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", written[1])}
  # The parts of axes in a group: the factors of an axis between two sizes.
  parts = [
    (name, int(start or 1), int(start) * int(size) if start else sizes[name])
    for name, start, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", written[3])
  ]
  # Each axis is split wherever a part of it starts or ends; a dimension is then in a group as a whole or not at all.
  dims: dict[tuple[str, int], int] = {}
  for axis, size in sizes.items():
    cuts = sorted({1, size, *(cut for part, *bounds in parts if part == axis for cut in bounds)})
    if any(end % start for start, end in itertools.pairwise(cuts)):
      raise ValueError(f'parts of axis {axis} do not divide its size {size}')
    dims.update({(axis, start): end // start for start, end in itertools.pairwise(cuts)})
  members = [key for part, start, end in parts for key in dims if key[0] == part and start <= key[1] < end]
  order = [list(dims).index(key) for key in [*(key for key in dims if key not in members), *members]]
  devices = _mesh_devices(written[2], math.prod(sizes.values())).reshape(list(dims.values()))
  return list(devices.transpose(order).reshape(-1, math.prod(dims[key] for key in members)))


def _mesh_devices(text: str | None, num_devices: int) -> np.ndarray:
  if text is None:
    return np.arange(num_devices)
  return _iota(text) if _IOTA.fullmatch(text) else np.array(_numbers(text))


def _iota(text: str) -> np.ndarray:
  """Returns the array `[4,2]T(1,0)`: numbers from 0 in the shape [4, 2], transposed."""
  written = _IOTA.fullmatch(text)
  if written is None:
    raise ValueError(f'{text} is no iota array')
  dims = _numbers(written[1])
  ids = np.arange(math.prod(dims)).reshape(dims)
  return ids.transpose(_numbers(written[2])) if written[2] else ids


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(',')]


def varying_axes(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ; an axis counts if it does in any group."""
  shape = tuple(axis_sizes.values())
  varies = np.zeros(len(shape), dtype=bool)
  for group in groups:
    coordinates = np.stack(np.unravel_index(group, shape))
    varies |= (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, does in zip(axis_sizes, varies) if does)
