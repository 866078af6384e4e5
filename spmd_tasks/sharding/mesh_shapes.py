"""Finds the mesh shapes near one that cannot be built: every way to split devices over axes, nearest first.

nearest_shapes((1, 8, 4), 64)  # [(1, 16, 4), (1, 8, 8)]
"""

from collections.abc import Iterator, Sequence
import math


def factorizations(total: int, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields every way to write `total` as a product of positive numbers, each of which divides its dim."""
  if len(dims) < 2:
    if dims and dims[0] % total == 0:
      yield (total,)
    return
  for size in (size for size in range(1, math.gcd(total, dims[0]) + 1) if total % size == dims[0] % size == 0):
    for rest in factorizations(total // size, dims[1:]):
      yield (size, *rest)


def nearest_shapes(wanted: Sequence[int], total: int) -> list[tuple[int, ...]]:
  """Returns up to two shapes of `total` devices, nearest to the wanted one first.

  The distance is the sum of |log2(size / wanted size)|. Among equals comes first what opens no axis of size 1, and then
  what keeps the inner axes, which have the most traffic.
  """

  def distance(shape: tuple[int, ...]) -> tuple:
    changes = [round(abs(math.log2(size / want)), 9) for size, want in zip(shape, wanted)]
    opened = sum(want == 1 < size for size, want in zip(shape, wanted))
    return round(sum(changes), 6), opened, changes[::-1]

  return sorted(factorizations(total, [total] * len(wanted)), key=distance)[:2]
