"""Says what holds a device's memory when a compiled step needs the most of it.

    parts = memory_parts(compiled.memory_analysis(), read_program(compiled), model)
    parts.total, parts.activations, parts.largest[0]['op_name']

Arguments live all the time: the state and the batch, as the compiler stores them, tiles padded. Whatever else lives is
found from the schedule: which buffers hold a value that is still needed (lifetimes.py). The sum is compared with the
compiler's own figure, `compiler_bytes`. It counts what is live at the peak; `temp_size_in_bytes` of
`memory_analysis()` is larger on TPUs, because it counts gaps between buffers too.

What a buffer is for is read from JAX's names. An operation of the forward pass is called `jvp(...)`, one of the
backward pass `transpose(jvp(...))`.

    gradients      made by the backward pass and needed by the optimizer, in the shape of a weight or of its shard
    activations    made by the forward pass and needed by the backward pass
    temporaries    everything else: operands and results of the moment, gathered weights, buffers of collectives
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax

from spmd_tasks.planning.hlo import Instruction, Shape
from spmd_tasks.planning.lifetimes import Buffer, buffers_of
from spmd_tasks.planning.program import Program, loop_element_name, op_name_of
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.parameter_table import bytes_per_device

# JAX's name of an argument -> the part that it belongs to. Steps other than training have `variables` as their state.
_ARGUMENTS = (
  (re.compile(r"state\.weights|variables\['params'\]"), 'weights'),
  (re.compile(r'state\.learner'), 'optimizer'),
  (re.compile(r'state\.(step|rng|non_trainable)|variables\['), 'other_state'),
  (re.compile(r'batch\['), 'batch'),
)
_COPIES = frozenset(
  {'copy', 'copy-start', 'copy-done', 'bitcast', 'get-tuple-element', 'convert', 'transpose', 'reshape'}
)
# Arguments of the step (the optimizer's include a moving average of weights); the three of the module's docstring;
# results that do not take the place of a donated argument; a TPU's vector memory; the machine code.
PARTS = (
  *('weights', 'optimizer', 'other_state', 'batch', 'other_arguments', 'gradients', 'activations', 'temporaries'),
  *('outputs', 'on_chip', 'program'),
)
_MAX_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryParts:
  """Bytes of one device at the peak, by what they hold.

  Attributes:
    parts: name in PARTS -> bytes; together they are near `compiler_bytes`.
    padding: how much of the state is padding: true shapes to even shards, and shards to tiles. A part of the others.
    compiler_bytes: the compiler's figure for the sum.
    largest: the largest arrays, at most 20, as plan.json has them: `name` of the argument or of the instruction that
      makes it, `part`, `op_name` (JAX's, with the layer), `dtype`, `shape` and `bytes` of one device, tiles padded.
  """

  parts: Mapping[str, int]
  padding: int
  compiler_bytes: int
  largest: Sequence[dict[str, Any]]


def memory_parts(analysis: Any, program: Program, model: PartitionedModel) -> MemoryParts:
  """Finds what holds the memory at the peak.

  Args:
    analysis: `memory_analysis()` of the compiled step.
    program: the same step.
    model: the partitioned model whose step it is.
  """
  arguments = list(_arguments(program))
  live = [*arguments, *_live_at_peak(program, _weight_dims(model))]
  sums = dict.fromkeys(PARTS, 0)
  for each in live:
    sums[each['part']] += each['bytes']
  sums['program'] = analysis.generated_code_size_in_bytes
  return MemoryParts(
    parts=sums,
    padding=_padding(program, arguments, model),
    compiler_bytes=compiler_bytes(analysis),
    largest=sorted(live, key=lambda each: -each['bytes'])[:20],
  )


def compiler_bytes(analysis: Any) -> int:
  """Returns the compiler's figure for the peak, from `memory_analysis()`: arguments, what is live, and the program.

  The TPU compiler states it. The CPU and GPU compilers, which tell how they placed their buffers, place temporaries in
  one block of a size that is known.
  """
  code = analysis.generated_code_size_in_bytes
  has_peak = not analysis.serialized_buffer_assignment_proto and analysis.peak_memory_in_bytes
  # The TPU compiler's peak is that of the host's memory where more is kept there than on the device.
  if has_peak and not getattr(analysis, 'host_temp_size_in_bytes', 0):
    return analysis.peak_memory_in_bytes + code
  results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  return analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes + code


def _arguments(program: Program) -> Iterator[dict[str, Any]]:
  for parameter in program.module.entry.parameters:
    part = next((part for pattern, part in _ARGUMENTS if pattern.search(parameter.op_name)), 'other_arguments')
    for leaf in parameter.shape.leaves():
      yield _live(leaf, parameter.op_name or parameter.name, part, '')


def _live(shape: Shape, name: str, part: str, op_name: str) -> dict[str, Any]:
  figures = {'dtype': shape.dtype, 'shape': list(shape.dims), 'bytes': shape.stored_bytes}
  return {'name': name, 'part': part, 'op_name': op_name, **figures}


def _live_at_peak(program: Program, weight_dims: set[tuple[int, ...]]) -> list[dict[str, Any]]:
  buffers = buffers_of(program)
  changes: dict[int, int] = {}
  for each in buffers:
    changes[each.begin] = changes.get(each.begin, 0) + each.shape.stored_bytes
    changes[each.end + 1] = changes.get(each.end + 1, 0) - each.shape.stored_bytes
  live_bytes, peak, time_of_peak = 0, -1, 0
  for time in sorted(changes):
    live_bytes += changes[time]
    if live_bytes > peak:
      peak, time_of_peak = live_bytes, time
  live = [(each, _made_by(each)) for each in buffers if each.begin <= time_of_peak <= each.end]
  return [_live(each.shape, each.instruction.name, _part(each, made, weight_dims), made) for each, made in live]


def _part(buffer: Buffer, made: str, weight_dims: set[tuple[int, ...]]) -> str:
  if buffer.shape.memory_space:
    return 'on_chip'
  if buffer.last_user is None:
    return 'outputs'
  needed = op_name_of(buffer.computation, buffer.last_user)
  dims = tuple(size for size in buffer.shape.dims if size > 1)
  if 'transpose(' in made and 'jvp(' not in needed and dims in weight_dims:
    return 'gradients'
  if 'jvp(' in made and 'transpose(' not in made and 'transpose(' in needed:
    return 'activations'
  return 'temporaries'


def _made_by(buffer: Buffer) -> str:
  """JAX's name of what makes a buffer; of a copy, what it copies; of a loop's state, what the loop writes there."""
  source, element = buffer.instruction, 0
  for _ in range(_MAX_STEPS):
    if 'jvp(' in source.op_name or source.opcode not in _COPIES:
      break
    element = source.proto.tuple_index if source.opcode == 'get-tuple-element' else element
    source = source.operands[0]
  if source.opcode == 'while':
    return loop_element_name(source, element) or op_name_of(buffer.computation, source)
  if '/closed_call/' not in source.op_name:
    loop = _loop_of(buffer)
    name = loop_element_name(*loop) if loop else ''
    if 'jvp(' in name:
      return name
  return op_name_of(buffer.computation, buffer.instruction)


def _loop_of(buffer: Buffer) -> tuple[Instruction, int] | None:
  """Returns the loop whose first state holds a buffer, and the number of the element."""
  users = buffer.computation.users
  copies = [buffer.instruction]
  for copy in copies:
    for user in users.get(copy, ()):
      if user.opcode in _COPIES and user.opcode != 'get-tuple-element' and len(copies) < _MAX_STEPS:
        copies.append(user)
      if user.opcode == 'tuple':
        loop = next((each for each in users.get(user, ()) if each.opcode == 'while'), None)
        if loop is not None:
          return loop, user.operands.index(copy)
  return None


def _weight_dims(model: PartitionedModel) -> set[tuple[int, ...]]:
  """Returns the dims that a gradient can have: each weight's, true, padded, of one shard; with and without layers."""
  found: set[tuple[int, ...]] = set()
  for true, padded in zip(
    jax.tree.leaves(model.abstract_state.weights), jax.tree.leaves(model.padded_state.weights), strict=True
  ):
    for shape in (true.shape, padded.shape, padded.sharding.shard_shape(padded.shape)):
      for dims in (shape, shape[1:]):
        found.add(tuple(size for size in dims if size > 1))
  return found


def _padding(program: Program, arguments: Sequence[dict[str, Any]], model: PartitionedModel) -> int:
  """Returns the bytes of the state that hold no value: of even shards, and of tiles."""
  tiles = sum(
    leaf.stored_bytes - leaf.num_bytes
    for parameter, argument in zip(program.module.entry.parameters, arguments)
    if argument['part'] in ('weights', 'optimizer', 'other_state')
    for leaf in parameter.shape.leaves()
  )
  has_optimizer = any(each['part'] == 'optimizer' for each in arguments)
  true, padded = (
    (model.abstract_state, model.padded_state)
    if has_optimizer
    else (model.abstract_state.variables, model.padded_state.variables)
  )
  uneven = sum(
    bytes_per_device(stored) * (1 - math.prod(leaf.shape) / math.prod(stored.shape))
    for leaf, stored in zip(jax.tree.leaves(true), jax.tree.leaves(padded), strict=True)
    if leaf.shape != stored.shape
  )
  return tiles + round(uneven)
