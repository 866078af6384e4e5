"""Runs a program's schedule on paper: what takes how long, and where the program waits for a network or its host.

Instructions run one after another. A collective enters the queue of its network when it starts; if it is asynchronous,
the program waits for it where the schedule has its end, else at once. What was done meanwhile is hidden. Copies to the
host and from there likewise, but of those that have started, the link serves the one that is waited for first.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

from spmd_tasks.planning._async_pairs import is_collective
from spmd_tasks.planning._costs import Cost, instruction_cost
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning._names import op_name_of
from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.scheduled_program import ScheduledProgram


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """An instruction's time in a step.

  Attributes:
    name, computation: where it is in the program.
    op_name: JAX's name.
    seconds: of all its executions in a step; of a transfer, only while the program waits for it.
    share: of the step.
    count: executions in a step.
    basis: 'cycles' of the compiler, 'roofline', 'kernel'; or what it waits for, 'ici', 'dcn' or 'host'.
    flops: of all its executions.
  """

  name: str
  computation: str
  op_name: str
  seconds: float
  share: float
  count: float
  basis: str
  flops: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """A collective, or a copy to the host or from there.

  Attributes:
    computation, start, end: where the program starts it and waits for it; no end: one instruction does both.
    op_name: JAX's name.
    basis: of the operation that waits for it.
    queue: transfers of one queue share a link.
    seconds: how long one execution occupies it.
  """

  computation: str
  start: str
  end: str | None
  op_name: str
  basis: str
  queue: str
  seconds: float


class Schedule:
  """A program's schedule on a chip.

  Attributes:
    program: the program.
    unknown: instructions without an estimate of their work, as `name (op_name)`.
  """

  def __init__(
    self,
    program: ScheduledProgram,
    transfers: Sequence[Transfer],
    chip: Chip,
    kernel_flops: Mapping[str, float],
  ):
    self.program = program
    self._chip = chip
    self._starts: dict[tuple[str, str], list[Transfer]] = {}
    self._ends: dict[tuple[str, str], list[Transfer]] = {}
    for each in transfers:
      self._starts.setdefault((each.computation, each.start), []).append(each)
      if each.end is not None:
        self._ends.setdefault((each.computation, each.end), []).append(each)
    self._kernel_flops = kernel_flops
    self._costs: dict[tuple[str, str], Cost] = {}
    self._seconds: dict[str, float] = {}
    self._waits: dict[str, list[tuple[Transfer, float]]] = {}
    self._run(program.entry.name)
    self.unknown = tuple(
      f'{name} ({program.computations[computation].by_name[name].op_name})'
      for (computation, name), cost in self._costs.items()
      if not cost.is_known
    )

  def operations(self) -> list[Operation]:
    """Returns every operation that takes time."""
    found = []
    for name, count in self.program.executions.items():
      computation = self.program.computations[name]
      for instruction in computation.instructions:
        cost = self._cost(computation, instruction)
        if cost.seconds > 0:
          op_name = op_name_of(self.program, computation, instruction)
          found.append(_operation(instruction.name, name, op_name, cost.seconds, count, cost.basis, cost.flops))
      for each, seconds in self._waits.get(name, ()):
        found.append(_operation(each.start, name, each.op_name, seconds, count, each.basis, 0))
    return found

  def totals(self) -> tuple[float, float]:
    """Returns (FLOPs, bytes of the device's memory) of a step."""
    flops = moved = 0.0
    for name, count in self.program.executions.items():
      for instruction in self.program.computations[name].instructions:
        cost = self._cost(self.program.computations[name], instruction)
        flops += count * cost.flops
        moved += count * cost.hbm_bytes
    return flops, moved

  def _cost(self, computation: Computation, instruction: Instruction) -> Cost:
    key = computation.name, instruction.name
    if key not in self._costs:
      cost = instruction_cost(self.program, instruction, computation, self._chip, self._kernel_flops)
      moves_data_only = (
        key in self._starts
        or key in self._ends
        or is_collective(instruction)  # also where another instruction starts it
        or instruction.opcode.endswith(('-start', '-done'))
      )
      # The time of a queue or of a copy engine, unless the instruction computes too.
      self._costs[key] = dataclasses.replace(cost, seconds=0.0) if moves_data_only and not cost.flops else cost
    return self._costs[key]

  def _run(self, name: str) -> float:
    """Returns the seconds of one execution of a computation, and notes where it waits."""
    if name in self._seconds:
      return self._seconds[name]
    computation = self.program.computations[name]
    now, queues = 0.0, collections.defaultdict[str, _Queue](_Queue)
    place = {instruction.name: index for index, instruction in enumerate(computation.instructions)}
    waits = self._waits[name] = []

    def wait_for(transfer: Transfer) -> float:
      end = queues[transfer.queue].end(transfer, now)
      if end > now:
        waits.append((transfer, end - now))
      return max(now, end)

    for instruction in computation.instructions:
      for each in self._starts.get((name, instruction.name), ()):
        # Collectives run in the order of the program, whichever is waited for first.
        deadline = place[each.end or each.start] if each.basis == 'host' else place[each.start]
        queues[each.queue].start(each, now, deadline)
        if each.end is None:
          now = wait_for(each)
      for each in self._ends.get((name, instruction.name), ()):
        now = wait_for(each)
      now += self._cost(computation, instruction).seconds
      for called, times in self.program.runs(instruction):
        if called in self.program.computations:
          now += times * self._run(called)
    self._seconds[name] = now
    return now


class _Queue:
  """The transfers that share a link. Of those that have started, the one with the first deadline is served."""

  def __init__(self):
    self._now = 0.0
    self._left: dict[int, tuple[int, float]] = {}  # id of a transfer -> its deadline, and seconds still to serve

  def start(self, transfer: Transfer, now: float, deadline: int) -> None:
    self._serve(now)
    self._left[id(transfer)] = deadline, transfer.seconds

  def end(self, transfer: Transfer, now: float) -> float:
    """Serves on until the transfer is done, and returns when that is: `now` or later."""
    self._serve(now)
    deadline, _ = self._left.get(id(transfer), (0, 0.0))
    self._serve(now + sum(seconds for other, seconds in self._left.values() if other <= deadline))
    self._left.pop(id(transfer), None)
    return self._now

  def _serve(self, until: float) -> None:
    for key, (deadline, seconds) in sorted(self._left.items(), key=lambda item: item[1][0]):
      served = min(seconds, until - self._now)
      self._left[key] = deadline, seconds - served
      self._now += served
    self._now = until


def _operation(
  name: str, computation: str, op_name: str, seconds: float, count: float, basis: str, flops: float
) -> Operation:
  return Operation(
    name=name,
    computation=computation,
    op_name=op_name,
    seconds=seconds * count,
    share=0,
    count=count,
    basis=basis,
    flops=flops * count,
  )
