"""Predicts how long one execution of a compiled step takes, and on what: the compiler's cycles, kernels, networks.

    prediction = predict_time(program, collectives(program, mesh), chip, mesh, model_flops=..., num_tokens=...)
    prediction['predicted_step_s'], prediction['predicted_mfu'], prediction['top_operations'][0]

The program's schedule is run on paper. Instructions run one after another. Each takes the cycles that the TPU compiler
estimates; where there is no such estimate (on GPU and CPU: everywhere) it takes its roofline (costs.py). A collective
enters the queue of its network when it starts, for as long as its links need for its bytes (networks.py); if it is
asynchronous, the program waits for it where the schedule has its end, else at once. What was done meanwhile is hidden.
Copies to the host and from there likewise, but of those that have started, the link serves the one that is waited for
first. Loops count as often as they run.

`roofline` is the least that the step can take: its FLOPs at peak, its bytes of memory, its bytes of network, whichever
takes longest.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from jax.sharding import Mesh

from spmd_tasks.planning.chips import Chip, rate_of
from spmd_tasks.planning.collectives import Collective, is_collective
from spmd_tasks.planning.costs import CAUSAL_SHARE, Cost, instruction_cost
from spmd_tasks.planning.hlo import Computation, Instruction
from spmd_tasks.planning.networks import HOST_QUEUES, Transfer, transfers
from spmd_tasks.planning.program import Program, op_name_of

CYCLES_ERROR = 0.25  # how far the sum of the compiler's cycles is assumed to be from the time on a chip, at most
NUM_TOP = 10


def predict_time(
  program: Program,
  collectives: Sequence[Collective],
  chip: Chip,
  mesh: Mesh,
  *,
  model_flops: float | None = None,
  num_tokens: int | None = None,
) -> dict[str, Any]:
  """Predicts the time of one execution of a program.

  Args:
    program, collectives: a compiled step, and `collectives(program, mesh)`.
    chip: the published figures of the devices.
    mesh: on TPUs its devices' coordinates say which links a collective has.
    model_flops, num_tokens: of the step on all devices together.

  Returns:
    what plan.json has of the time of a step; seconds are None where the chip's figures are not known (CPU).
    time_by_kind: seconds by 'cycles' (the compiler's), 'roofline', 'kernel', and by 'ici', 'dcn' and 'host' that
      nothing hides; they add up to `predicted_step_s`. hidden_s: of collectives during which other work runs.
    predicted_step_low_s, predicted_step_high_s: the roofline, or the compiler's cycles less 25%; nothing overlapped,
      cycles plus 25%, and kernels at half of the assumed efficiency.
    roofline: the least that the step needs of one device: `flops` of products and kernels, rematerialisation included,
      bytes (`hbm_bytes`, ..., of the host in the direction that has more), how long each takes alone at the published
      rates (`compute_s`, `hbm_s`, ..., None where these are not known), and the longest of them, `seconds`.
    top_operations: the ten that take longest in all their executions, of transfers only what the program waits for.
    assumptions: what is assumed, a sentence each.
  """
  moved = list(transfers(program, collectives, mesh, chip))
  schedule = Schedule(program, moved, chip)
  operations = schedule.operations()
  by_kind: dict[str, float] = {}
  for each in operations:
    by_kind[each['basis']] = by_kind.get(each['basis'], 0) + each['seconds']
  roofline = _roofline(schedule, moved, chip)
  total = sum(by_kind.values())
  on_network = (roofline['ici_s'] or 0) + (roofline['dcn_s'] or 0)
  exposed = by_kind.get('ici', 0) + by_kind.get('dcn', 0)
  serial = total - exposed + on_network  # if nothing overlapped
  is_known = chip.peak_flops is not None and chip.hbm_bandwidth is not None
  error = CYCLES_ERROR * by_kind.get('cycles', 0)
  seconds = total if is_known else None
  top = sorted(operations, key=lambda each: -each['seconds'])[:NUM_TOP]
  peak = seconds and mesh.size * (chip.peak_flops or 0) * seconds
  return {
    'predicted_step_s': seconds,
    'predicted_step_low_s': min(total, max(roofline['seconds'] or 0, total - error)) if is_known else None,
    'predicted_step_high_s': serial + error + by_kind.get('kernel', 0) if is_known else None,
    'predicted_mfu': model_flops / peak if model_flops and peak else None,
    'tokens_per_s_per_chip': num_tokens / seconds / mesh.size if num_tokens and seconds else None,
    'hidden_s': max(0.0, on_network - exposed),
    'roofline': roofline,
    'time_by_kind': by_kind,
    'top_operations': [each | {'share': each['seconds'] / total} for each in top],
    'assumptions': _assumptions(schedule, by_kind, chip, roofline),
  }


class Schedule:
  """A program's schedule on a chip.

  Attributes:
    program: the program.
    unknown: instructions without an estimate of their work, as `name (op_name)`.
  """

  def __init__(self, program: Program, transfers: Sequence[Transfer], chip: Chip):
    self.program = program
    self._chip = chip
    self._starts: dict[Instruction, list[Transfer]] = {}
    self._ends: dict[Instruction, list[Transfer]] = {}
    for each in transfers:
      self._starts.setdefault(each.start, []).append(each)
      if each.end is not None:
        self._ends.setdefault(each.end, []).append(each)
    self._costs: dict[Instruction, Cost] = {}
    self._seconds: dict[Computation, float] = {}
    self._waits: dict[Computation, list[tuple[Transfer, float]]] = {}
    self._run(program.module.entry)
    self.unknown = tuple(f'{each.name} ({each.op_name})' for each, cost in self._costs.items() if not cost.is_known)

  def operations(self) -> list[dict[str, Any]]:
    """Returns every operation that takes time."""
    found = []
    for computation, count in self.program.executions.items():
      spent: list[Any] = [(each, None, self._cost(each)) for each in computation.instructions]
      waits = self._waits.get(computation, ())
      spent += [(wait.start, wait.op_name, Cost(seconds, 0, 0, wait.basis)) for wait, seconds in waits]
      found += [
        {
          'name': instruction.name,
          'computation': computation.name,
          'op_name': op_name_of(computation, instruction) if op_name is None else op_name,
          'seconds': cost.seconds * count,
          'count': count,
          'basis': cost.basis,
          'flops': cost.flops * count,
        }
        for instruction, op_name, cost in spent
        if cost.seconds > 0
      ]
    return found

  def totals(self) -> tuple[float, float, float]:
    """Returns (FLOPs, their seconds at peak, bytes of the device's memory) of a step."""
    costs = [(count, self._cost(instruction)) for instruction, count in self.program.steps()]
    flops, at_peak, moved = zip(*((n * cost.flops, n * cost.at_peak, n * cost.hbm_bytes) for n, cost in costs))
    return sum(flops), sum(at_peak), sum(moved)

  def _cost(self, instruction: Instruction) -> Cost:
    if instruction not in self._costs:
      cost = instruction_cost(instruction, self._chip)
      moves_data_only = (
        instruction in self._starts
        or instruction in self._ends
        or is_collective(instruction)  # also where another instruction starts it
        or instruction.opcode.endswith(('-start', '-done'))
      )
      # The time of a queue or of a copy engine, unless the instruction computes too.
      self._costs[instruction] = dataclasses.replace(cost, seconds=0.0) if moves_data_only and not cost.flops else cost
    return self._costs[instruction]

  def _run(self, computation: Computation) -> float:
    """Returns the seconds of one execution of a computation, and notes where it waits."""
    if computation in self._seconds:
      return self._seconds[computation]
    now, queues = 0.0, collections.defaultdict[str, _Queue](_Queue)
    waits = self._waits[computation] = []

    def wait_for(transfer: Transfer) -> float:
      end = queues[transfer.queue].end(transfer, now)
      if end > now:
        waits.append((transfer, end - now))
      return max(now, end)

    for instruction in computation.instructions:
      for each in self._starts.get(instruction, ()):
        # Collectives run in the order of the program, whichever is waited for first.
        deadline = computation.place[each.end or each.start] if each.basis == 'host' else computation.place[each.start]
        queues[each.queue].start(each, now, deadline)
        if each.end is None:
          now = wait_for(each)
      for each in self._ends.get(instruction, ()):
        now = wait_for(each)
      now += self._cost(instruction).seconds
      for called, times in self.program.runs(instruction):
        now += times * self._run(called)
    self._seconds[computation] = now
    return now


class _Queue:
  """The transfers that share a link. Of those that have started, the one with the first deadline is served."""

  def __init__(self):
    self._now = 0.0
    self._left: dict[int, tuple[int, float]] = {}  # id of a transfer -> its deadline, and seconds still to serve

  def start(self, transfer: Transfer, now: float, deadline: int) -> None:
    self._serve(now)
    self._left[id(transfer)] = deadline, transfer.seconds

  def end(self, transfer: Transfer, now: float) -> float:
    """Serves on until the transfer is done, and returns when that is: `now` or later."""
    self._serve(now)
    deadline, _ = self._left.get(id(transfer), (0, 0.0))
    self._serve(now + sum(seconds for other, seconds in self._left.values() if other <= deadline))
    self._left.pop(id(transfer), None)
    return self._now

  def _serve(self, until: float) -> None:
    for key, (deadline, seconds) in sorted(self._left.items(), key=lambda item: item[1][0]):
      served = min(seconds, until - self._now)
      self._left[key] = deadline, seconds - served
      self._now += served
    self._now = until


def _roofline(schedule: Schedule, transfers: Sequence[Transfer], chip: Chip) -> dict[str, float | None]:
  flops, at_peak, moved = schedule.totals()
  sent, busy = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
  for each in transfers:
    sent[each.queue] += each.bytes_per_step
    busy[each.queue] += each.seconds * each.count
  to_host = max(sent[queue] for queue in HOST_QUEUES)
  seconds = {
    'compute_s': at_peak if chip.peak_flops else None,
    'hbm_s': moved / chip.hbm_bandwidth if chip.hbm_bandwidth else None,
    'ici_s': busy['ici'] if chip.ici_bandwidth else None,
    'dcn_s': busy['dcn'] if chip.dcn_bandwidth else None,
    'host_s': to_host / chip.host_bandwidth if chip.host_bandwidth else None,
  }
  amounts = {'flops': flops, 'hbm_bytes': moved, 'ici_bytes': sent['ici'], 'dcn_bytes': sent['dcn']}
  longest = max((each for each in seconds.values() if each is not None), default=None)
  return {**amounts, 'host_bytes': to_host, **seconds, 'seconds': longest}


def _assumptions(schedule: Schedule, by_kind: Mapping[str, float], chip: Chip, roofline: Mapping) -> list[str]:
  program, lines = schedule.program, []
  if chip.peak_flops is None:
    lines.append(f'No published figures of {chip.name} are used, so no time is predicted.')
  elif by_kind.get('cycles') and chip.clock_hz:
    lines.append(
      f"{by_kind['cycles']:.3g} s are the compiler's own estimated cycles at {chip.clock_hz / 1e9:g} GHz, taken as "
      f'right within {CYCLES_ERROR:.0%}; {by_kind.get("roofline", 0):.3g} s are the roofline of operations without one.'
    )
  else:
    lines.append(
      'The compiler estimates no cycles: every operation takes its roofline, at the peak rates of the chip; the true '
      'time is longer.'
    )
  if by_kind.get('kernel'):
    rates = (rate_of(chip, name) for name in ('attention', 'grouped', 'gather'))
    attention, other, gather = (f'{rate.value:.0%} ({rate.basis})' for rate in rates)
    of_rows = (
      f"; SparseCores gather and copy rows at {gather} of the memory's bandwidth" if chip.platform == 'tpu' else ''
    )
    lines.append(
      f'Attention kernels run at {attention} of peak FLOP/s, of the part of it that heads of their size fill, and skip '
      f'{1 - CAUSAL_SHARE:.0%} of the scores (causal); other kernels (custom calls) run at {other}{of_rows}. They are '
      f'{by_kind["kernel"] / sum(by_kind.values()):.0%} of the time.'
    )
  lines.append(
    'Collectives run at the published bandwidth of the links that all their groups can use at once, without latency '
    'and without contention with other collectives.'
  )
  if roofline['host_bytes'] and chip.host_bandwidth:
    lines.append(
      f'{roofline["host_bytes"] / 1e9:.3g} GB go to the memory of the host, and as much comes back, at '
      f'{chip.host_bandwidth / 1e9:g} GB/s in each direction, beside the work that the schedule has in between.'
    )
  for names, what in (
    (schedule.unknown, 'operation(s) without an estimate of their work count at most their bytes'),
    (program.unknown_loops, 'loop(s) whose length the program decides as it runs count one pass'),
    (
      program.rare_loops,
      'loop(s) for what does not fit the buffers of experts count none, as with balanced routing',
    ),
  ):
    if names:
      lines.append(f'{len(names)} {what}: {", ".join(names[:3])}{", ..." if len(names) > 3 else ""}.')
  return lines
