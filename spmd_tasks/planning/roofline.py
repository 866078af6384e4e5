"""The one model of time: the work of one device in a train step over the rates that chips reach.

    terms = roofline_terms(step, chip, networks)      # products, attention, memory, an axis's network, ...
    sum(term.seconds for term in terms)

In the notation of Austin et al., How to Scale Your Model (2025): T_math is FLOPs over the FLOP/s that products reach,
T_comms bytes over the bandwidth of the mesh axes' links, and what overlaps is not added. Here products, kernels and
memory passes run one after another. Of the collectives over ICI a fitted share (`exposed` of rates.toml) is not hidden
behind them. A data-center network hides nothing. Copies to the host run beside the forward pass and come back beside
the backward pass; the step waits for the rest.

Every rate has a source and a basis: measured, fitted or assumed (rates.toml). A prediction says which share of its time
rests on which basis. docs/benchmarks/plans_tpu.md has its error against published steps.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from spmd_tasks.planning.chips import Chip, Rate, rate_of
from spmd_tasks.planning.networks import Networks
from spmd_tasks.planning.operations import Block, Operation, memory_passes

_LOW_PRECISION = ('int8', 'uint8', 'float8_e4m3fn', 'float8_e5m2')
_PIPELINED = '._pipelined/'  # in the names of operations of stages: PipelinedStack._pipelined
_FORWARD_SHARE, _BACKWARD_SHARE = 1 / 4, 1 / 2  # of a step, beside which copies to the host run, and back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
  """What a step spends on one resource.

  Attributes:
    name: 'products', 'experts', 'attention', 'bubbles', 'memory', 'gathers', 'host', or 'network' with its axes.
    seconds: of the step.
    work: FLOPs or bytes of one device.
    unit: 'FLOP' or 'B'.
    rate: FLOP/s or bytes/s that are reached; of a network what its links give to the busiest axis.
    basis, source: of the rate.
  """

  name: str
  seconds: float
  work: float
  unit: str
  rate: float
  basis: str
  source: str


def roofline_terms(
  step: Block,
  chip: Chip,
  networks: Networks,
  collectives: Iterable[tuple[str, tuple[str, ...], float]] | None = None,
  *,
  bubble: float = 0.0,
) -> list[Term]:
  """Returns the terms of a step's time on a chip, the longest first.

  Args:
    step: the operations of one device.
    chip: one with published figures.
    networks: of the mesh.
    collectives: (kind, mesh axes, bytes that one device sends) of a compiled step, in place of the traced step's.
    bubble: the fraction of a pipeline's ticks whose results do not count; devices compute in them as in others.
  """
  assert chip.peak_flops
  assert chip.hbm_bandwidth
  seconds: dict[str, float] = {}
  work: dict[str, float] = {}
  for operation, count in step.walk():
    if operation.flops and count:
      name = {'product': 'products', 'grouped': 'experts'}.get(operation.kind, operation.kind)
      wasted = bubble if _PIPELINED in operation.name else 0.0
      for part, share in ((name, 1 - wasted), ('bubbles', wasted)):
        if share:
          seconds[part] = seconds.get(part, 0) + share * count * _seconds_of_flops(operation, chip)
          work[part] = work.get(part, 0) + share * count * operation.flops
    elif operation.kind == 'gather':
      work['gathers'] = work.get('gathers', 0) + count * operation.bytes
  work['memory'] = passes(step)
  rates = {'products': 'matmul', 'experts': 'grouped', 'attention': 'attention', 'memory': 'hbm', 'gathers': 'gather'}
  rates['bubbles'] = rates['products']
  terms = []
  for name, amount in work.items():
    rate = rate_of(chip, rates[name])
    is_bytes = name in ('memory', 'gathers')
    spent = amount / (chip.hbm_bandwidth * rate.value) if is_bytes else seconds[name]
    if spent:
      terms.append(_term(name, spent, amount, 'B' if is_bytes else 'FLOP', rate))
  if collectives is None:
    collectives = (
      (operation.collective, operation.group, count * operation.bytes)
      for operation, count in step.walk()
      if operation.kind == 'collective'
    )
  terms += _network_terms(collectives, chip, networks)
  total = sum(term.seconds for term in terms)
  terms += _host_terms(step, chip, total)
  return sorted(terms, key=lambda term: -term.seconds)


def at_least(
  num_bytes: float, collectives: Iterable[tuple[str, tuple[str, ...], float]], chip: Chip, networks: Networks
) -> list[Term]:
  """Returns the terms of a step that generates: its weights and its cache, `num_bytes`, are read once."""
  rate = rate_of(chip, 'hbm')
  memory = _term('memory', num_bytes / ((chip.hbm_bandwidth or 1) * rate.value), num_bytes, 'B', rate)
  return sorted([memory, *_network_terms(collectives, chip, networks)], key=lambda term: -term.seconds)


def shares_by_basis(terms: Sequence[Term]) -> Mapping[str, float]:
  """Returns which share of the time rests on rates that are measured, fitted and assumed."""
  total = sum(term.seconds for term in terms)
  shares: dict[str, float] = {}
  for term in terms:
    shares[term.basis] = shares.get(term.basis, 0) + term.seconds / total
  return dict(sorted(shares.items()))


def time_of_step(
  terms: Sequence[Term],
  chip: Chip,
  num_devices: int,
  *,
  model_flops: float | None = None,
  num_tokens: int | None = None,
) -> dict[str, Any]:
  """Returns what plan.json has of a step's time, by its terms; None where the chip's figures are not known.

  `model_flops` and `num_tokens` are of the step on all devices together.
  """
  seconds = sum(term.seconds for term in terms) or None
  peak = seconds and num_devices * (chip.peak_flops or 0) * seconds
  return {
    'predicted_step_s': seconds,
    'predicted_mfu': model_flops / peak if model_flops and peak else None,
    'tokens_per_s_per_chip': num_tokens / seconds / num_devices if num_tokens and seconds else None,
    'terms': [dataclasses.asdict(term) for term in terms],
    'shares': dict(shares_by_basis(terms)) if seconds else {},
  }


def passes(block: Block) -> float:
  """Returns the bytes that elementwise operations move, those of loops as often as these run."""
  inner = (operation.count * passes(operation.body) for operation in block.operations if operation.body is not None)
  return memory_passes(block) + sum(inner)


def filled_part(size: float, mxu_size: int | None) -> float:
  """Returns the part of matrix units of `mxu_size` rows that a side of this size fills, such as a head."""
  if not size or not mxu_size:
    return 1.0
  return size / (-(-size // mxu_size) * mxu_size)


def _seconds_of_flops(operation: Operation, chip: Chip) -> float:
  assert chip.peak_flops
  assert chip.hbm_bandwidth
  peak = chip.peak_flops
  if operation.dtype in _LOW_PRECISION:
    low = chip.int8_flops if 'int8' in operation.dtype else chip.fp8_flops
    if low or chip.fp8_flops or chip.int8_flops:
      peak = (low or chip.fp8_flops or chip.int8_flops or peak) * rate_of(chip, 'low_precision').value
  # The two shorter sides lie on the rows and columns of the matrix units, the longest one streams.
  filled = math.prod(filled_part(size, chip.mxu_size) for size in sorted(operation.sizes)[:2])
  name = {'product': 'matmul', 'grouped': 'grouped', 'attention': 'attention'}[operation.kind]
  if operation.kind == 'attention':
    filled = filled_part(operation.sizes[0], chip.mxu_size)
  of_flops = operation.flops / (peak * rate_of(chip, name).value * filled)
  if operation.kind == 'attention':
    return of_flops
  moved = operation.bytes or sum(x.local_bytes for x in (*operation.inputs, *operation.outputs))
  return max(of_flops, moved / (chip.hbm_bandwidth * rate_of(chip, 'hbm').value))


def _term(name: str, seconds: float, work: float, unit: str, rate: Rate) -> Term:
  return Term(
    name=name, seconds=seconds, work=work, unit=unit, rate=work / seconds, basis=rate.basis, source=rate.source
  )


def _network_terms(
  collectives: Iterable[tuple[str, tuple[str, ...], float]], chip: Chip, networks: Networks
) -> list[Term]:
  """Returns a term for each group of mesh axes."""
  seconds: dict[tuple[str, ...], np.ndarray] = {}
  work: dict[tuple[str, ...], float] = {}
  for kind, axes, num_bytes in collectives:
    seconds[axes] = seconds.get(axes, 0) + np.asarray(networks.seconds(kind, axes, num_bytes))
    work[axes] = work.get(axes, 0) + num_bytes
  exposed, dcn, terms = rate_of(chip, 'exposed'), rate_of(chip, 'dcn'), []
  for axes, (within, between) in seconds.items():
    spent = float(within * exposed.value + between)
    if spent:
      rate = dcn if between > spent / 2 else exposed
      terms.append(_term(f'network {" x ".join(axes)}', spent, work[axes], 'B', rate))
  return terms


def _host_terms(step: Block, chip: Chip, total: float) -> list[Term]:
  """Returns the term of copies to the host and back: passes over layers hide theirs, the optimizer's nothing hides."""
  moved = {True: 0.0, False: 0.0}
  of_optimizer = 0.0
  for operation, count in step.walk():
    if operation.kind == 'host':
      if 'jvp(' in operation.name:
        moved[operation.to_host] += count * operation.bytes
      else:
        of_optimizer += count * operation.bytes
  num_bytes = sum(moved.values()) + of_optimizer
  if not num_bytes or not chip.host_bandwidth:
    return []
  there, back = moved[True] / chip.host_bandwidth, moved[False] / chip.host_bandwidth
  waits = max(0.0, there - total * _FORWARD_SHARE) + max(0.0, back - total * _BACKWARD_SHARE)
  waits += of_optimizer / chip.host_bandwidth
  rate = Rate(1.0, 'assumed', 'copies take the whole bandwidth to the host')
  return [_term('host', waits, num_bytes, 'B', rate)] if waits else []
