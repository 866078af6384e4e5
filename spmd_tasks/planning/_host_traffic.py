"""Counts the bytes that a program moves between a device and the memory of its host: offloaded activations.

The scheduled program marks arrays of the host by the memory space 5. Layers' values are written there and read back
slice by slice, by copies and by updates and slices of a stack, inside of fusions and of asynchronous computations.
"""

import dataclasses

from spmd_tasks.planning._hlo_text import HOST_MEMORY, Shape
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_COPIES = frozenset({'copy', 'copy-start'})
_SLICES = frozenset({'dynamic-slice', 'slice', 'dynamic-slice-start', 'slice-start'})
_UPDATES = frozenset({'dynamic-update-slice', 'dynamic-update-slice-start'})


@dataclasses.dataclass(frozen=True)
class HostTraffic:
  """Bytes of one device in one execution of a program.

  Attributes:
    to_host, from_host: written to the memory of the host, and read from there.
  """

  to_host: float
  from_host: float

  @property
  def longest(self) -> float:
    """The larger of the two: the link has a lane for each direction."""
    return max(self.to_host, self.from_host)


def host_traffic(program: ScheduledProgram) -> HostTraffic:
  """Counts what a program moves to the host and back; loops count as often as they run."""
  to_host = from_host = 0.0
  for step in program.steps(inside_fusions=True):
    moved = _moved(step.computation, step.instruction)
    if moved > 0:
      to_host += step.count * moved
    else:
      from_host -= step.count * moved
  return HostTraffic(to_host, from_host)


def _moved(computation: Computation, instruction: Instruction) -> int:
  """The bytes that an instruction writes to the host, negative if it reads them from there."""
  opcode = instruction.opcode
  if opcode not in _COPIES | _SLICES | _UPDATES:
    return 0
  shapes = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
  result = _first_array(instruction.shape)
  if opcode in _UPDATES:
    is_write = len(shapes) > 1 and _is_on_host(shapes[0]) and not _is_on_host(shapes[1])
    return shapes[1].stored_bytes if is_write else 0
  if not shapes or _is_on_host(shapes[0]) == _is_on_host(result):
    return 0
  return result.stored_bytes if _is_on_host(result) else -result.stored_bytes


def _first_array(shape: Shape) -> Shape:
  """The result of a start, which comes before its operand and its handle."""
  return next(shape.leaves(), shape)


def _is_on_host(shape: Shape) -> bool:
  return _first_array(shape).memory_space == HOST_MEMORY
