"""The instructions and computations of a compiled program, and how one line of its text is read."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import re
from typing import Any

from spmd_tasks.planning._hlo_text import (
  NO_SHAPE,
  Shape,
  end_of_brackets,
  parse_attributes,
  parse_shape,
  quoted,
  split_top,
)

UNKNOWN_CYCLES = 2**63 - 1  # what the TPU compiler writes where it has no estimate

_NAME = re.compile(r'\s*(ROOT )?%?([^\s=]+) = ')
_OPCODE = re.compile(r'\s*([a-z][\w\-]*)\(')
_ARRAY_SHAPE = re.compile(r'[a-z][a-z0-9]*\[[^\]]*\](\{[^}]*\})?')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERAND = re.compile(r'%?([^\s%]+)\s*$')
_COMMENT = re.compile(r'/\*.*?\*/')
_CALLED_NAME = re.compile(r'%?([^\s,{}]+)')
CALLS = ('calls', 'to_apply', 'body', 'condition', 'branch_computations', 'true_computation', 'false_computation')


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One operation of a program.

  Attributes:
    name: its name, unique in its computation.
    shape: of its result.
    opcode: XLA's, such as 'fusion', 'dot', 'all-gather-start'; 'unknown' for a line that could not be read.
    operands: the names of the instructions that it takes.
    literal: what stands in the parentheses of a constant or a parameter.
    tail: the text of its attributes.
    is_root: whether its result is that of its computation.
  """

  name: str
  shape: Shape
  opcode: str
  operands: tuple[str, ...]
  literal: str
  tail: str
  is_root: bool

  @functools.cached_property
  def attributes(self) -> Mapping[str, str]:
    """Name -> text of every attribute."""
    return parse_attributes(self.tail)

  @functools.cached_property
  def op_name(self) -> str:
    """JAX's name of what the operation computes, such as 'jit(train_step)/transpose(jvp(ffn))/dot_general'; or ''."""
    return quoted(self.tail, 'op_name')

  @functools.cached_property
  def backend_config(self) -> Mapping[str, Any]:
    """The compiler's own notes on the operation; empty if there are none or they are not JSON."""
    try:
      config = json.loads(self.attributes.get('backend_config', '{}'))
    except json.JSONDecodeError:
      return {}
    return config if isinstance(config, dict) else {}

  @functools.cached_property
  def estimated_cycles(self) -> int | None:
    """The TPU compiler's estimate of the operation's cycles; None where there is none, UNKNOWN_CYCLES if so written."""
    found = _CYCLES.search(self.tail)
    return int(found[1]) if found else None

  @property
  def custom_call_target(self) -> str:
    """The kernel or library function that a custom call runs; or ''."""
    return quoted(self.tail, 'custom_call_target')

  @functools.cached_property
  def called(self) -> Mapping[str, tuple[str, ...]]:
    """Attribute -> names of the computations in it: 'body' and 'condition' of a while, 'calls' of a fusion, ..."""
    if not any(f'{name}=' in self.tail for name in CALLS):
      return {}
    found = {name: self.attributes.get(name, '') for name in CALLS}
    return {name: tuple(_CALLED_NAME.findall(text)) for name, text in found.items() if text}


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A list of instructions in the order in which they run."""

  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def by_name(self) -> Mapping[str, Instruction]:
    return {instruction.name: instruction for instruction in self.instructions}

  @functools.cached_property
  def users(self) -> Mapping[str, Sequence[Instruction]]:
    """Name -> the instructions that take its result."""
    found: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for name in dict.fromkeys(instruction.operands):
        found.setdefault(name, []).append(instruction)
    return found

  @functools.cached_property
  def root(self) -> Instruction:
    """The instruction with the computation's result; the last one where none is marked."""
    return next((each for each in self.instructions if each.is_root), self.instructions[-1])

  @functools.cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    """The parameters, by number."""
    found = [each for each in self.instructions if each.opcode == 'parameter']
    return tuple(sorted(found, key=lambda each: int(each.literal) if each.literal.isdigit() else 0))


@dataclasses.dataclass(frozen=True, eq=False)
class CallGraph:
  """The computations of a program by name, and which instruction runs which of them."""

  computations: Mapping[str, Computation]

  def called(self, instruction: Instruction, attribute: str = 'calls') -> Computation | None:
    """Returns the (first) computation that an attribute names; None if there is none."""
    names = instruction.called.get(attribute, ())
    return self.computations.get(names[0]) if names else None

  def inlined(self, instruction: Instruction) -> Computation | None:
    """Returns the computation whose root is the result of a fusion or a call."""
    return self.called(instruction) or self.called(instruction, 'to_apply')

  @functools.cached_property
  def callers(self) -> Mapping[str, tuple[Computation, Instruction]]:
    """Computation -> the computation and the instruction that run it; XLA gives nearly all of them one caller."""
    found: dict[str, tuple[Computation, Instruction]] = {}
    for computation in self.computations.values():
      for instruction in computation.instructions:
        for names in instruction.called.values():
          for name in names:
            found.setdefault(name, (computation, instruction))
    return found


def read_instruction(line: str) -> Instruction:
  """Reads one line of a computation; one that is no instruction gets the opcode `unknown`."""
  name = _NAME.match(line)
  if name:
    start = name.end()
    if line.startswith('(', start):
      end = end_of_brackets(line, start)
    else:
      array = _ARRAY_SHAPE.match(line, start)
      end = array.end() if array else start
    opcode = _OPCODE.match(line, end)
    if opcode and end > start:
      close = end_of_brackets(line, opcode.end() - 1)
      inside = line[opcode.end() : close - 1]
      holds_literal = opcode[1] in ('constant', 'parameter')
      return Instruction(
        name=name[2],
        shape=parse_shape(line[start:end]),
        opcode=opcode[1],
        operands=() if holds_literal else _operand_names(inside),
        literal=inside if holds_literal else '',
        tail=line[close:].lstrip(', '),
        is_root=bool(name[1]),
      )
  return Instruction(
    name=name[2] if name else '',
    shape=NO_SHAPE,
    opcode='unknown',
    operands=(),
    literal='',
    tail=line.strip(),
    is_root=bool(name and name[1]),
  )


def _operand_names(text: str) -> tuple[str, ...]:
  parts = split_top(_COMMENT.sub('', text)) if text else []
  return tuple(found[1] for part in parts if (found := _OPERAND.search(part)))
