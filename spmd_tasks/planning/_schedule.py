"""Runs a program's schedule on paper: what takes how long, and where the program waits for a network.

Instructions run one after another. A collective enters the queue of its network when it starts; if it is asynchronous,
the program waits for it where the schedule has its end, else at once. What was done meanwhile is hidden.
"""

from collections.abc import Mapping, Sequence
import dataclasses

from spmd_tasks.planning._costs import Cost, instruction_cost
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning._links import Links
from spmd_tasks.planning._names import op_name_of
from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.collectives import Collective
from spmd_tasks.planning.scheduled_program import ScheduledProgram


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """An instruction's time in a step.

  Attributes:
    name, computation: where it is in the program.
    op_name: JAX's name.
    seconds: of all its executions in a step; of a collective, only while the program waits for it.
    share: of the step.
    count: executions in a step.
    basis: 'cycles' of the compiler, 'roofline', 'kernel'; or the network of a collective, 'ici' or 'dcn'.
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


@dataclasses.dataclass(frozen=True)
class Wait:
  """The time that the program waits for a collective, each time."""

  collective: Collective
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
    collectives: Sequence[Collective],
    chip: Chip,
    links: Links,
    kernel_flops: Mapping[str, float],
  ):
    self.program = program
    self._chip = chip
    self._links = links
    self._starts: dict[tuple[str, str], list[Collective]] = {}
    self._ends: dict[tuple[str, str], list[Collective]] = {}
    for each in collectives:
      self._starts.setdefault((each.computation, each.start), []).append(each)
      if each.end is not None:
        self._ends.setdefault((each.computation, each.end), []).append(each)
    self._kernel_flops = kernel_flops
    self._costs: dict[tuple[str, str], Cost] = {}
    self._seconds: dict[str, float] = {}
    self._waits: dict[str, list[Wait]] = {}
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
      for wait in self._waits.get(name, ()):
        each = wait.collective
        found.append(_operation(each.start, name, each.op_name, wait.seconds, count, each.network, 0))
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
      moves_data_only = key in self._starts or key in self._ends or instruction.opcode.endswith(('-start', '-done'))
      # The time of a network or of a copy engine, unless the instruction computes too.
      self._costs[key] = dataclasses.replace(cost, seconds=0.0) if moves_data_only and not cost.flops else cost
    return self._costs[key]

  def _run(self, name: str) -> float:
    """Returns the seconds of one execution of a computation, and notes where it waits."""
    if name in self._seconds:
      return self._seconds[name]
    computation = self.program.computations[name]
    now, free = 0.0, {'ici': 0.0, 'dcn': 0.0}
    done: dict[int, float] = {}
    waits = self._waits[name] = []

    def wait_for(collective: Collective, end: float) -> float:
      if end > now:
        waits.append(Wait(collective, end - now))
      return max(now, end)

    for instruction in computation.instructions:
      for each in self._starts.get((name, instruction.name), ()):
        end = max(now, free[each.network]) + self._links.seconds(each)
        free[each.network] = end
        if each.end is None:
          now = wait_for(each, end)
        else:
          done[id(each)] = end
      for each in self._ends.get((name, instruction.name), ()):
        now = wait_for(each, done.get(id(each), now))
      now += self._cost(computation, instruction).seconds
      for called, times in self.program.runs(instruction):
        if called in self.program.computations:
          now += times * self._run(called)
    self._seconds[name] = now
    return now


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
