"""Says what holds a device's memory when a compiled step needs the most of it, by the compiler's own buffers.

    with tempfile.TemporaryDirectory() as folder:
      compiled = lowered.compile(compiler_options={'xla_dump_to': folder})
      buffers, program = read_dump(folder, platform)
    memory_parts(buffers, program, model)['memory']['activations']

Every compiler of XLA writes two tables into the folder. `buffer-assignment.txt` has the allocations: one for each
argument and result, and one for all temporaries, with the place of each value in it. `live-range.txt` has the schedule,
and when in it each value is made and last needed. So the memory at any time is the union of the places of the values
that live then. What the allocation has beside that, when it is fullest, are gaps. All allocations together are what the
step takes, and what the compiler of TPUs compares with the memory that there is.

What a value is for is read from JAX's names. An operation of the forward pass is called `jvp(...)`, one of the backward
pass `transpose(jvp(...))`.

    gradients      made by the backward pass and needed by the optimizer, in the shape of a weight or of its shard
    activations    made by the forward pass and needed by the backward pass
    temporaries    everything else: operands and results of the moment, gathered weights, buffers of collectives
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import re
from typing import Any

import jax

from spmd_tasks.planning.hlo import Computation, Instruction, origin_of, read_module, read_shape
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
_STATE = ('weights', 'optimizer', 'other_state')
# Arguments of the step (the optimizer's include a moving average of weights); the three of the module's docstring;
# results that do not take the place of a donated argument, and constants; what no value holds; the machine code.
PARTS = (
  *(*_STATE, 'batch', 'other_arguments', 'gradients', 'activations', 'temporaries'),
  *('outputs', 'constants', 'gaps', 'program'),
)
_COPIES = frozenset(
  {'copy', 'copy-start', 'copy-done', 'bitcast', 'get-tuple-element', 'convert', 'transpose', 'reshape'}
)
_COLLECTIVE = re.compile(r'(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)')
_MAX_STEPS = 8
_LEAST_SHARE = 0.001  # of the peak: smaller arrays have no row of their own

_ALLOCATION = re.compile(r'allocation \d+: size (\d+)(.*):$')
_VALUE = re.compile(r' value: <\d+ ([\w.-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$')
_RANGE = re.compile(r'    ([\w.-]+)\{([\d,]*)\}:(\d+)-(\d+)$')
_SCHEDULED = re.compile(r'    (\d+):([\w.-]+)$')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """Memory of one value.

  Attributes:
    name, index: the instruction that makes the value, and which array of its result it is.
    shape: as XLA writes it.
    offset, num_bytes: its place in its allocation, tiles padded.
    begin, end: when in the schedule it is made and last needed; 0 for what lives all the time.
  """

  name: str
  index: tuple[int, ...]
  shape: str
  offset: int
  num_bytes: int
  begin: int = 0
  end: int = 0

  @property
  def padding_bytes(self) -> int:
    """How much of it tiles pad."""
    return max(0, self.num_bytes - read_shape(self.shape).num_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """What a compiled program has in the memories of one device.

  Attributes:
    arguments: by number.
    results: those that do not take the place of an argument, and constants, by part.
    temporaries: the values that live when these need the most memory, with the bytes that no other one of them covers.
    temp_bytes: the allocation of all temporaries.
    on_chip_bytes, host_bytes: in the memories of the chip and of the host.
    schedule: the names of the instructions in the order in which they run.
  """

  arguments: Mapping[int, Buffer]
  results: Mapping[str, int]
  temporaries: Sequence[tuple[Buffer, int]]
  temp_bytes: int
  on_chip_bytes: int
  host_bytes: int
  schedule: Sequence[str]

  @property
  def hbm_bytes(self) -> int:
    """All of the device's main memory that the program takes."""
    arguments = sum(buffer.num_bytes for buffer in self.arguments.values())
    return arguments + sum(self.results.values()) + self.temp_bytes


