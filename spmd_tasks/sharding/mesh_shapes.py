"""Finds the mesh shapes near one that cannot be built: every way to split devices over axes, nearest first.

nearest_shapes((1, 8, 4), 64)  # [(1, 16, 4), (1, 8, 8)]
"""

from collections.abc import Iterator, Sequence
import math


def factorizations(total: int, num_axes: int) -> Iterator[tuple[int, ...]]:
  """Yields every tuple of `num_axes` positive sizes whose product is `total`."""
  if num_axes == 1:
    yield (total,)
    return
  for size in (size for size in range(1, total + 1) if total % size == 0):
    for rest in factorizations(total // size, num_axes - 1):
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

  return sorted(factorizations(total, len(wanted)), key=distance)[:2]
