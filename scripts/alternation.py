"""Times programs in turn, so that other load on the machine affects all of them equally.

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
  """Wall-clock and CPU seconds of each round; CPU time hardly depends on other load."""

  wall: list[float]
  cpu: list[float]


def alternate(programs: Mapping[str, Callable[[], Any]], num_rounds: int, num_warmup: int = 2) -> dict[str, Times]:
  """Runs every program once per round, every second round in reverse order; drops the warm-up rounds."""
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
  """Returns the ratio of the medians."""
  return median(getattr(times[name], clock)) / median(getattr(times[base], clock))


def paired_ratio(times: Mapping[str, Times], name: str, base: str, clock: str = 'wall') -> float:
  """Returns the median of the rounds' ratios, which does not depend on load that changes between rounds."""
  return median(a / b for a, b in zip(getattr(times[name], clock), getattr(times[base], clock), strict=True))


def _rounded(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: _rounded(item) for name, item in value.items()}
  if isinstance(value, float) and math.isfinite(value):
    return float(f'{value:.5g}')
  return value


def print_result(**result: Any) -> None:
  """Prints one JSON object as the last line, with numbers rounded to five digits."""
  print(json.dumps(_rounded(result)), flush=True)
