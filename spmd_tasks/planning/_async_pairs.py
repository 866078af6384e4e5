"""Finds the collectives of a program, and for asynchronous ones where they start and where the program waits for them.

Compilers write an asynchronous collective in five ways:

    all-gather-start, all-gather-done             a pair of instructions; in between runs other work
    async-start, async-done                       the same around a computation that holds the collective
    call-start, call-done (TPU)                   likewise, of a computation that the SparseCores run
    fusion ... fusion ... fusion (TPU)            the first holds the collective and `AsyncCollectiveStart`, the last
                                                  `AsyncCollectiveDone`; those in between compute and move data on;
                                                  all of them repeat the collective, with its chain_id and channel_id
    send, recv, send-done, recv-done (TPU)        between slices: the host's runtime does what the attribute
                                                  `_xla_megascale_transfer_type` says; the program waits at recv-done

A TPU writes a reduce scatter as a fusion of an all-reduce and the slice of its result that is kept.
"""

from collections.abc import Iterator
import dataclasses

from spmd_tasks.planning._hlo_text import quoted
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_KINDS = (
  'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'ragged-all-to-all', 'collective-permute',
  'collective-broadcast',
)  # fmt: skip
WRAPPERS = ('async-start', 'call-start')  # of computations
# Instructions that take no time of the device, and so hide nothing of a collective.
_FREE = frozenset({
  'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'after-all', 'partition-id', 'send', 'recv',
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledCollective:
  """A collective that a computation runs.

  Attributes:
    kind: such as 'all_gather'.
    instruction, inside: the collective and the computation where it is written.
    computation: the computation that runs it.
    start, end: the instructions of that computation that start it and wait for it; no end: one does both.
    count: executions per step.
    hides_work: whether other work stands between start and end.
  """

  kind: str
  instruction: Instruction
  inside: Computation
  computation: Computation
  start: Instruction
  end: Instruction | None
  count: float
  hides_work: bool


def scheduled_collectives(program: ScheduledProgram) -> Iterator[ScheduledCollective]:
  """Yields the collectives that run, each once, in the order of the schedule."""
  for computation, count in unwrapped_computations(program):
    yield from _of_computation(program, computation, count)


def unwrapped_computations(program: ScheduledProgram) -> Iterator[tuple[Computation, float]]:
  """Yields the computations that run, and how often, but for those that a start wraps, which count with it."""
  wrapped = {
    name
    for computation in program.computations.values()
    for instruction in computation.instructions
    if instruction.opcode in WRAPPERS
    for key in ('to_apply', 'calls')
    for name in instruction.called.get(key, ())
  }
  for name, count in program.executions.items():
    if name not in wrapped:
      yield program.computations[name], count


def _of_computation(program: ScheduledProgram, computation: Computation, count: float) -> Iterator[ScheduledCollective]:
  started: set[tuple[str, str, str]] = set()
  for start in computation.instructions:
    found = _collectives_in(program, computation, start)
    is_fused = start.opcode == 'fusion' and bool(found)
    targets = _targets(program, start) if is_fused else frozenset()
    if 'AsyncCollectiveDone' in targets:
      continue
    for holder, instruction in found:
      identity = _identity(instruction)
      if is_fused and 'AsyncCollectiveStart' not in targets and identity in started:
        continue  # a fusion that moves the data of a collective on
      end = None
      if 'AsyncCollectiveStart' in targets:
        started.add(identity)
        end = _end_of_fused(program, computation, start, identity)
      elif start.opcode.endswith('-start'):
        end = end_of_pair(computation, start)
      elif start.opcode == 'send':
        end = _end_of_transfer(computation, start)
      yield ScheduledCollective(
        kind=_kind(instruction, start),
        instruction=instruction,
        inside=holder,
        computation=computation,
        start=start,
        end=end,
        count=count,
        hides_work=end is not None and _works_between(computation, start, end, instruction),
      )


def _collectives_in(
  program: ScheduledProgram, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
  """Returns the collectives that an instruction is or holds, each with the computation where it is written."""
  if is_collective(instruction):
    return [(computation, instruction)]
  if instruction.opcode not in ('fusion', *WRAPPERS):
    return []
  called = program.graph.inlined(instruction)
  if called is None:
    return []
  found = []
  for each in called.instructions:
    found += _collectives_in(program, called, each)
  return found


def is_collective(instruction: Instruction) -> bool:
  """Returns whether an instruction is a collective or starts one."""
  return instruction.opcode.removesuffix('-start') in _KINDS or bool(between_slices(instruction))


def between_slices(instruction: Instruction) -> str:
  """Returns what the host's runtime does with a `send` between slices, such as 'all_gather'; '' for all others."""
  return quoted(instruction.tail, '_xla_megascale_transfer_type').lower() if instruction.opcode == 'send' else ''


def _targets(program: ScheduledProgram, fusion: Instruction) -> frozenset[str]:
  called = program.graph.called(fusion)
  instructions = called.instructions if called else ()
  return frozenset(each.custom_call_target for each in instructions if each.opcode == 'custom-call')


def _identity(instruction: Instruction) -> tuple[str, str, str]:
  """Returns what the fusions of one collective have in common; those that JAX writes out all have channel 1."""
  channel = instruction.attributes.get('channel_id', instruction.name)
  return instruction.opcode, quoted(instruction.tail, 'chain_id'), channel


def _kind(instruction: Instruction, start: Instruction) -> str:
  if kind := between_slices(instruction):
    return kind if kind.replace('_', '-') in _KINDS else 'collective_permute'
  kind = instruction.opcode.removesuffix('-start').replace('-', '_')
  if kind == 'all_reduce' and start.opcode == 'fusion' and 2 * start.shape.num_bytes <= instruction.shape.num_bytes:
    return 'reduce_scatter'
  return kind


def _order(computation: Computation) -> dict[str, int]:
  return {each.name: index for index, each in enumerate(computation.instructions)}


def _end_of_fused(
  program: ScheduledProgram, computation: Computation, start: Instruction, identity: tuple[str, str, str]
) -> Instruction | None:
  """Returns the fusion after `start` that waits for the same collective."""
  for each in computation.instructions[_order(computation)[start.name] + 1 :]:
    if each.opcode == 'fusion' and 'AsyncCollectiveDone' in _targets(program, each):
      found = _collectives_in(program, computation, each)
      if any(_identity(instruction) == identity for _, instruction in found):
        return each
  return None


def end_of_pair(computation: Computation, start: Instruction) -> Instruction | None:
  """Returns the `-done` of a `-start`, by way of updates and copies of the handle."""
  names = {start.name}
  for each in computation.instructions[_order(computation)[start.name] + 1 :]:
    if names & set(each.operands):
      if each.opcode.endswith('-done'):
        return each
      names.add(each.name)
  return None


def _end_of_transfer(computation: Computation, send: Instruction) -> Instruction | None:
  """Returns the `recv-done` of the transfer between slices that a `send` begins."""
  name = quoted(send.tail, '_xla_host_transfer_rendezvous')
  for each in computation.instructions:
    if each.opcode == 'recv' and quoted(each.tail, '_xla_host_transfer_rendezvous') == name:
      done = end_of_pair(computation, each)
      return done if done and _order(computation)[done.name] > _order(computation)[send.name] else None
  return None


def _works_between(computation: Computation, start: Instruction, end: Instruction, collective: Instruction) -> bool:
  config = collective.backend_config.get('collective_backend_config', {})
  if isinstance(config, dict) and config.get('is_sync'):
    return False
  order = _order(computation)
  between = computation.instructions[order[start.name] + 1 : order[end.name]]
  return any(each.opcode not in _FREE and not each.opcode.endswith(('-start', '-done')) for each in between)
