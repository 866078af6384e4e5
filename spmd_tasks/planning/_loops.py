"""Finds how often a while loop of a compiled program runs, from its text alone.

A compiler may print the trip count (`known_trip_count`). Else the loop is read: its condition compares a counter with
a bound, its body adds a step to the counter, and the counter starts at an initial value. Any of the three may stand in
a fusion, or be carried into the loop from outside. So values are computed symbolically, as `a * counter + b`.
"""

import dataclasses

from spmd_tasks.planning._instructions import CallGraph, Computation, Instruction

_COPIES = frozenset({'bitcast', 'copy', 'convert', 'reshape', 'broadcast', 'copy-done', 'bitcast-convert', 'transpose'})
_MAX_DEPTH = 60


@dataclasses.dataclass(frozen=True)
class Linear:
  """The integer `slope * counter + offset`."""

  slope: int
  offset: int


def trip_count(graph: CallGraph, computation: Computation, loop: Instruction) -> int | None:
  """Returns how often the body of `loop`, an instruction of `computation`, runs; None if the text does not say."""
  known = loop.backend_config.get('known_trip_count')
  if isinstance(known, dict) and str(known.get('n', '')).isdigit():
    return int(known['n'])
  body, condition = graph.called(loop, 'body'), graph.called(loop, 'condition')
  if body is None or condition is None:
    return None
  for index, element in enumerate(loop.shape.elements):
    if element.dims or element.dtype not in ('s32', 'u32', 's64', 'u64', 's16', 'u16', 's8', 'u8'):
      continue
    reader = _Reader(graph, {body.name, condition.name}, index)
    step = reader.element(body, body.root.name, index)
    start = _Reader(graph, set(), -1).element(computation, loop.operands[0], index) if loop.operands else None
    if step is None or step.slope != 1 or step.offset == 0 or start is None:
      continue
    count = _iterations(reader.comparison(condition, condition.root.name), start.offset, step.offset)
    if count is not None:
      return count
  return None


