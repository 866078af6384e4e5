"""Says what holds a device's memory when a compiled step needs the most of it.

    memory_parts(compiled.memory_analysis(), read_program(compiled), model)['memory']['activations']

Arguments live all the time: the state and the batch, as the compiler stores them, tiles padded. Whatever else lives is
found from the schedule: which buffers hold a value that is still needed. The sum is compared with the compiler's own
figure, `peak_bytes`. It counts what is live at the peak; `temp_size_in_bytes` of
`memory_analysis()` is larger on TPUs, because it counts gaps between buffers too.

What a buffer is for is read from JAX's names. An operation of the forward pass is called `jvp(...)`, one of the
backward pass `transpose(jvp(...))`.

    gradients      made by the backward pass and needed by the optimizer, in the shape of a weight or of its shard
    activations    made by the forward pass and needed by the backward pass
    temporaries    everything else: operands and results of the moment, gathered weights, buffers of collectives

Time is the position in the schedule, with the body of a loop once, in the loop's place. An instruction allocates its
result, unless the result is a view of something (a tuple, a bitcast, the end of an asynchronous pair) or is written in
place: into the operand of an update, into the state of the loop around it, or into a donated argument.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax

from spmd_tasks.planning.hlo import HOST_MEMORY, VIEWS, Computation, Instruction, Shape, origin_of
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
_NOT_ALLOCATING = VIEWS | {'parameter', 'tuple', 'get-tuple-element', 'constant', 'while', 'call', 'after-all', 'send'}
# Which element of a start's tuple is new memory; the others are its operands.
_NEW_ELEMENT = {
  'copy-start': 0, 'recv': 0, 'all-gather-start': 1, 'collective-permute-start': 1, 'async-start': 1,
}  # fmt: skip
_MAX_DEPTH = 400

Path = tuple[int, ...]
_MAX_STEPS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
  """Memory of the array at `path` of an instruction's result, which is needed from `begin` to `end` in the schedule.

  `last_user` is the instruction that needs it last; None if it is a result of the program.
  """

  computation: Computation
  instruction: Instruction
  path: Path
  shape: Shape
  begin: int
  end: int
  last_user: Instruction | None


def memory_parts(analysis: Any, program: Program, model: PartitionedModel) -> dict[str, Any]:
  """Finds what holds the memory at the peak.

  Args:
    analysis: `memory_analysis()` of the compiled step.
    program: the same step.
    model: the partitioned model whose step it is.

  Returns:
    what plan.json has of one device's memory.
    memory: name in PARTS -> bytes; together they are near `peak_bytes`, the compiler's own figure.
    padding_bytes: how much of the state is padding: true shapes to even shards, and shards to tiles.
    largest: the 20 largest arrays, with the bytes of one device, tiles padded.
  """
  arguments = list(_arguments(program))
  live = [*arguments, *_live_at_peak(program, _weight_dims(model))]
  sums = dict.fromkeys(PARTS, 0)
  for each in live:
    sums[each['part']] += each['bytes']
  sums['program'] = analysis.generated_code_size_in_bytes
  return {
    'peak_bytes': compiler_bytes(analysis),
    'memory': sums,
    'padding_bytes': _padding(program, arguments, model),
    'largest': sorted(live, key=lambda each: -each['bytes'])[:20],
  }


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
  buffers = list(_Lifetimes(program).buffers())
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
  true: Any = model.abstract_state
  padded: Any = model.padded_state
  if not any(each['part'] == 'optimizer' for each in arguments):
    true, padded = true.variables, padded.variables
  uneven = sum(
    bytes_per_device(stored) * (1 - math.prod(leaf.shape) / math.prod(stored.shape))
    for leaf, stored in zip(jax.tree.leaves(true), jax.tree.leaves(padded), strict=True)
    if leaf.shape != stored.shape
  )
  return tiles + round(uneven)


class _Use(NamedTuple):
  time: int
  user: Instruction | None


class _Lifetimes:
  """Finds the buffers that a program allocates on the device, arguments apart, with their lifetimes."""

  def __init__(self, program: Program):
    self._program = program
    self._times: dict[Instruction, tuple[int, int]] = {}
    self._spans: dict[Computation, tuple[int, int]] = {}
    self._uses: dict[tuple[Instruction, Path], _Use] = {}
    self._aliases = functools.cache(_aliases)
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
      elif opcode in VIEWS or opcode == 'while':
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
