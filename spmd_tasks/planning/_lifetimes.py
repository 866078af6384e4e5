"""Finds which buffers a compiled program allocates, and from which instruction to which one each of them lives.

Time is the position in the schedule, with the body of a loop once, in the loop's place. An instruction allocates its
result, unless the result is a view of something (a tuple, a bitcast, the end of an asynchronous pair) or is written in
place: into the operand of an update, into the state of the loop around it, or into a donated argument.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import re

from spmd_tasks.planning._hlo_text import HOST_MEMORY, Shape
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_VIEWS = frozenset({'bitcast', 'optimization-barrier', 'opt-barrier', 'async-update'})
_NOT_ALLOCATING = _VIEWS | {'parameter', 'tuple', 'get-tuple-element', 'constant', 'while', 'call', 'after-all', 'send'}
_ALIASING = re.compile(r'\{([\d, ]*)\}: \((\d+)')
_DONATED = re.compile(r'\{([\d, ]*)\}: \(\d+')
# Which element of a start's tuple is new memory; the others are its operands.
_NEW_ELEMENT = {
  'copy-start': 0, 'recv': 0, 'all-gather-start': 1, 'collective-permute-start': 1, 'async-start': 1,
}  # fmt: skip
_ELEMENTWISE = frozenset({
  'add', 'subtract', 'multiply', 'divide', 'maximum', 'minimum', 'select', 'negate', 'exponential', 'tanh', 'convert',
  'copy', 'and', 'or', 'compare', 'power', 'rsqrt', 'sqrt', 'log',
})  # fmt: skip
_MAX_DEPTH = 400

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
  """Memory that an instruction allocates.

  Attributes:
    computation, instruction, path: which array of which instruction's result.
    shape: of the array.
    begin, end: the first and the last position in the schedule where it holds a value that is needed.
    last_user: the instruction that needs it last; None if it is a result of the program.
  """

  computation: Computation
  instruction: Instruction
  path: Path
  shape: Shape
  begin: int
  end: int
  last_user: Instruction | None


@dataclasses.dataclass(frozen=True)
class _Use:
  time: int
  user: Instruction | None


class Lifetimes:
  """The lifetimes of a program's buffers."""

  def __init__(self, program: ScheduledProgram):
    self._program = program
    self._times: dict[tuple[str, str], tuple[int, int]] = {}
    self._spans: dict[str, tuple[int, int]] = {}
    self._uses: dict[tuple[str, str, Path], _Use] = {}
    self._flatten(program.entry, 0)

  def buffers(self) -> Iterator[Buffer]:
    """Yields the buffers that the program allocates on the device, arguments apart."""
    placed = self._written_in_place()
    for name in self._spans:
      computation = self._program.computations[name]
      for instruction in computation.instructions:
        if instruction.opcode in _NOT_ALLOCATING or instruction.opcode.endswith(('-done', '-update')):
          continue
        aliased = self._aliases(computation, instruction)
        for path, shape in _leaves(instruction.shape):
          is_new = path[0] == _NEW_ELEMENT[instruction.opcode] if path and instruction.opcode in _NEW_ELEMENT else True
          if (
            shape.memory_space == HOST_MEMORY
            or not is_new
            or path in aliased
            or (name, instruction.name, path) in placed
          ):
            continue
          yield self.buffer(computation, instruction, path, shape)

  def buffer(self, computation: Computation, instruction: Instruction, path: Path, shape: Shape) -> Buffer:
    """Returns an array of an instruction's result with its lifetime."""
    use = self._last_use(computation, instruction.name, path, 0)
    begin, end = self._times[computation.name, instruction.name]
    return Buffer(computation, instruction, path, shape, begin, max(end, use.time), use.user)

  def runs(self, computation: str) -> bool:
    """Whether the program's schedule holds a computation."""
    return computation in self._spans

  def reusing_operands(self, buffers: list[Buffer]) -> list[Buffer]:
    """Ends the life of an operand of equal size where an elementwise instruction can write over it."""
    at = {(each.computation.name, each.instruction.name, each.path): each for each in buffers}
    shortened: dict[int, Buffer] = {}
    for each in buffers:
      if not self._is_elementwise(each.instruction):
        continue
      for operand in each.instruction.operands:
        source = at.get((each.computation.name, operand, ()))
        if source is None or id(source) in shortened or source.shape.stored_bytes != each.shape.stored_bytes:
          continue
        if source.end == each.begin:
          shortened[id(source)] = dataclasses.replace(source, end=each.begin - 1)
          break
    return [shortened.get(id(each), each) for each in buffers]

  def _flatten(self, computation: Computation, time: int) -> int:
    begin = time
    for instruction in computation.instructions:
      start, time = time, time + 1
      for called, _ in self._program.runs(instruction):
        if called in self._program.computations:
          time = self._flatten(self._program.computations[called], time)
      self._times[computation.name, instruction.name] = (start, time - 1)
    self._spans[computation.name] = (begin, time)
    return time

  def _last_use(self, computation: Computation, name: str, path: Path, depth: int) -> _Use:
    key = computation.name, name, path
    if key not in self._uses and depth < _MAX_DEPTH:
      self._uses[key] = _Use(self._times[computation.name, name][1], None)  # against cycles
      self._uses[key] = max(self._find_uses(computation, name, path, depth + 1), key=lambda use: use.time)
    return self._uses.get(key, _Use(self._times[computation.name, name][1], None))

  def _find_uses(self, computation: Computation, name: str, path: Path, depth: int) -> Iterator[_Use]:
    instruction = computation.by_name[name]
    yield _Use(self._times[computation.name, name][1], instruction)
    if instruction is computation.root:
      yield _Use(self._spans[computation.name][1], None)
      caller = self._program.graph.callers.get(computation.name)
      if caller and caller[1].opcode in ('call', 'conditional', 'async-start') and caller[0].name in self._spans:
        yield self._last_use(caller[0], caller[1].name, path, depth)
    for user in computation.users.get(name, ()):
      end = self._times[computation.name, user.name][1]
      opcode = user.opcode
      if opcode == 'tuple':
        for position, operand in enumerate(user.operands):
          if operand == name:
            yield self._last_use(computation, user.name, (position, *path), depth)
      elif opcode == 'get-tuple-element':
        if path and str(path[0]) == user.attributes.get('index'):
          yield self._last_use(computation, user.name, path[1:], depth)
      elif opcode in _VIEWS or opcode == 'while':
        yield _Use(end, user)
        yield self._last_use(computation, user.name, path, depth)
      elif opcode.endswith('-done'):
        yield _Use(end, user)
        if path and path[0] == _NEW_ELEMENT.get(instruction.opcode, path[0]):
          yield self._last_use(computation, user.name, path[1:], depth)
        elif not path:
          yield self._last_use(computation, user.name, path, depth)
      else:
        yield _Use(end, user)
        if opcode.endswith('-start') or opcode in ('send', 'recv'):  # reads its operand until the done
          for done in computation.users.get(user.name, ()):
            yield _Use(self._times[computation.name, done.name][1], done)
        for result, number in self._aliases(computation, user).items():
          if number < len(user.operands) and user.operands[number] == name:
            yield self._last_use(computation, user.name, result, depth)

  def _aliases(self, computation: Computation, instruction: Instruction) -> Mapping[Path, int]:
    """Returns the arrays of a result that are written into an operand: path -> number of the operand."""
    if instruction.opcode == 'dynamic-update-slice':
      return {(): 0}
    if instruction.opcode not in ('fusion', 'custom-call'):
      return {}
    found: dict[Path, int] = {}
    text = instruction.attributes.get('output_to_operand_aliasing', '') if 'aliasing=' in instruction.tail else ''
    for path, operand in _ALIASING.findall(text):
      found[_path(path)] = int(operand)
    fused = self._program.graph.called(instruction) if instruction.opcode == 'fusion' else None
    return {**_updates_in(fused), **found} if fused else found

  def _written_in_place(self) -> set[tuple[str, str, Path]]:
    """Returns the arrays that are written into the state of a loop, the result of a branch or a donated argument."""
    found: set[tuple[str, str, Path]] = set()
    for name in self._spans:
      computation = self._program.computations[name]
      caller = self._program.graph.callers.get(name)
      if computation is self._program.entry:
        donated = self._program.attributes.get('input_output_alias', '')
        paths = {_path(text) for text in _DONATED.findall(donated)}
      elif caller and caller[1].opcode in ('while', 'conditional'):
        paths = {path for path, _ in _leaves(computation.root.shape)}
      else:
        continue
      for path in paths:
        source = origin_of(computation, computation.root.name, path)
        if source:
          found.add((name, *source))
    return found

  def _is_elementwise(self, instruction: Instruction) -> bool:
    return instruction.opcode in _ELEMENTWISE or (instruction.opcode == 'fusion' and 'kind=kLoop' in instruction.tail)


