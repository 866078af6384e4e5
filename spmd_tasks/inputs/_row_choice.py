"""Chooses the source of each row of a mixture's batches; every host computes the same choice, without communication.

Row r of the mixture reads row r of a source's batches, one after another, so a host reads only its own rows of each
source. The choice takes two steps, both in exact integers and fractions:

1. How many rows of the batch each source gets (`apportion`). After any number of batches with the same weights, the
   rows of each source differ from its weight by less than one row: Tijdeman's solution of the chairman assignment
   problem (Discrete Mathematics 32, 1980), by earliest deadlines.
2. Which rows these are (`assign_rows`). Rows that have read less of a source than others get it first; random numbers
   of (seed, batch) break ties. All rows therefore read a source at nearly the same pace, and few of its batches have to
   be buffered.

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
  """Chooses the sources of the next batch from what each row of the batch has read of each source.

  Attributes:
    schedule: (first batch, weights [S]) pairs; the first pair begins at batch 0.
    seed: the seed of the random numbers that break ties.
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
    # The first batch with the current weights, and how many rows of each source were read before it.
    self._since, self._rows_before = 0, [0] * num_sources

  def choose(self) -> np.ndarray:
    """Returns the source of each row of the next batch, int32 [B]."""
    since, rows_before = self._phase()
    weights = self._weights()
    sources = [source for source, weight in enumerate(weights) if weight]
    num_read = self.rows_read.sum(axis=1).tolist()
    total = sum(weights[source] for source in sources)
    counts = apportion(
      [weights[source] / total for source in sources],
      num_before=[num_read[source] - rows_before[source] for source in sources],
      batch_size=self.batch_size,
      num_batches=self.num_batches - since + 1,
    )
    rows_read = self.rows_read[sources]
    deficits = rows_read.sum(axis=1, keepdims=True) - self.batch_size * rows_read  # times B
    order = np.random.Philox(key=self.seed, counter=self.num_batches << 64).random_raw(self.batch_size)
    return np.array(sources, np.int32)[assign_rows(counts, deficits, np.argsort(np.argsort(order, kind='stable')))]

  def num_batches_needed(self, choice: np.ndarray) -> list[int]:
    """Returns how many batches of each source have to be read for `choice`, counted from its first batch: [S]."""
    needed = self.rows_read + (choice == np.arange(len(self.rows_read))[:, None])
    return needed.max(axis=1).tolist()

  def advance(self, choice: np.ndarray) -> None:
    """Records that the batch of a choice was read."""
    self._since, self._rows_before = self._phase()
    self.rows_read += choice == np.arange(len(self.rows_read))[:, None]
    self.num_batches += 1

  def _weights(self) -> Sequence[Fraction]:
    return [weights for first, weights in self.schedule if first <= self.num_batches][-1]

  def _phase(self) -> tuple[int, list[int]]:
    """Returns the first batch with the weights of the next batch, and the rows of each source read before it, [S]."""
    if any(self._since < first <= self.num_batches for first, _ in self.schedule):
      return self.num_batches, self.rows_read.sum(axis=1).tolist()
    return self._since, self._rows_before

  def get_state(self) -> dict[str, Any]:
    """Returns the position as JSON data."""
    lowest = self.rows_read.min(axis=1)
    return {
      'num_batches': self.num_batches,
      'rows_read': lowest.tolist(),
      'rows_read_beyond': (self.rows_read - lowest[:, None]).tolist(),
      'since': self._since,
      'given_before': list(self._rows_before),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves to a position of a RowChoice with the same numbers of sources and rows."""
    self.num_batches = int(state['num_batches'])
    beyond = np.array(state['rows_read_beyond'], np.int64)
    self.rows_read = np.array(state['rows_read'], np.int64)[:, None] + beyond
    self._since = int(state['since'])
    self._rows_before = list(state['given_before'])


def apportion(
  weights: Sequence[Fraction], *, num_before: Sequence[int], batch_size: int, num_batches: int
) -> list[int]:
  """Returns how many rows of the next batch each source gets; the sum is B.

  After `num_batches` batches, including this one, a source of weight w should have had w * B * num_batches rows. It has
  had `num_before` rows before this batch, and the result keeps the difference within 1 - 1/(2S - 2). The weights [S]
  are positive, and their sum is 1.
  """
  slack = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
  targets = [weight * batch_size * num_batches for weight in weights]
  counts: list[int] = []
  for target, before in zip(targets, num_before, strict=True):  # the rows that are due in this batch
    counts.append(max(0, min(math.ceil(target - slack) - before, batch_size - sum(counts))))

  def deadline(source: int) -> tuple[bool, Fraction]:
    """Returns when the source's next row is due, in batches times B; last if it would exceed the slack now."""
    after = num_before[source] + counts[source] + 1
    return after > targets[source] + slack, (after - 1 + slack) / weights[source]

  for _ in range(batch_size - sum(counts)):
    counts[min(range(len(counts)), key=deadline)] += 1
  return counts


def assign_rows(counts: Sequence[int], deficits: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Returns the source of each row of a batch, int [B].

  Args:
    counts: [S], how many rows each source gets.
    deficits: int64 [S, B], how much less of source s row r has read than the average row.
    order: int64 [B], a permutation that breaks ties.
  """
  num_rows = order.size
  assigned = np.full(num_rows, -1)
  rare_first = sorted((source for source, count in enumerate(counts) if count), key=lambda source: counts[source])
  for number, source in enumerate(rare_first, 1):
    others, rows = rare_first[number:], np.flatnonzero(assigned < 0)
    # Rows are ranked by how much larger their deficit is in this source than in the sources that remain.
    preference = deficits[source, rows]
    if others:
      preference = preference - deficits[others][:, rows].max(axis=0)
    keys = order[rows] - num_rows * preference  # which are distinct
    assigned[rows[np.argpartition(keys, counts[source] - 1)[: counts[source]]]] = source
  return assigned
