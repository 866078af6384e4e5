"""Enumerates mesh shapes of a number of devices, and suggests the ones nearest to a shape that does not fit.

nearest_shapes((1, 8, 4), 64)  # [(1, 16, 4), (1, 8, 8)]
"""

from collections.abc import Iterator, Sequence
import math


def factorizations(total: int, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields every tuple of positive sizes, one per dim and a divisor of it, whose product is `total`."""
  if len(dims) < 2:
    if dims and dims[0] % total == 0:
      yield (total,)
    return
  for size in (size for size in range(1, math.gcd(total, dims[0]) + 1) if total % size == dims[0] % size == 0):
    for rest in factorizations(total // size, dims[1:]):
      yield (size, *rest)


def nearest_shapes(target: Sequence[int], total: int) -> list[tuple[int, ...]]:
  """Returns up to two shapes of `total` devices, nearest to the target shape first.

  The distance is the sum of |log2(size / target size)|. Ties prefer shapes that keep axes of size 1, and then shapes
  that keep the sizes of inner axes, which have the most traffic.
  """

  def distance(shape: tuple[int, ...]) -> tuple:
    changes = [round(abs(math.log2(size / old)), 9) for size, old in zip(shape, target)]
    num_opened = sum(old == 1 < size for size, old in zip(shape, target))
    return round(sum(changes), 6), num_opened, changes[::-1]

  return sorted(factorizations(total, [total] * len(target)), key=distance)[:2]
