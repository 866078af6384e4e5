"""Reads the text that XLA writes of a compiled program, as typed operations in the order of their schedule.

    module = read_module(compiled.as_text())
    module.entry.instructions[0].shape.num_bytes

The compilers of all devices write the same text. An instruction is a line `%name = shape opcode(operands), attributes`,
in which a note of a kernel may have line breaks.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import re
from typing import Any

_VIEWS = frozenset({'bitcast', 'optimization-barrier', 'opt-barrier', 'async-update'})
_MAX_DEPTH = 400
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{')
_INSTRUCTION = re.compile(r' +(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, ([a-z_-]+=.*))?$', re.DOTALL)
_END = re.compile(r'\}(, execution_thread="[^"]*")?')
_NAME = re.compile(r'%([\w.-]+)(?:#(\d+))?')
_CALLED = re.compile(
  r'\b(?:calls|to_apply|condition|body|branch_computations|called_computations|\w+_computation)=(\{[^}]*\}|%[\w.-]+)'
)
_ARRAY = re.compile(r'([a-z]\w*)\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a value: an array, or a tuple of shapes.

  Attributes:
    dtype: XLA's name, such as 'f32'; 'tuple' for a tuple, 'token' for what has no bytes.
    dims: the sizes of an array's dims.
    elements: the shapes in a tuple.
  """

  dtype: str
  dims: tuple[int, ...] = ()
  elements: tuple['Shape', ...] = ()

  def leaves(self) -> Iterator['Shape']:
    """Yields the arrays in the shape, from left to right."""
    if self.dtype != 'tuple':
      yield self
    for element in self.elements:
      yield from element.leaves()

  @property
  def num_bytes(self) -> int:
    """The bytes of the values, without the padding of tiles; the sum over a tuple's arrays."""
    return sum((math.prod(leaf.dims) * _bits(leaf.dtype) + 7) // 8 for leaf in self.leaves())


def _bits(dtype: str) -> int:
  """Returns the bits of one element: the first number in the dtype's name."""
  digits = re.search(r'\d+', dtype)
  return 8 if dtype == 'pred' else int(digits[0]) if digits else 0


def read_shape(text: str) -> Shape:
  """Reads a shape such as `(f32[8,128]{1,0:T(8,128)}, s32[])`."""
  text = re.sub(r'/\*.*?\*/|\{[^}]*\}| ', '', text)
  if array := _ARRAY.fullmatch(text):
    return Shape(array[1], tuple(int(size.lstrip('<=')) for size in array[2].split(',') if size))
  if not text.startswith('('):
    return Shape(text)
  return Shape('tuple', elements=tuple(read_shape(element) for element in _elements(text)))


def _elements(text: str) -> list[str]:
  """Splits the text of a tuple's shape into its elements'."""
  elements, depth, start = [], 0, 1
  for i, character in enumerate(text):
    depth += (character in '([{') - (character in ')]}')
    if i + 1 == len(text) or (character == ',' and depth == 1):
      elements.append(text[start:i])
      start = i + 1
  return [element for element in elements if element.strip()]


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One operation of a program.

  Attributes:
    name: unique in its computation.
    opcode: XLA's, such as 'fusion', 'dot', 'all-gather-start'.
    shape_text: of its result, as written.
    operands: the instructions whose results it takes.
    literal: what stands for the operands of a constant, or of a parameter: its number.
    called: the computations that it runs or applies: a loop's condition and body, what a fusion fuses, ...
    attributes: the rest of the line.
  """

  name: str
  opcode: str
  shape_text: str
  operands: tuple['Instruction', ...]
  literal: str
  called: tuple['Computation', ...]
  attributes: str

  @functools.cached_property
  def shape(self) -> Shape:
    return read_shape(self.shape_text)

  @functools.cached_property
  def op_name(self) -> str:
    """JAX's name of what the operation computes, such as 'jit(train_step)/transpose(jvp(ffn))/dot_general'; or ''."""
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
    return re.sub(r'\\(.)', r'\1', name[1]) if name else ''

  def attribute(self, name: str) -> str:
    """Returns an attribute or a note of the compiler without a space or comma in it; '' if there is none."""
    value = re.search(rf'\b{name}="?([^\s,"}}]*)', self.attributes)
    return value[1] if value else ''

  @property
  def index(self) -> int:
    """Which element of a tuple a `get-tuple-element` takes, or which number a parameter has."""
    return int(self.literal if self.opcode == 'parameter' else self.attribute('index'))

  @property
  def fused(self) -> 'Computation | None':
    """What a fusion fuses; None for all others."""
    return self.called[0] if self.opcode == 'fusion' else None

  @functools.cached_property
  def backend_config(self) -> Mapping[str, Any]:
    """The compiler's own notes on the operation; empty if there are none or they are not JSON."""
    _, name, text = self.attributes.partition('backend_config=')
    try:
      config = json.JSONDecoder().raw_decode(text)[0] if name else {}
    except ValueError:
      return {}
    return config if isinstance(config, dict) else {}


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A list of instructions in the order in which they run, and the one whose result is the computation's."""

  name: str
  instructions: tuple[Instruction, ...]
  root: Instruction

  @functools.cached_property
  def targets(self) -> frozenset[str]:
    """The kernels and library functions that its custom calls run."""
    calls = (each for each in self.instructions if each.opcode == 'custom-call')
    return frozenset(each.attribute('custom_call_target') for each in calls)

  @functools.cached_property
  def users(self) -> Mapping[Instruction, Sequence[Instruction]]:
    """Instruction -> those that take its result."""
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in self.instructions:
      for operand in dict.fromkeys(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A program: its computations, those that are called before their callers, and the one where it starts."""

  computations: tuple[Computation, ...]
  entry: Computation

  @functools.cached_property
  def home(self) -> Mapping[Instruction, Computation]:
    """Instruction -> the computation that it is in."""
    return {each: computation for computation in self.computations for each in computation.instructions}

  @functools.cached_property
  def callers(self) -> Mapping[Computation, Instruction]:
    """Computation -> the instruction that runs it; XLA gives nearly all of them one caller."""
    callers: dict[Computation, Instruction] = {}
    for instruction in self.home:
      for called in instruction.called:
        callers.setdefault(called, instruction)
    return callers


def nested(config: Any, *names: str) -> Any:
  """Returns what is found in dictionaries of dictionaries by these names; None if there is nothing."""
  for name in names:
    config = config.get(name) if isinstance(config, Mapping) else None
  return config


def origin_of(instruction: Instruction, path: tuple[int, ...] = ()) -> tuple[Instruction, tuple[int, ...]]:
  """Returns the instruction, and the array in its result, where a value is made: through tuples and views."""
  for _ in range(_MAX_DEPTH):
    if instruction.opcode == 'tuple' and path and path[0] < len(instruction.operands):
      instruction, path = instruction.operands[path[0]], path[1:]
    elif instruction.opcode == 'get-tuple-element':
      instruction, path = instruction.operands[0], (instruction.index, *path)
    elif instruction.opcode in _VIEWS and instruction.operands:
      instruction = instruction.operands[0]
    else:
      break
  return instruction, path


def read_module(text: str) -> Module:
  """Reads `compiled.as_text()`."""
  computations: dict[str, Computation] = {}
  entry, name = None, ''
  lines: list[str] = []
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      name, lines = header[2], []
      entry = name if header[1] else entry
    elif _END.fullmatch(line) and name:
      computations[name] = _read_computation(name, lines, computations)
      name = ''
    elif line.startswith('  ') and re.match(r' +(ROOT )?%?[\w.-]+ = ', line):
      lines.append(line)
    elif name and lines:
      lines[-1] += '\n' + line
  return Module(tuple(computations.values()), computations[entry or name])


def _read_computation(name: str, lines: Sequence[str], computations: Mapping[str, Computation]) -> Computation:
  instructions: dict[str, Instruction] = {}

  def operand(name: str, index: str) -> Instruction:
    """Returns an operand `%name`, or the element of a tuple `%name#index`, as jax 0.12 writes it."""
    if not index:
      return instructions[name]
    source, key = instructions[name], f'{name}#{index}'
    if key not in instructions:
      instructions[key] = Instruction(
        name=key,
        opcode='get-tuple-element',
        shape_text=_elements(source.shape_text)[int(index)],
        operands=(source,),
        literal='',
        called=(),
        attributes=f'index={index}',
      )
    return instructions[key]

  root = None
  for line in lines:  # after its operands, and after the computations that it calls
    match = _INSTRUCTION.match(line)
    assert match is not None, line
    operands, attributes = match[5], match[6] or ''
    called = [called for text in _CALLED.findall(attributes) for called, _ in _NAME.findall(text)]
    operands_of = tuple(operand(*each) for each in _NAME.findall(operands))
    instructions[match[2]] = instruction = Instruction(
      name=match[2],
      opcode=match[4],
      shape_text=match[3],
      operands=operands_of,
      literal=operands,
      called=tuple(computations[each] for each in called),
      attributes=attributes,
    )
    root = instruction if match[1] else root
  assert root is not None, name
  return Computation(name, tuple(instructions.values()), root)
