"""Reads XLA's HloModuleProto, which every compiler of JAX gives of the program that it made, as typed operations.

    module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    module.entry.instructions[0].shape.stored_bytes

The fields that it reads are declared in hlo_schema.py.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import re
from typing import Any

from spmd_tasks.planning.hlo_schema import DTYPES, schema

HOST_MEMORY = 5  # a layout's memory space; 0 is the device's main memory (HBM), 1 a TPU's vector memory
VIEWS = frozenset({'bitcast', 'optimization-barrier', 'opt-barrier', 'async-update'})
_MAX_DEPTH = 400


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a value: an array, or a tuple of shapes.

  Attributes:
    dtype: XLA's name, such as 'f32'; 'tuple' for a tuple, 'token' or 'opaque_type' for what has no bytes.
    dims: the sizes of an array's dims.
    minor_to_major: the dims as they lie in memory, the fastest first.
    tile: sizes to which the last dims in memory are padded, such as (8, 128) on a TPU.
    memory_space: the number of the memory that holds the array.
    elements: the shapes in a tuple.
  """

  dtype: str
  dims: tuple[int, ...] = ()
  minor_to_major: tuple[int, ...] = ()
  tile: tuple[int, ...] = ()
  memory_space: int = 0
  elements: tuple['Shape', ...] = ()

  def leaves(self) -> Iterator['Shape']:
    """Yields the arrays in the shape, from left to right."""
    return (shape for _, shape in self.paths())

  def paths(self, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], 'Shape']]:
    """Yields the arrays in the shape, each with the numbers that lead to it."""
    if self.dtype != 'tuple':
      yield path, self
    for index, element in enumerate(self.elements):
      yield from element.paths((*path, index))

  @property
  def size(self) -> int:
    """The number of elements of an array."""
    return math.prod(self.dims)

  @property
  def bits(self) -> int:
    """The bits of one element: the first number in the dtype's name."""
    digits = re.search(r'\d+', self.dtype)
    return 8 if self.dtype == 'pred' else int(digits[0]) if digits else 0

  @property
  def num_bytes(self) -> int:
    """The bytes of the values, without the padding of tiles; of a tuple, those of all its arrays."""
    return sum((leaf.size * leaf.bits + 7) // 8 for leaf in self.leaves())

  @functools.cached_property
  def stored_bytes(self) -> int:
    """The bytes in memory, with every array padded to its tiles."""
    return sum((math.prod(leaf.tiled_dims) * leaf.bits + 7) // 8 for leaf in self.leaves())

  @property
  def tiled_dims(self) -> tuple[int, ...]:
    """An array's dims, rounded up to its tile."""
    dims = list(self.dims)
    if len(self.minor_to_major) == len(dims):
      for dim, size in zip(self.minor_to_major, reversed(self.tile)):
        dims[dim] = -(-dims[dim] // max(1, size)) * max(1, size)
    return tuple(dims)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One operation of a program.

  Attributes:
    name: unique in its computation.
    opcode: XLA's, such as 'fusion', 'dot', 'all-gather-start'.
    shape: of its result.
    operands: the instructions whose results it takes.
    called: the computations that it runs or applies: a loop's body and condition, what a fusion fuses, ...
    proto: the HloInstructionProto, for what only some opcodes have.
  """

  name: str
  opcode: str
  shape: Shape
  operands: tuple['Instruction', ...]
  called: tuple['Computation', ...]
  proto: Any

  @property
  def op_name(self) -> str:
    """JAX's name of what the operation computes, such as 'jit(train_step)/transpose(jvp(ffn))/dot_general'; or ''."""
    return self.proto.metadata.op_name

  @property
  def target(self) -> str:
    """The kernel or library function that a custom call runs; or ''."""
    return self.proto.custom_call_target

  @property
  def fused(self) -> 'Computation | None':
    """What a fusion fuses; None for all others."""
    return self.called[0] if self.opcode == 'fusion' else None

  @functools.cached_property
  def backend_config(self) -> Mapping[str, Any]:
    """The compiler's own notes on the operation; empty if there are none or they are not JSON."""
    try:
      config = json.loads(self.proto.backend_config or b'{}')
    except ValueError:
      return {}
    return config if isinstance(config, dict) else {}

  def note(self, name: str) -> str:
    """Returns a note that a part of the compiler left for another one (a frontend attribute); '' if there is none."""
    return self.proto.frontend_attributes.map.get(name, '')


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A list of instructions in the order in which they run, and the one whose result is the computation's."""

  name: str
  instructions: tuple[Instruction, ...]
  root: Instruction

  @functools.cached_property
  def place(self) -> Mapping[Instruction, int]:
    """Instruction -> its index."""
    return {instruction: index for index, instruction in enumerate(self.instructions)}

  @functools.cached_property
  def users(self) -> Mapping[Instruction, Sequence[Instruction]]:
    """Instruction -> those that take its result."""
    found: dict[Instruction, list[Instruction]] = {}
    for instruction in self.instructions:
      for operand in dict.fromkeys(instruction.operands):
        found.setdefault(operand, []).append(instruction)
    return found

  @functools.cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    """The parameters, by number."""
    found = [each for each in self.instructions if each.opcode == 'parameter']
    return tuple(sorted(found, key=lambda each: each.proto.parameter_number))


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A program: its computations, those that are called before their callers, and the one where it starts.

  `donated` are the results that are written into an argument's memory, each as the numbers that lead to it.
  """

  computations: tuple[Computation, ...]
  entry: Computation
  donated: frozenset[tuple[int, ...]]

  @functools.cached_property
  def home(self) -> Mapping[Instruction, Computation]:
    """Instruction -> the computation where it stands."""
    return {each: computation for computation in self.computations for each in computation.instructions}

  @functools.cached_property
  def callers(self) -> Mapping[Computation, Instruction]:
    """Computation -> the instruction that runs it; XLA gives nearly all of them one caller."""
    found: dict[Computation, Instruction] = {}
    for instruction in self.home:
      for called in instruction.called:
        found.setdefault(called, instruction)
    return found


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
      instruction, path = instruction.operands[0], (instruction.proto.tuple_index, *path)
    elif instruction.opcode in VIEWS and instruction.operands:
      instruction = instruction.operands[0]
    else:
      break
  return instruction, path


def read_module(serialized: bytes) -> Module:
  """Reads a serialized HloModuleProto."""
  proto = schema()['HloModuleProto'].FromString(serialized)
  computations: dict[int, Computation] = {}
  for each in proto.computations:  # after those that it calls, and an instruction after its operands
    found: dict[int, Instruction] = {}
    for written in each.instructions:
      found[written.id] = Instruction(
        name=written.name,
        opcode=written.opcode,
        shape=_shape(written.shape),
        operands=tuple(found[operand] for operand in written.operand_ids),
        called=tuple(computations[called] for called in written.called_computation_ids),
        proto=written,
      )
    order = proto.schedule.sequences[each.id].instruction_ids if each.id in proto.schedule.sequences else found
    computations[each.id] = Computation(each.name, tuple(found[key] for key in order), found[each.root_id])
  donated = frozenset(tuple(entry.output_shape_index) for entry in proto.input_output_alias.entries)
  return Module(tuple(computations.values()), computations[proto.entry_computation_id], donated)


def _shape(proto: Any) -> Shape:
  return Shape(
    dtype=DTYPES.get(proto.element_type, 'opaque_type'),
    dims=tuple(proto.dimensions),
    minor_to_major=tuple(proto.layout.minor_to_major),
    tile=tuple(proto.layout.tiles[0].dimensions) if proto.layout.tiles else (),
    memory_space=proto.layout.memory_space,
    elements=tuple(_shape(element) for element in proto.tuple_shapes),
  )
