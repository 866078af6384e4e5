"""Counters and histograms, and the text in which Prometheus reads them."""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
  """How many observations were at most each of the bounds."""

  def __init__(self, name: str, help_text: str, bounds: Sequence[float] = SECONDS):
    self._name = name
    self._help = help_text
    self._bounds = tuple(bounds)
    self._counts = [0] * (len(self._bounds) + 1)
    self._sum = 0.0

  def observe(self, value: float) -> None:
    """Counts one value."""
    self._counts[bisect.bisect_left(self._bounds, value)] += 1
    self._sum += value

  @property
  def mean(self) -> float:
    """Of all observations; 0 where there are none."""
    return self._sum / max(1, sum(self._counts))

  def lines(self) -> Iterator[str]:
    """Its part of the text."""
    yield from _head(self._name, self._help, 'histogram')
    total = 0
    for bound, count in zip((*map(str, self._bounds), '+Inf'), self._counts, strict=True):
      total += count
      yield f'{self._name}_bucket{{le="{bound}"}} {total}'
    yield f'{self._name}_sum {self._sum:.6f}'
    yield f'{self._name}_count {total}'


class LabelledCounter:
  """A count for each combination of labels."""

  def __init__(self, name: str, help_text: str, labels: Sequence[str]):
    self._name = name
    self._help = help_text
    self._labels = tuple(labels)
    self._counts: Counter[tuple[str, ...]] = Counter()

  def add(self, *values: object) -> None:
    """Counts one; `values` are not what a client may choose."""
    self._counts[tuple(map(str, values))] += 1

  def lines(self) -> Iterator[str]:
    """Its part of the text."""
    yield from _head(self._name, self._help, 'counter')
    for values, count in sorted(self._counts.items()):
      labels = ','.join(f'{label}="{value}"' for label, value in zip(self._labels, values, strict=True))
      yield f'{self._name}{{{labels}}} {count}'


def single(name: str, help_text: str, kind: str, value: float) -> Iterator[str]:
  """The text of one number; `kind` is counter or gauge."""
  yield from _head(name, help_text, kind)
  yield f'{name} {value}'


def exposition(parts: Iterable[Iterable[str]]) -> str:
  """All parts as one text."""
  return ''.join(f'{line}\n' for part in parts for line in part)


def _head(name: str, help_text: str, kind: str) -> Iterator[str]:
  yield f'# HELP {name} {help_text}'
  yield f'# TYPE {name} {kind}'
