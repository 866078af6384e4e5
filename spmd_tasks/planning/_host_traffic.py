"""Finds the copies that a program makes between a device and the memory of its host: offloaded activations.

The scheduled program marks arrays of the host by the memory space 5. Layers' values are written there and read back
slice by slice, by copies and by updates and slices of a stack, inside of fusions and of asynchronous computations.
"""

from collections.abc import Iterator, Sequence
import dataclasses

from spmd_tasks.planning._async_pairs import WRAPPERS, end_of_pair, unwrapped_computations
from spmd_tasks.planning._hlo_text import HOST_MEMORY, Shape
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_COPIES = frozenset({'copy', 'copy-start'})
_SLICES = frozenset({'dynamic-slice', 'slice', 'dynamic-slice-start', 'slice-start'})
_UPDATES = frozenset({'dynamic-update-slice', 'dynamic-update-slice-start'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopy:
  """A copy to the host or from there.

  Attributes:
    computation: that which runs it.
    start, end: the instructions of the computation that start it and wait for it; no end: one does both.
    count: executions per step.
    num_bytes: of one device and one execution.
    is_write: whether it goes to the host.
  """

  computation: Computation
  start: Instruction
  end: Instruction | None
  count: float
  num_bytes: int
  is_write: bool


def host_copies(program: ScheduledProgram) -> list[HostCopy]:
  """Returns the copies to the host and back, in the order of the schedule."""
  return [
    HostCopy(
      computation=computation,
      start=instruction,
      end=end_of_pair(computation, instruction) if instruction.opcode.endswith('-start') else None,
      count=count,
      num_bytes=abs(moved),
      is_write=moved > 0,
    )
    for computation, count in unwrapped_computations(program)
    for instruction in computation.instructions
    for moved in _moved_by(program, computation, instruction)
  ]


def host_bytes(copies: Sequence[HostCopy]) -> float:
  """Returns the bytes to the host in one execution of a program, or those from it: the link has a lane for each."""
  return max(sum(each.count * each.num_bytes for each in copies if each.is_write == way) for way in (True, False))


def _moved_by(program: ScheduledProgram, computation: Computation, instruction: Instruction) -> Iterator[int]:
  """Yields `_moved` of an instruction, or of those in its fusion or asynchronous computation, without zeros."""
  if moved := _moved(computation, instruction):
    yield moved
  called = program.graph.inlined(instruction) if instruction.opcode in ('fusion', *WRAPPERS) else None
  if called is not None:
    for each in called.instructions:
      yield from _moved_by(program, called, each)


def _moved(computation: Computation, instruction: Instruction) -> int:
  """The bytes that an instruction writes to the host, negative if it reads them from there."""
  opcode = instruction.opcode
  if opcode not in _COPIES | _SLICES | _UPDATES:
    return 0
  shapes = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
  result = _result(instruction.shape)
  if opcode in _UPDATES:
    is_write = len(shapes) > 1 and _is_on_host(shapes[0]) and not _is_on_host(shapes[1])
    return shapes[1].stored_bytes if is_write else 0
  if not shapes or _is_on_host(shapes[0]) == _is_on_host(result):
    return 0
  return result.stored_bytes if _is_on_host(result) else -result.stored_bytes


def _result(shape: Shape) -> Shape:
  """The array that an instruction makes. A start has its handle too, its operand after it or its operands before."""
  is_start_of_slice = shape.elements and shape.elements[0].dtype == 'tuple'
  return _first_array(shape.elements[1] if is_start_of_slice else shape)


def _first_array(shape: Shape) -> Shape:
  return next(shape.leaves(), shape)


def _is_on_host(shape: Shape) -> bool:
  return _first_array(shape).memory_space == HOST_MEMORY
