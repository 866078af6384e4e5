"""Reads a compiled program: XLA's scheduled HLO text, as the compilers for TPU, GPU and CPU print it.

Usage:

    program = read_program(compiled.as_text())
    for step in program.steps():          # the operations that run, loops counted in `step.count`
      print(step.count, step.instruction.opcode, step.instruction.shape, step.instruction.op_name)

The text of a compiled program lists the operations of each computation in the order in which they run. An operation
may run other computations: a `while` its body, a `conditional` one of its branches, a `fusion` all that it fuses. The
text is read rather than XLA's HloModuleProto, because no package but TensorFlow ships the classes of that proto, and
because a text of a program is something to keep, to compare and to test with. A line that cannot be read becomes an
instruction with the opcode 'unknown', so that a new form of the text costs a figure and not the plan.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import re

from spmd_tasks.layers.moe import FURTHER_PASSES_NAME
from spmd_tasks.planning._hlo_text import parse_attributes
from spmd_tasks.planning._instructions import CALLS, CallGraph, Computation, Instruction, read_instruction
from spmd_tasks.planning._loops import trip_count

_HEADER = re.compile(r'(ENTRY )?%?([^\s(]+) (?:\(.*)?\{\s*$')
_END = re.compile(r'\}(, execution_thread="[^"]*")?\s*')
_NO_WORK = frozenset({'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'while', 'conditional', 'call'})


@dataclasses.dataclass(frozen=True)
class Step:
  """An instruction of a computation, and how often one execution of the program runs it."""

  instruction: Instruction
  computation: Computation
  count: float


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledProgram:
  """A compiled program.

  Attributes:
    name: the module's name, such as 'jit_train_step'.
    attributes: those of the module's first line, such as 'num_partitions' and 'input_output_alias'.
    graph: the computations, and who calls whom.
    entry: the computation where the program starts.
    num_unknown: how many lines could not be read.
  """

  name: str
  attributes: Mapping[str, str]
  graph: CallGraph
  entry: Computation
  num_unknown: int

  @property
  def computations(self) -> Mapping[str, Computation]:
    return self.graph.computations

  @functools.cached_property
  def trip_counts(self) -> Mapping[str, int | None]:
    """Name of each while loop -> how often its body runs each time; None where the program decides that as it runs."""
    return {
      instruction.name: trip_count(self.graph, computation, instruction)
      for computation in self.computations.values()
      for instruction in computation.instructions
      if instruction.opcode == 'while'
    }

  @functools.cached_property
  def executions(self) -> Mapping[str, float]:
    """Computation -> how often one execution of the program runs it, without what is inside of fusions.

    A loop with an unknown trip count counts once (`unknown_loops` names them), but for those of `rare_loops`, which
    do not count; of a conditional's branches only the one with the most work counts.
    """
    counts: dict[str, float] = {}

    def visit(computation: Computation, count: float) -> None:
      counts[computation.name] = counts.get(computation.name, 0) + count
      for instruction in computation.instructions:
        for name, times in self.runs(instruction):
          if name in self.computations:
            visit(self.computations[name], count * times)

    visit(self.entry, 1)
    return counts

  @property
  def unknown_loops(self) -> tuple[str, ...]:
    """The loops that run but whose trip counts are unknown, as `loop (op_name)`."""
    return self._untold_loops(is_rare=False)

  @property
  def rare_loops(self) -> tuple[str, ...]:
    """The loops for which the usual number of passes is none: experts' rows that did not fit the first time."""
    return self._untold_loops(is_rare=True)

  def _untold_loops(self, is_rare: bool) -> tuple[str, ...]:
    loops = [step.instruction for step in self.steps() if step.count and step.instruction.opcode == 'while']
    untold = [loop for loop in loops if self.trip_counts[loop.name] is None and _is_rare(loop) == is_rare]
    return tuple(f'{loop.name} ({loop.op_name})' for loop in untold)

  def steps(self, *, inside_fusions: bool = False) -> Iterator[Step]:
    """Yields every instruction that runs, computation by computation.

    Args:
      inside_fusions: whether to yield the instructions inside of a fusion too, after the fusion.
    """
    for name, count in self.executions.items():
      yield from self._steps(self.computations[name], count, inside_fusions)

  def _steps(self, computation: Computation, count: float, inside_fusions: bool) -> Iterator[Step]:
    for instruction in computation.instructions:
      yield Step(instruction, computation, count)
      if inside_fusions and instruction.opcode == 'fusion':
        fused = self.graph.called(instruction)
        if fused is not None:
          yield from self._steps(fused, count, True)

  def runs(self, instruction: Instruction) -> Iterator[tuple[str, float]]:
    """Yields the computations that an instruction runs, fusions and reducers apart, and how often each."""
    called = instruction.called
    match instruction.opcode:
      case 'while':
        known = self.trip_counts[instruction.name]
        trips = (0 if _is_rare(instruction) else 1) if known is None else known
        for name in called.get('body', ()):
          yield name, trips
        for name in called.get('condition', ()):
          yield name, trips + 1
      case 'conditional':
        names = [name for key in CALLS for name in called.get(key, ()) if name in self.computations]
        if names:
          yield max(names, key=self._work), 1
      case 'call' | 'call-start' | 'async-start':
        for key in ('to_apply', 'calls'):
          for name in called.get(key, ()):
            yield name, 1

  def _work(self, name: str) -> float:
    """Weighs a branch of a conditional: the bytes that its instructions write, with those of what it runs."""
    computation = self.computations[name]
    own = sum(each.shape.num_bytes for each in computation.instructions if each.opcode not in _NO_WORK)
    inner = (self._work(called) * times for each in computation.instructions for called, times in self.runs(each))
    return own + sum(inner)


def _is_rare(loop: Instruction) -> bool:
  return FURTHER_PASSES_NAME in loop.op_name


def read_program(text: str) -> ScheduledProgram:
  """Parses the text of a compiled program.

  Args:
    text: `compiled.as_text()`, of a program for any platform.

  Raises:
    ValueError: the text holds no computation.
  """
  attributes: dict[str, str] = {}
  name, entry, current = '', '', None
  lines: dict[str, list[str]] = {}
  for line in text.splitlines():
    if current is not None:
      if _END.fullmatch(line):
        current = None
      elif line.startswith('  ') or not lines[current]:
        lines[current].append(line)
      else:
        lines[current][-1] += line  # an attribute with a line break, such as the settings of a kernel
    elif line.startswith('HloModule '):
      first, _, rest = line.removeprefix('HloModule ').partition(',')
      name, attributes = first.strip(), parse_attributes(rest)
    elif header := _HEADER.match(line):
      current = header[2]
      lines[current] = []
      entry = current if header[1] else entry
  computations = {key: [read_instruction(line) for line in of_key if line.strip()] for key, of_key in lines.items()}
  found = {key: Computation(key, tuple(instructions)) for key, instructions in computations.items() if instructions}
  if not found:
    raise ValueError(f'a text of {len(text)} characters holds no HLO computation: give it `compiled.as_text()`.')
  num_unknown = sum(each.opcode == 'unknown' for instructions in computations.values() for each in instructions)
  return ScheduledProgram(name, attributes, CallGraph(found), found[entry or list(found)[-1]], num_unknown)
