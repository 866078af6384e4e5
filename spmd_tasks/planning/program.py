"""Says what a compiled program runs and how often: its operations in the order of their schedule, loops counted.

    for computation, count in read_program(compiled).executions.items():
      print(count, [instruction.opcode for instruction in computation.instructions])

An operation may run other computations: a `while` its body, a `conditional` one of its branches, a `fusion` all that it
fuses. How often a loop runs, a compiler may say (`known_trip_count`); that of TPUs does not. Else it is counted: one
integer of the loop's state decides the condition, and its values are computed, pass by pass. Bounds and steps may stand
in a fusion, or be carried into the loop from outside.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import operator
import re
from typing import Any

from spmd_tasks.layers.moe import FURTHER_PASSES_NAME
from spmd_tasks.planning.hlo import Computation, Instruction, Module, nested, origin_of, read_module

_NO_WORK = frozenset({'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'while', 'conditional', 'call'})
_COPIES = frozenset({'bitcast', 'copy', 'convert', 'reshape', 'broadcast', 'copy-done', 'bitcast-convert', 'transpose'})
_HANDED_ON = _COPIES | {'copy-start', 'optimization-barrier', 'opt-barrier'}
_COUNTERS = frozenset({'s8', 'u8', 's16', 'u16', 's32', 'u32', 's64', 'u64'})
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
  'add': operator.add, 'subtract': operator.sub, 'multiply': operator.mul, 'minimum': min, 'maximum': max,
  'LT': operator.lt, 'LE': operator.le, 'GT': operator.gt, 'GE': operator.ge, 'NE': operator.ne, 'EQ': operator.eq,
}  # fmt: skip
_MAX_DEPTH = 60
_MAX_TRIPS = 100_000
_MAX_DISTANCE = 6  # of the instruction that another one without a name is named after
_LOOP = '/while/body'


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A compiled program."""

  module: Module

  @functools.cached_property
  def trip_counts(self) -> Mapping[Instruction, int | None]:
    """While loop -> how often its body runs each time; None where the program decides that as it runs."""
    return {each: _trip_count(self.module, each) for each in self.module.home if each.opcode == 'while'}

  @functools.cached_property
  def executions(self) -> Mapping[Computation, float]:
    """Computation -> how often one execution of the program runs it, without what is inside of fusions.

    A loop with an unknown trip count counts once, but a loop for experts' rows that did not fit the first time counts
    none; of a conditional's branches only the one with the most work counts.
    """
    counts: dict[Computation, float] = {}

    def visit(computation: Computation, count: float) -> None:
      counts[computation] = counts.get(computation, 0) + count
      for instruction in computation.instructions:
        for called, times in self.runs(instruction):
          visit(called, count * times)

    visit(self.module.entry, 1)
    return counts

  def runs(self, instruction: Instruction) -> Iterator[tuple[Computation, float]]:
    """Yields the computations that an instruction runs, fusions and reducers apart, and how often each."""
    match instruction.opcode:
      case 'while':
        known = self.trip_counts[instruction]
        trips = (0 if FURTHER_PASSES_NAME in instruction.op_name else 1) if known is None else known
        condition, body = instruction.called
        yield body, trips
        yield condition, trips + 1
      case 'conditional':
        yield max(instruction.called, key=self._work), 1
      case 'call' | 'async-start' | 'call-start' | 'fusion-start':
        for called in instruction.called:
          yield called, 1

  def _work(self, computation: Computation) -> float:
    """Weighs a branch of a conditional: the bytes that its instructions write, with those of what it runs."""
    own = sum(each.shape.num_bytes for each in computation.instructions if each.opcode not in _NO_WORK)
    inner = (self._work(called) * times for each in computation.instructions for called, times in self.runs(each))
    return own + sum(inner)


def read_program(compiled: Any) -> Program:
  """Reads a jax.stages.Compiled, for any platform."""
  return Program(read_module(compiled.as_text()))


def op_name_of(computation: Computation, instruction: Instruction) -> str:
  """Returns JAX's name of an instruction, also where the compiler made the instruction and gave it none; or ''.

  A loop that the compiler rewrote has the name that most of its body has. Any other instruction without a name has
  that of the nearest instruction that needs its result, or else of the nearest one that its operands come from: an
  all-gather is named after the product that it is for.
  """
  if _is_jax_name(instruction.op_name):
    return instruction.op_name
  if instruction.opcode == 'while':
    return _loop_name(instruction) or instruction.op_name
  fused = instruction.fused
  inside = [fused.root, *reversed(fused.instructions)] if fused else []
  named = next((each.op_name for each in inside if _is_jax_name(each.op_name)), '')
  forwards = named or _nearest(computation, instruction, forwards=True)
  return forwards or _nearest(computation, instruction, forwards=False) or instruction.op_name


