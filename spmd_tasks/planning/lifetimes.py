"""Finds which buffers a compiled program allocates, and from which instruction to which one each of them lives.

Time is the position in the schedule, with the body of a loop once, in the loop's place. An instruction allocates its
result, unless the result is a view of something (a tuple, a bitcast, the end of an asynchronous pair) or is written in
place: into the operand of an update, into the state of the loop around it, or into a donated argument.
"""

from collections.abc import Iterator, Mapping
import dataclasses

from spmd_tasks.planning.hlo import HOST_MEMORY, Computation, Instruction, Shape, origin_of
from spmd_tasks.planning.program import Program

_VIEWS = frozenset({'bitcast', 'optimization-barrier', 'opt-barrier', 'async-update'})
_NOT_ALLOCATING = _VIEWS | {'parameter', 'tuple', 'get-tuple-element', 'constant', 'while', 'call', 'after-all', 'send'}
# Which element of a start's tuple is new memory; the others are its operands.
_NEW_ELEMENT = {
  'copy-start': 0, 'recv': 0, 'all-gather-start': 1, 'collective-permute-start': 1, 'async-start': 1,
}  # fmt: skip
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


def buffers_of(program: Program) -> list[Buffer]:
  """Returns the buffers that a program allocates on the device, arguments apart, with their lifetimes."""
  return list(_Lifetimes(program).buffers())


class _Lifetimes:
  def __init__(self, program: Program):
    self._program = program
    self._times: dict[Instruction, tuple[int, int]] = {}
    self._spans: dict[Computation, tuple[int, int]] = {}
    self._uses: dict[tuple[Instruction, Path], _Use] = {}
    self._aliased: dict[Instruction, Mapping[Path, int]] = {}
    self._flatten(program.module.entry, 0)

  def buffers(self) -> Iterator[Buffer]:
    placed = self._written_in_place()
    for computation in self._spans:
      for instruction in computation.instructions:
        if instruction.opcode in _NOT_ALLOCATING or instruction.opcode.endswith(('-done', '-update')):
          continue
        for path, shape in instruction.shape.paths():
          is_new = path[0] == _NEW_ELEMENT[instruction.opcode] if path and instruction.opcode in _NEW_ELEMENT else True
          is_in_place = path in self._aliases(instruction) or (instruction, path) in placed
          if is_new and not is_in_place and shape.memory_space != HOST_MEMORY:
            use = self._last_use(computation, instruction, path, 0)
            begin, end = self._times[instruction]
            yield Buffer(computation, instruction, path, shape, begin, max(end, use.time), use.user)

  def _flatten(self, computation: Computation, time: int) -> int:
    begin = time
    for instruction in computation.instructions:
      start, time = time, time + 1
      for called, _ in self._program.runs(instruction):
        time = self._flatten(called, time)
      self._times[instruction] = (start, time - 1)
    self._spans[computation] = (begin, time)
    return time

  def _last_use(self, computation: Computation, value: Instruction, path: Path, depth: int) -> _Use:
    key = value, path
    if key not in self._uses and depth < _MAX_DEPTH:
      self._uses[key] = _Use(self._times[value][1], None)  # against cycles
      self._uses[key] = max(self._find_uses(computation, value, path, depth + 1), key=lambda use: use.time)
    return self._uses.get(key, _Use(self._times[value][1], None))

  def _find_uses(self, computation: Computation, value: Instruction, path: Path, depth: int) -> Iterator[_Use]:
    yield _Use(self._times[value][1], value)
    if value is computation.root:
      yield _Use(self._spans[computation][1], None)
      caller = self._program.module.callers.get(computation)
      if caller and caller.opcode in ('call', 'conditional', 'async-start') and caller in self._times:
        yield self._last_use(self._program.module.home[caller], caller, path, depth)
    for user in computation.users.get(value, ()):
      end = self._times[user][1]
      opcode = user.opcode
      if opcode == 'tuple':
        for position, operand in enumerate(user.operands):
          if operand is value:
            yield self._last_use(computation, user, (position, *path), depth)
      elif opcode == 'get-tuple-element':
        if path and path[0] == user.proto.tuple_index:
          yield self._last_use(computation, user, path[1:], depth)
      elif opcode in _VIEWS or opcode == 'while':
        yield _Use(end, user)
        yield self._last_use(computation, user, path, depth)
      elif opcode.endswith('-done'):
        yield _Use(end, user)
        if path and path[0] == _NEW_ELEMENT.get(value.opcode, path[0]):
          yield self._last_use(computation, user, path[1:], depth)
        elif not path:
          yield self._last_use(computation, user, path, depth)
      else:
        yield _Use(end, user)
        if opcode.endswith('-start') or opcode in ('send', 'recv'):  # reads its operand until the done
          for done in computation.users.get(user, ()):
            yield _Use(self._times[done][1], done)
        for result, number in self._aliases(user).items():
          if user.operands[number] is value:
            yield self._last_use(computation, user, result, depth)

  def _aliases(self, instruction: Instruction) -> Mapping[Path, int]:
    if instruction not in self._aliased:
      self._aliased[instruction] = _aliases(instruction)
    return self._aliased[instruction]

  def _written_in_place(self) -> set[tuple[Instruction, Path]]:
    """Returns the arrays that are written into what the caller has allocated, or into a donated argument."""
    module = self._program.module
    found: set[tuple[Instruction, Path]] = set()
    for computation in self._spans:
      caller = module.callers.get(computation)
      if computation is module.entry:
        found.update(origin_of(computation.root, path) for path in module.donated)
      elif caller and caller.opcode in ('while', 'conditional', 'async-start'):
        found.update(origin_of(computation.root, path) for path, _ in computation.root.shape.paths())
    return found


def _aliases(instruction: Instruction) -> Mapping[Path, int]:
  """Returns the arrays of a result that are written into an operand: path -> number of the operand."""
  if instruction.opcode == 'dynamic-update-slice':
    return {(): 0}
  if instruction.opcode == 'async-start':
    return _aliases_of_start(instruction)
  if instruction.opcode not in ('fusion', 'custom-call'):
    return {}
  written = instruction.proto.output_operand_aliasing
  found = {tuple(each.output_shape_index): each.operand_index for each in written}
  return {**found, **_updates_in(instruction.fused)} if instruction.fused else found


def _aliases_of_start(start: Instruction) -> Mapping[Path, int]:
  """Returns `_aliases` of an asynchronous computation: its result is element 1 of the start's."""
  found: dict[Path, int] = {}
  for path, _ in start.called[0].root.shape.paths():
    made, inner = origin_of(start.called[0].root, path)
    number = _aliases(made).get(inner)
    source = origin_of(made.operands[number])[0] if number is not None else made
    if source.opcode == 'parameter':
      found[(_NEW_ELEMENT['async-start'], *path)] = source.proto.parameter_number
  return found


def _updates_in(fused: Computation) -> Mapping[Path, int]:
  """Returns the results of a fusion that update one of its parameters in place: path -> number of the parameter."""
  found: dict[Path, int] = {}
  for path, _ in fused.root.shape.paths():
    update, _ = origin_of(fused.root, path)
    if update.opcode == 'dynamic-update-slice':
      target, _ = origin_of(update.operands[0])
      if target.opcode == 'parameter':
        found[path] = target.proto.parameter_number
  return found
