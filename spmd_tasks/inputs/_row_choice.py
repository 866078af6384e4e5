"""Chooses the source of every row of a mixture's batches: the same on every host, without a word between them.

Row r of every batch reads its own part of each source: row r of the source's batches, one after another. So a host
reads of every source only the rows that it needs. The choice has two parts, both in integers and fractions:

1. How many rows of a batch each source gives. After any number of batches since the weights have changed, each source
   has given the rows that its weight says, to less than one row: Tijdeman's solution of the chairman assignment problem
   (Discrete Mathematics 32, 1980), by earliest deadlines.
2. Which rows these are. Rows that are behind the others in a source get it first; ties fall by random numbers of (seed,
   batch). So all rows read a source at nearly the same pace, and few of its batches have to be kept.

Shapes: B rows of the global batch, S sources.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from fractions import Fraction
import math
from typing import Any

import numpy as np


@dataclasses.dataclass
class RowChoice:
  """The number of rows that each row of the batch has read of each source, and from it the next batch's sources.

  Attributes:
    schedule: (first batch, weights [S]) pairs; the first pair begins at batch 0.
    seed: of the random numbers that break ties.
    num_batches: how many batches have been chosen.
    rows_read: int64 [S, B], how many rows of source s row r of the batch has read.
  """

  batch_size: int
  schedule: Sequence[tuple[int, Sequence[Fraction]]]
  seed: int

  def __post_init__(self):
    num_sources = len(self.schedule[0][1])
    self.num_batches = 0
    self.rows_read = np.zeros((num_sources, self.batch_size), np.int64)
    # Since when the same weights hold, and how many rows each source had given before.
    self._since, self._given_before = 0, [0] * num_sources

  def choose(self) -> np.ndarray:
    """Returns the source of each row of the next batch, int32 [B]."""
    since, given_before = self._phase()
    weights = self._weights()
    sources = [source for source, weight in enumerate(weights) if weight]
    given = self.rows_read.sum(axis=1).tolist()
    total = sum(weights[source] for source in sources)
    counts = share_out(
      [weights[source] / total for source in sources],
      given=[given[source] - given_before[source] for source in sources],
      batch_size=self.batch_size,
      num_batches=self.num_batches - since + 1,
    )
    rows_read = self.rows_read[sources]
    behind = rows_read.sum(axis=1, keepdims=True) - self.batch_size * rows_read  # times B
    order = np.random.Philox(key=self.seed, counter=self.num_batches << 64).random_raw(self.batch_size)
    return np.array(sources, np.int32)[deal(counts, behind, np.argsort(np.argsort(order, kind='stable')))]

  def num_batches_needed(self, choice: np.ndarray) -> list[int]:
    """Returns how many batches of each source, from its beginning, `choice` and all choices before it need: [S]."""
    needed = self.rows_read + (choice == np.arange(len(self.rows_read))[:, None])
    return needed.max(axis=1).tolist()

  def advance(self, choice: np.ndarray) -> None:
    """Takes a batch that `choose` has returned as read."""
    self._since, self._given_before = self._phase()
    self.rows_read += choice == np.arange(len(self.rows_read))[:, None]
    self.num_batches += 1

  def _weights(self) -> Sequence[Fraction]:
    return [weights for first, weights in self.schedule if first <= self.num_batches][-1]

  def _phase(self) -> tuple[int, list[int]]:
    """Since which batch the weights of the next batch hold, and [S] rows given before."""
    if any(self._since < first <= self.num_batches for first, _ in self.schedule):
      return self.num_batches, self.rows_read.sum(axis=1).tolist()
    return self._since, self._given_before

  def get_state(self) -> dict[str, Any]:
    """The position as JSON data."""
    lowest = self.rows_read.min(axis=1)
    return {
      'num_batches': self.num_batches,
      'rows_read': lowest.tolist(),
      'rows_read_beyond': (self.rows_read - lowest[:, None]).tolist(),
      'since': self._since,
      'given_before': list(self._given_before),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues at a position that a RowChoice of as many sources and rows gave."""
    self.num_batches = int(state['num_batches'])
    beyond = np.array(state['rows_read_beyond'], np.int64)
    self.rows_read = np.array(state['rows_read'], np.int64)[:, None] + beyond
    self._since = int(state['since'])
    self._given_before = list(state['given_before'])


def share_out(weights: Sequence[Fraction], *, given: Sequence[int], batch_size: int, num_batches: int) -> list[int]:
  """Returns how many rows of the next batch each source gives; all together B.

  After `num_batches` batches, this one included, a source of weight w should have given w * B * num_batches rows. What
  it has given, `given` in the batches before included, differs from that by at most 1 - 1/(2S - 2). The weights [S] are
  positive, and their sum is 1.
  """
  slack = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
  targets = [weight * batch_size * num_batches for weight in weights]
  counts: list[int] = []
  for target, had in zip(targets, given, strict=True):  # what is due now
    counts.append(max(0, min(math.ceil(target - slack) - had, batch_size - sum(counts))))

  def deadline(source: int) -> tuple[bool, Fraction]:
    """When the source's next row is due, in batches times B; behind all others if it would come too early."""
    after = given[source] + counts[source] + 1
    return after > targets[source] + slack, (after - 1 + slack) / weights[source]

  for _ in range(batch_size - sum(counts)):
    counts[min(range(len(counts)), key=deadline)] += 1
  return counts


def deal(counts: Sequence[int], behind: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Returns which source each row of a batch gets, int [B].

  Args:
    counts: [S], how many rows each source gives.
    behind: int64 [S, B], by how much less row r has read of source s than the rows do on average.
    order: int64 [B], a permutation that breaks ties.
  """
  num_rows = order.size
  dealt = np.full(num_rows, -1)
  rare_first = sorted((source for source, count in enumerate(counts) if count), key=lambda source: counts[source])
  for number, source in enumerate(rare_first, 1):
    left, rows = rare_first[number:], np.flatnonzero(dealt < 0)
    # A row takes this source before another row does if it wants it more than what else it could get.
    wish = behind[source, rows]
    if left:
      wish = wish - behind[left][:, rows].max(axis=0)
    chosen = rows[np.argpartition(order[rows] - num_rows * wish, counts[source] - 1)[: counts[source]]]  # unique keys
    dealt[chosen] = source
  return dealt