def loop_element_name(loop: Instruction, index: int) -> str:
  """Returns JAX's name of what a loop's body writes to element `index` of its state; '' if the body only hands it on.

  Of an update, as of a stack of all layers' activations, that is the name of what is written, not of the update; it is
  '.../while/carry' if that is what the pass of the loop received.
  """
  body = loop.called[1]
  writer, _ = origin_of(body.root, (index,))
  made = [each for each in writer.operands if origin_of(each)[0].opcode not in ('parameter', 'constant')]
  for each in sorted(made, key=lambda each: -each.shape.num_bytes):
    name = each.op_name if _is_jax_name(each.op_name) else _nearest(body, each, forwards=False)
    if name:
      return name
  return f'{writer.op_name.split(_LOOP)[0]}/while/carry' if _LOOP in writer.op_name else writer.op_name


def _is_jax_name(op_name: str) -> bool:
  """Whether a name is a path of JAX's, 'jit(f)/...', and not one that the compiler made up, such as 'broadcast.83'."""
  return '/' in op_name


def _loop_name(loop: Instruction) -> str:
  names = [each.op_name.split(_LOOP)[0] for each in loop.called[1].instructions if _LOOP in each.op_name]
  return f'{collections.Counter(names).most_common(1)[0][0]}/while' if names else ''


def _nearest(computation: Computation, start: Instruction, *, forwards: bool) -> str:
  frontier, seen = [start], {start}
  for _ in range(_MAX_DISTANCE):
    next_to = [other for each in frontier for other in (computation.users.get(each, ()) if forwards else each.operands)]
    frontier = [each for each in next_to if each not in seen]
    seen.update(frontier)
    for each in frontier:
      name = each.op_name if _is_jax_name(each.op_name) else _loop_name(each) if each.opcode == 'while' else ''
      if name:
        return name
  return ''


def _trip_count(module: Module, loop: Instruction) -> int | None:
  """Returns how often the body of a loop runs; None if the program does not say, or more than _MAX_TRIPS times."""
  known = nested(loop.backend_config, 'known_trip_count', 'n')
  if known is not None:
    return int(known)
  condition, body = loop.called
  start = _Reader(module, (), -1)
  for index, element in enumerate(loop.shape.elements):
    if element.dims or element.dtype not in _COUNTERS:
      continue
    counter, reader = start.value(loop.operands[0], index), _Reader(module, (body, condition), index)
    for trips in range(_MAX_TRIPS):
      reader.counter = counter
      if counter is None or (is_on := reader.value(condition.root)) is None:
        break
      if not is_on:
        return trips
      following = reader.value(body.root, index)
      if following == counter:
        break  # not the counter
      counter = following
  return None


class _Reader:
  """Computes integers of a program, given which element of a loop's state is the counter, and the counter's value."""

  def __init__(self, module: Module, loop: tuple[Computation, ...], index: int):
    self.counter: int | None = None
    self._module, self._loop, self._index = module, loop, index

  def value(self, instruction: Instruction, index: int | None = None, depth: int = 0) -> int | None:
    """Returns the integer that an instruction gives, or that at `index` of its tuple; None if the program hides it."""
    if depth > _MAX_DEPTH:
      return None
    match instruction.opcode:
      case 'constant':
        return _constant(instruction)
      case 'tuple' if index is not None:
        return self.value(instruction.operands[index], depth=depth + 1)
      case 'get-tuple-element' if index is None:
        return self.value(instruction.operands[0], instruction.index, depth + 1)
      case 'parameter':
        return self._argument(instruction, index, depth + 1)
      case 'while':
        is_kept = index is not None and _is_invariant(instruction.called[1], index)
        return self.value(instruction.operands[0], index, depth + 1) if is_kept else None
      case 'fusion' | 'call':
        return self.value(instruction.called[0].root, index, depth + 1)
      case opcode if opcode in _HANDED_ON:
        return self.value(instruction.operands[0], index, depth + 1)
    compute = _OPERATIONS.get(instruction.attribute('direction') or instruction.opcode)
    if compute is None:
      return None
    left, right = (self.value(operand, depth=depth + 1) for operand in instruction.operands)
    return None if left is None or right is None else int(compute(left, right))

  def _argument(self, parameter: Instruction, index: int | None, depth: int) -> int | None:
    """Returns a parameter's integer, or that at `index` of the tuple: the counter's, or what the caller hands over."""
    home = self._module.home[parameter]
    if home in self._loop and index == self._index:
      return self.counter
    caller = self._module.callers.get(home)
    if caller is not None and caller.opcode == 'while':
      return self.value(caller, index, depth)
    if caller is None or caller.opcode not in ('fusion', 'call'):
      return None
    return self.value(caller.operands[parameter.index], index, depth)


def _constant(instruction: Instruction) -> int | None:
  return int(instruction.literal) if re.fullmatch(r'-?\d+', instruction.literal) else None


def _is_invariant(body: Computation, index: int) -> bool:
  """Whether a loop's body hands on element `index` of its state as it is."""
  if body.root.opcode == 'parameter':
    return True
  if body.root.opcode != 'tuple':
    return False
  element = body.root.operands[index]
  while element.opcode in _COPIES:
    element = element.operands[0]
  is_element = element.opcode == 'get-tuple-element' and element.index == index
  return is_element and element.operands[0].opcode == 'parameter'