def _iterations(comparison: tuple[str, Linear, Linear] | None, start: int, step: int) -> int | None:
  """Counts the values start, start + step, ... for which the comparison holds, before the first one where not."""
  if comparison is None:
    return None
  direction, left, right = comparison
  slope, offset = left.slope - right.slope, left.offset - right.offset
  if slope == 0:
    return None
  if direction in ('GT', 'GE'):  # turn the comparison round, so that slope * counter + offset must stay below 0
    slope, offset = -slope, -offset
  first, change = slope * start + offset, slope * step
  match direction:
    case 'LT' | 'GT':
      holds, margin = first < 0, -first
    case 'LE' | 'GE':
      holds, margin = first <= 0, -first + 1
    case 'NE':
      holds, margin, change = first != 0, abs(first), -change if first > 0 else change
    case _:
      return None
  if not holds:
    return 0
  return -(-margin // change) if change > 0 else None


class _Reader:
  """Computes integers of a program, given which element of a loop's tuple is the counter."""

  def __init__(self, graph: CallGraph, loop_computations: set[str], counter: int):
    self._graph = graph
    self._loop_computations = loop_computations
    self._counter = counter

  def comparison(self, computation: Computation, name: str, depth: int = 0) -> tuple[str, Linear, Linear] | None:
    """Returns (direction, left, right) of the comparison that gives a bool; None if there is no single one."""
    instruction = computation.by_name.get(name)
    if instruction is None or depth > _MAX_DEPTH:
      return None
    if instruction.opcode == 'compare':
      left, right = (self.value(computation, operand, depth + 1) for operand in instruction.operands[:2])
      return (instruction.attributes.get('direction', ''), left, right) if left and right else None
    if instruction.opcode in _COPIES:
      return self.comparison(computation, instruction.operands[0], depth + 1)
    if instruction.opcode in ('fusion', 'call'):
      called = self._graph.inlined(instruction)
      return self.comparison(called, called.root.name, depth + 1) if called else None
    return None

  def value(self, computation: Computation, name: str, depth: int = 0) -> Linear | None:
    """Returns the integer that an instruction gives; None if the text does not say."""
    instruction = computation.by_name.get(name)
    if instruction is None or depth > _MAX_DEPTH:
      return None
    match instruction.opcode:
      case 'constant':
        text = instruction.literal.strip().strip('{} ')
        return Linear(0, int(text)) if text.lstrip('-').isdigit() else None
      case 'get-tuple-element':
        index = int(instruction.attributes.get('index', -1))
        return self.element(computation, instruction.operands[0], index, depth + 1)
      case 'parameter':
        return self._argument(computation, instruction, None, depth + 1)
      case 'fusion' | 'call':
        called = self._graph.inlined(instruction)
        return self.value(called, called.root.name, depth + 1) if called else None
      case 'copy-start':
        return self.value(computation, instruction.operands[0], depth + 1)
      case 'add' | 'subtract' | 'multiply' | 'minimum' | 'maximum':
        left, right = (self.value(computation, operand, depth + 1) for operand in instruction.operands[:2])
        return _compute(instruction.opcode, left, right) if left and right else None
      case opcode if opcode in _COPIES and instruction.operands:
        return self.value(computation, instruction.operands[0], depth + 1)
    return None

  def element(self, computation: Computation, name: str, index: int, depth: int = 0) -> Linear | None:
    """Returns the integer at `index` of the tuple that an instruction gives."""
    instruction = computation.by_name.get(name)
    if instruction is None or depth > _MAX_DEPTH:
      return None
    match instruction.opcode:
      case 'tuple':
        if index >= len(instruction.operands):
          return None
        return self.value(computation, instruction.operands[index], depth + 1)
      case 'parameter':
        return self._argument(computation, instruction, index, depth + 1)
      case 'while':
        body = self._graph.called(instruction, 'body')
        if body is None or not _is_invariant(body, index):
          return None
        return self.element(computation, instruction.operands[0], index, depth + 1)
      case 'fusion' | 'call':
        called = self._graph.inlined(instruction)
        return self.element(called, called.root.name, index, depth + 1) if called else None
      case 'copy' | 'optimization-barrier' | 'opt-barrier':
        return self.element(computation, instruction.operands[0], index, depth + 1)
    return None

  def _argument(self, computation: Computation, parameter: Instruction, index: int | None, depth: int) -> Linear | None:
    """Returns a parameter's integer, or that at `index` of the tuple: the counter's, or what the caller hands over."""
    if computation.name in self._loop_computations and index == self._counter:
      return Linear(1, 0)
    caller = self._graph.callers.get(computation.name)
    if caller is None:
      return None
    outside, instruction = caller
    if instruction.opcode == 'while':
      body = self._graph.called(instruction, 'body')
      if index is None or body is None or not _is_invariant(body, index):
        return None
      return self.element(outside, instruction.operands[0], index, depth)
    number = int(parameter.literal) if parameter.literal.isdigit() else 0
    if instruction.opcode not in ('fusion', 'call') or number >= len(instruction.operands):
      return None
    operand = instruction.operands[number]
    return self.value(outside, operand, depth) if index is None else self.element(outside, operand, index, depth)


def _is_invariant(body: Computation, index: int) -> bool:
  """Whether a loop's body hands on element `index` of its tuple as it is."""
  root = body.root
  if root.opcode == 'parameter':
    return True
  if root.opcode != 'tuple' or index >= len(root.operands):
    return False
  element = body.by_name.get(root.operands[index])
  while element is not None and element.opcode in _COPIES and element.operands:
    element = body.by_name.get(element.operands[0])
  if element is None or element.opcode != 'get-tuple-element' or element.attributes.get('index') != str(index):
    return False
  source = body.by_name.get(element.operands[0])
  return source is not None and source.opcode == 'parameter'


def _compute(opcode: str, left: Linear, right: Linear) -> Linear | None:
  match opcode:
    case 'add':
      return Linear(left.slope + right.slope, left.offset + right.offset)
    case 'subtract':
      return Linear(left.slope - right.slope, left.offset - right.offset)
    case 'multiply' if left.slope == 0 or right.slope == 0:
      slope = left.slope * right.offset + right.slope * left.offset
      return Linear(slope, left.offset * right.offset)
    case 'minimum' | 'maximum' if left.slope == right.slope == 0:
      return Linear(0, (min if opcode == 'minimum' else max)(left.offset, right.offset))
  return None