def read_dump(folder: str | Path, platform: str) -> tuple[Buffers, Program]:
  """Reads what the compiler of 'tpu', 'gpu' or 'cpu' has written of a program, also of one that does not fit.

  Raises:
    FileNotFoundError: there are no buffers in the folder.
  """
  folder, suffix = Path(folder), '-buffer-assignment.txt'
  found = sorted(folder.glob(f'*{suffix}'), key=lambda path: path.stat().st_size)
  if not found:
    raise FileNotFoundError(f'XLA has written no *{suffix} to {folder}.')
  stem = found[-1].name.removesuffix(suffix)
  assigned, ranges, text = (
    (folder / f'{stem}{name}.txt').read_text() for name in ('-buffer-assignment', '-live-range', '')
  )
  return read_buffers(assigned, ranges, platform), Program(read_module(text))


def read_buffers(assigned: str, ranges: str, platform: str) -> Buffers:
  """Reads the compiler's two tables, see the module's docstring."""
  live: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
  schedule: list[str] = []
  for line in ranges.partition('Live ranges at')[0].splitlines():
    if match := _RANGE.match(line):
      live[match[1], _numbers(match[2])] = int(match[3]), int(match[4])
    elif match := _SCHEDULED.match(line):
      schedule.append(match[2])
  arguments: dict[int, Buffer] = {}
  results = {'outputs': 0, 'constants': 0}
  temporaries: list[tuple[Buffer, int]] = []
  sums = {'hbm': 0, 'chip': 0, 'host': 0}
  for num_bytes, kind, buffers in _allocations(assigned):
    color = re.search(r'color (\d+)', kind)
    memory = _memory(int(color[1]) if color else 0, platform)
    parameter = re.search(r'parameter (\d+)', kind)
    if 'thread-local' in kind:  # inside of a fusion
      continue
    if memory != 'hbm':
      sums[memory] += num_bytes
    elif parameter:
      values = (buffer for buffer in buffers if buffer.num_bytes == num_bytes)
      first = next(values, Buffer(name='', index=(), shape='', offset=0, num_bytes=num_bytes))
      arguments[int(parameter[1])] = first
    elif 'constant' in kind or 'temp' not in kind:
      results['constants' if 'constant' in kind else 'outputs'] += num_bytes
    else:
      sums['hbm'] += num_bytes
      alive = (
        dataclasses.replace(buffer, begin=span[0], end=span[1])
        for buffer in buffers
        if (span := live.get((buffer.name, buffer.index)))
      )
      temporaries += _fullest(list(alive))
  return Buffers(
    arguments=arguments,
    results=results,
    temporaries=temporaries,
    temp_bytes=sums['hbm'],
    on_chip_bytes=sums['chip'],
    host_bytes=sums['host'],
    schedule=schedule,
  )


def _memory(color: int, platform: str) -> str:
  """Returns which memory a number means: 5 is the host's everywhere, 1 a TPU's VMEM and a GPU's for collectives."""
  if color == 0 or platform != 'tpu':
    return 'host' if color == 5 else 'hbm'
  return 'host' if color in (4, 5) else 'chip'


def _allocations(text: str) -> Iterator[tuple[int, str, list[Buffer]]]:
  """Yields bytes, kind and values of each allocation."""
  num_bytes, kind, buffers = 0, '', list[Buffer]()
  for line in text.splitlines():
    if match := _ALLOCATION.match(line):
      if kind:
        yield num_bytes, kind, buffers
      num_bytes, kind, buffers = int(match[1]), match[2], []
    elif match := _VALUE.match(line):
      place = {'num_bytes': int(match[3]), 'offset': int(match[4])}
      buffers.append(Buffer(name=match[1], index=_numbers(match[2] or ''), shape=match[5], **place))
  if kind:
    yield num_bytes, kind, buffers


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(',') if number)


def _fullest(buffers: Sequence[Buffer]) -> list[tuple[Buffer, int]]:
  """Returns the buffers that live when they cover the most memory, each with the bytes that it adds to the others."""
  changes: dict[int, list[Buffer]] = {}
  for buffer in buffers:
    changes.setdefault(buffer.begin, []).append(buffer)
  best, most = list[tuple[Buffer, int]](), -1
  alive: list[Buffer] = []
  for time in sorted(changes):
    alive = [buffer for buffer in alive if buffer.end >= time] + changes[time]
    if sum(buffer.num_bytes for buffer in alive) > most:  # at most, as several values can share a place
      covered = _cover(alive)
      if (total := sum(num_bytes for _, num_bytes in covered)) > most:
        best, most = covered, total
  return best


