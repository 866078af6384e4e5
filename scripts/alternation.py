"""Alternation: programs that are timed in turn, so that whatever else runs on the machine meets all of them alike.

Usage:

    times = alternate({'ours': step, 'bare': bare_step}, num_rounds=100)
    ratio(times, 'ours', 'bare')

A program is a callable that returns arrays; its time ends when they are ready.
"""

from collections.abc import Callable, Mapping
import json
import math
from statistics import median
import time
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
  """Seconds of each round, on the clock and on all cores together. The second hardly minds a busy machine."""

  wall: list[float]
  cpu: list[float]


def alternate(programs: Mapping[str, Callable[[], Any]], num_rounds: int, num_warmup: int = 2) -> dict[str, Times]:
  """Runs every program once in each round, every second round in reverse; warm-up rounds are not counted."""
  times = {name: Times([], []) for name in programs}
  for i in range(num_warmup + num_rounds):
    for name in list(programs)[:: -1 if i % 2 else 1]:
      wall, cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(programs[name]())
      if i >= num_warmup:
        times[name].wall.append(time.perf_counter() - wall)
        times[name].cpu.append(time.process_time() - cpu)
  return times


def ratio(times: Mapping[str, Times], name: str, base: str, clock: str = 'wall') -> float:
  """The ratio of the medians."""
  return median(getattr(times[name], clock)) / median(getattr(times[base], clock))


def paired_ratio(times: Mapping[str, Times], name: str, base: str, clock: str = 'wall') -> float:
  """The median of the rounds' ratios, which a load that changes between rounds does not move."""
  return median(a / b for a, b in zip(getattr(times[name], clock), getattr(times[base], clock), strict=True))


def _rounded(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: _rounded(item) for name, item in value.items()}
  if isinstance(value, float) and math.isfinite(value):
    return float(f'{value:.5g}')
  return value


def print_result(**result: Any) -> None:
  """One JSON object as the last line, numbers to five digits."""
  print(json.dumps(_rounded(result)), flush=True)