def origin_of(computation: Computation, name: str, path: Path) -> tuple[str, Path] | None:
  """Returns the instruction and the array in its result where a value is made, through tuples and views."""
  for _ in range(_MAX_DEPTH):
    instruction = computation.by_name.get(name)
    if instruction is None:
      return None
    if instruction.opcode == 'tuple' and path and path[0] < len(instruction.operands):
      name, path = instruction.operands[path[0]], path[1:]
    elif instruction.opcode == 'get-tuple-element':
      name, path = instruction.operands[0], (int(instruction.attributes.get('index', 0)), *path)
    elif instruction.opcode in _VIEWS and instruction.operands:
      name = instruction.operands[0]
    else:
      return name, path
  return None


@functools.lru_cache(maxsize=100_000)
def _updates_in(fused: Computation) -> Mapping[Path, int]:
  """Returns the results of a fusion that update one of its parameters in place: path -> number of the parameter."""
  found: dict[Path, int] = {}
  for path, _ in _leaves(fused.root.shape):
    origin = origin_of(fused, fused.root.name, path)
    update = fused.by_name.get(origin[0]) if origin else None
    if update is None or update.opcode != 'dynamic-update-slice':
      continue
    target = origin_of(fused, update.operands[0], ())
    parameter = fused.by_name.get(target[0]) if target else None
    if parameter is not None and parameter.opcode == 'parameter' and parameter.literal.isdigit():
      found[path] = int(parameter.literal)
  return found


def _leaves(shape: Shape, path: Path = ()) -> Iterator[tuple[Path, Shape]]:
  if shape.dtype != 'tuple':
    yield path, shape
  for index, element in enumerate(shape.elements):
    yield from _leaves(element, (*path, index))


def _path(text: str) -> Path:
  return tuple(int(number) for number in re.findall(r'\d+', text))