def _cover(buffers: Iterable[Buffer]) -> list[tuple[Buffer, int]]:
  """Gives each byte to one of the buffers that share it: to the one that lives longest of those at the same place."""
  covered, end = [], 0
  for buffer in sorted(buffers, key=lambda each: (each.offset, -each.num_bytes, each.begin - each.end)):
    added = buffer.offset + buffer.num_bytes - max(end, buffer.offset)
    if added > 0:
      covered.append((buffer, added))
      end = buffer.offset + buffer.num_bytes
  return covered


def memory_parts(buffers: Buffers, program: Program, model: PartitionedModel, program_bytes: int = 0) -> dict[str, Any]:
  """Finds what holds the memory at the peak.

  Args:
    buffers: of the compiled step.
    program: the same step.
    model: the partitioned model whose step it is.
    program_bytes: of machine code.

  Returns:
    what plan.json has of one device's memory.
    memory: name in PARTS -> bytes; they add up to `peak_bytes`.
    largest: the arrays, but for small ones, the largest first.
    padding_bytes: how much of the state is padding: true shapes to even shards, and shards to tiles.
  """
  rows = [*_argument_rows(buffers, program), *_temporary_rows(buffers, program, model)]
  sums = dict.fromkeys(PARTS, 0) | dict(buffers.results)
  for row in rows:
    sums[row['part']] += row['bytes']
  sums['program'] = program_bytes
  sums['gaps'] = buffers.temp_bytes - sum(num_bytes for _, num_bytes in buffers.temporaries)
  peak = buffers.hbm_bytes + program_bytes
  largest = sorted((row for row in rows if row['bytes'] >= _LEAST_SHARE * peak), key=lambda row: -row['bytes'])
  return {
    'peak_bytes': peak,
    'argument_bytes': sum(buffer.num_bytes for buffer in buffers.arguments.values()),
    'temp_bytes': buffers.temp_bytes,
    'on_chip_bytes': buffers.on_chip_bytes,
    'host_bytes': buffers.host_bytes,
    'memory': sums,
    'padding_bytes': sum(row['padding_bytes'] for row in rows if row['part'] in _STATE)
    + _uneven_bytes(model, has_optimizer=bool(sums['optimizer'])),
    'largest': largest,
  }


def compiler_bytes(analysis: Any) -> int:
  """Returns the compiler's figure for the peak, from `memory_analysis()`: arguments, what is live, and the program.

  The TPU compiler states it. The CPU and GPU compilers, which tell how they placed their buffers, place temporaries in
  one block of a size that is known.
  """
  code = analysis.generated_code_size_in_bytes
  has_peak = not analysis.serialized_buffer_assignment_proto and analysis.peak_memory_in_bytes
  # The TPU compiler's peak is the host's memory if more is kept there than on the device.
  if has_peak and not getattr(analysis, 'host_temp_size_in_bytes', 0):
    return analysis.peak_memory_in_bytes + code
  results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  return analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes + code


def _row(part: str, buffer: Buffer, num_bytes: int, *, name: str, op_name: str = '', why: str = '') -> dict[str, Any]:
  array, padding = read_shape(buffer.shape), buffer.padding_bytes if num_bytes == buffer.num_bytes else 0
  if padding > 0.01 * num_bytes and (tile := re.search(r':T\(([\d,]+)\)', buffer.shape)):
    pads = f'{padding / num_bytes:.0%} pads it to tiles of {tile[1].replace(",", " x ")}'
    why = f'{why}; {pads}' if why else pads
  figures = {'dtype': array.dtype, 'shape': list(array.dims), 'bytes': num_bytes, 'padding_bytes': padding}
  return {'name': name, 'part': part, 'op_name': op_name, 'why': why, **figures}


def _argument_rows(buffers: Buffers, program: Program) -> Iterator[dict[str, Any]]:
  parameters = (each for each in program.module.entry.instructions if each.opcode == 'parameter')
  names = {each.index: each.op_name or each.name for each in parameters}
  for number, buffer in buffers.arguments.items():
    op_name = names.get(number, buffer.name)
    part = next((part for pattern, part in _ARGUMENTS if pattern.search(op_name)), 'other_arguments')
    path = re.sub(r"\['([^']*)'\]", r'/\1', op_name)  # padded_state.weights/stack/layers/ffn/up/kernel
    name = re.sub(r'^\w+(\.weights/|\.learner\.|/params/|[./])', '', path)
    yield _row(part, buffer, buffer.num_bytes, name=name)


def _temporary_rows(buffers: Buffers, program: Program, model: PartitionedModel) -> Iterator[dict[str, Any]]:
  module, weight_dims = program.module, _weight_dims(model)
  instructions = {each.name: each for each in module.home}
  for buffer, num_bytes in buffers.temporaries:
    instruction = instructions.get(buffer.name)
    last = instructions.get(buffers.schedule[min(buffer.end, len(buffers.schedule) - 1)])
    if instruction is None:
      yield _row('temporaries', buffer, num_bytes, name=buffer.name)
      continue
    op_name = _made_by(module.home[instruction], instruction, buffer.index)
    needed = op_name_of(module.home[last], last) if last else ''
    part, why = _purpose(op_name, needed, instruction, buffer, weight_dims)
    yield _row(part, buffer, num_bytes, name=buffer.name, op_name=op_name, why=why)


def _purpose(
  op_name: str, needed: str, instruction: Instruction, buffer: Buffer, weight_dims: set[tuple[int, ...]]
) -> tuple[str, str]:
  """Returns the part that a temporary belongs to and why it is kept, by JAX's names of what makes and last needs it."""
  dims = tuple(size for size in read_shape(buffer.shape).dims if size > 1)
  if 'transpose(' in op_name and 'jvp(' not in needed and dims in weight_dims:
    return 'gradients', 'gradient, kept for the optimizer'
  if 'jvp(' in op_name and 'transpose(' not in op_name and 'transpose(' in needed:
    return 'activations', 'kept for the backward pass'
  made = origin_of(instruction.fused.root, buffer.index)[0] if instruction.fused else instruction
  if collective := _COLLECTIVE.match(made.opcode):
    return 'temporaries', f'result of {collective[1].replace("-", " ")}'
  return 'temporaries', 'read by the next operations'


def _made_by(computation: Computation, instruction: Instruction, index: tuple[int, ...]) -> str:
  """JAX's name of what makes a buffer; of a copy, what it copies; of a loop's state, what the loop writes there."""
  source, element = instruction, index[0] if index else 0
  for _ in range(_MAX_STEPS):
    if 'jvp(' in source.op_name or source.opcode not in _COPIES:
      break
    element = source.index if source.opcode == 'get-tuple-element' else element
    source = source.operands[0]
  if source.opcode == 'while':
    return loop_element_name(source, element) or op_name_of(computation, source)
  if '/closed_call/' not in source.op_name:
    loop = _loop_of(computation, instruction)
    name = loop_element_name(*loop) if loop else ''
    if 'jvp(' in name:
      return name
  return op_name_of(computation, instruction)


def _loop_of(computation: Computation, instruction: Instruction) -> tuple[Instruction, int] | None:
  """Returns the loop whose first state holds what an instruction makes, and the number of the element."""
  users = computation.users
  copies = [instruction]
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


def _uneven_bytes(model: PartitionedModel, has_optimizer: bool) -> int:
  """Returns the bytes of the state that only make shards even."""
  true: Any = model.abstract_state
  padded: Any = model.padded_state
  if not has_optimizer:
    true, padded = true.variables, padded.variables
  uneven = sum(
    bytes_per_device(stored) * (1 - math.prod(leaf.shape) / math.prod(stored.shape))
    for leaf, stored in zip(jax.tree.leaves(true), jax.tree.leaves(padded), strict=True)
    if leaf.shape != stored.shape
  )
  return round(uneven)
