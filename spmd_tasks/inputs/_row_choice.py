"""Chooses the source of every row of a mixture's batches: the same on every host, without a word between them.

Row r of every batch reads its own part of each source: row r of the source's batches, one after another. So a host
reads of every source only the rows that it needs, whatever the number of hosts. The choice has two parts.

1. How many rows of a batch each source gives. After any number of batches, each source has given the rows that its
   weight says, to less than one row: Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
   1980), by earliest deadlines. This count begins anew when the weights change or a source has ended.
2. Which rows these are. Rows that are behind the others in a source get it first; ties fall by random numbers of (seed,
   batch). So all rows read a source at nearly the same pace, and few of its batches have to be kept.

Everything is computed in integers and fractions from the seed and the batches before, so there is no rounding.

Shapes: B rows of the global batch, S sources.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from fractions import Fraction
import math
from typing import Any

import numpy as np

NO_SOURCE = -1  # of a row of padding: every source has ended there


@dataclasses.dataclass
class RowChoice:
  """The number of rows that each row of the batch has read of each source, and from it the next batch's sources.

  Attributes:
    batch_size: B.
    schedule: (first batch, weights [S]) pairs; the first pair begins at batch 0.
    seed: of the random numbers that break ties.
    num_batches: how many batches have been chosen.
    rows_read: int64 [S, B], how many rows of source s row r of the batch has read.
    ends: [S], how many batches a source has, once it has ended; else None.
  """

  batch_size: int
  schedule: Sequence[tuple[int, Sequence[Fraction]]]
  seed: int

  def __post_init__(self):
    num_sources = len(self.schedule[0][1])
    self.num_batches = 0
    self.rows_read = np.zeros((num_sources, self.batch_size), np.int64)
    self.ends: list[int | None] = [None] * num_sources
    # Since when the same weights hold for the same sources, and how many rows each had given before.
    self._since, self._sources, self._given_before = 0, self._open_sources(), [0] * num_sources

  def choose(self) -> np.ndarray | None:
    """Returns the source of each row of the next batch, int32 [B], NO_SOURCE for padding; None if no source is left."""
    since, sources, given_before = self._phase()
    if not sources:
      return None
    has_rows = np.stack([self._has_rows(source) for source in sources])
    given = self.rows_read.sum(axis=1).tolist()
    weights = self._weights()
    total = sum(weights[source] for source in sources)
    counts = share_out(
      [weights[source] / total for source in sources],
      given=[given[source] - given_before[source] for source in sources],
      limits=has_rows.sum(axis=1).tolist(),
      batch_size=self.batch_size,
      num_batches=self.num_batches - since + 1,
    )
    rows_read = self.rows_read[list(sources)]
    behind = rows_read.sum(axis=1, keepdims=True) - self.batch_size * rows_read  # times B
    order = np.random.Philox(key=self.seed, counter=self.num_batches << 64).random_raw(self.batch_size)
    dealt = deal(counts, behind, has_rows, np.argsort(np.argsort(order, kind='stable')))
    return np.append(np.array(sources, np.int32), np.int32(NO_SOURCE))[dealt]

  def num_batches_needed(self, choice: np.ndarray) -> list[int]:
    """Returns how many batches of each source, from its beginning, `choice` and all choices before it need: [S]."""
    needed = self.rows_read + (choice == np.arange(len(self.ends))[:, None])
    return needed.max(axis=1).tolist()

  def advance(self, choice: np.ndarray) -> None:
    """Takes a batch that `choose` has returned as read."""
    self._since, self._sources, self._given_before = self._phase()
    self.rows_read += choice == np.arange(len(self.ends))[:, None]
    self.num_batches += 1

  def _weights(self) -> Sequence[Fraction]:
    return [weights for first, weights in self.schedule if first <= self.num_batches][-1]

  def _has_rows(self, source: int) -> np.ndarray:
    """Whether each row of the batch has rows of the source left to read, bool [B]."""
    end = self.ends[source]
    return np.full(self.batch_size, True) if end is None else self.rows_read[source] < end

  def _open_sources(self) -> tuple[int, ...]:
    """The sources that have a weight in the next batch, and rows."""
    return tuple(s for s, weight in enumerate(self._weights()) if weight and self._has_rows(s).any())

  def _phase(self) -> tuple[int, tuple[int, ...], list[int]]:
    """Since which batch the weights and sources of the next batch hold, the sources, and [S] rows given before."""
    sources = self._open_sources()
    has_changed = any(self._since < first <= self.num_batches for first, _ in self.schedule)
    if has_changed or sources != self._sources:
      return self.num_batches, sources, self.rows_read.sum(axis=1).tolist()
    return self._since, sources, self._given_before

  def get_state(self) -> dict[str, Any]:
    """The position as JSON data."""
    lowest = self.rows_read.min(axis=1)
    return {
      'num_batches': self.num_batches,
      'rows_read': lowest.tolist(),
      'rows_read_beyond': (self.rows_read - lowest[:, None]).tolist(),
      'ends': list(self.ends),
      'since': self._since,
      'sources': list(self._sources),
      'given_before': list(self._given_before),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues at a position that a RowChoice of as many sources and rows gave."""
    self.num_batches = int(state['num_batches'])
    beyond = np.array(state['rows_read_beyond'], np.int64)
    self.rows_read = np.array(state['rows_read'], np.int64)[:, None] + beyond
    self.ends = list(state['ends'])
    self._since, self._sources = int(state['since']), tuple(state['sources'])
    self._given_before = list(state['given_before'])


def share_out(
  weights: Sequence[Fraction], *, given: Sequence[int], limits: Sequence[int], batch_size: int, num_batches: int
) -> list[int]:
  """Returns how many rows of the next batch each source gives; all together B, unless the limits do not allow it.

  After `num_batches` batches, this one included, a source of weight w should have given w * B * num_batches rows. What
  it has given, `given` included, differs from that by at most 1 - 1/(2S - 2), as long as no limit prevents it.

  Args:
    weights: [S], positive, their sum is 1.
    given: [S], rows given in the batches before.
    limits: [S], the most that each source can give now.
    batch_size: B.
    num_batches: how many batches the weights have held, this one included.
  """
  slack = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
  targets = [weight * batch_size * num_batches for weight in weights]
  counts: list[int] = []
  for target, had, limit in zip(targets, given, limits, strict=True):  # what is due now
    counts.append(max(0, min(math.ceil(target - slack) - had, limit, batch_size - sum(counts))))

  def deadline(source: int) -> tuple[bool, Fraction]:
    """When the source's next row is due, in batches times B; behind all others if it would come too early."""
    after = given[source] + counts[source] + 1
    return after > targets[source] + slack, (after - 1 + slack) / weights[source]

  for _ in range(batch_size - sum(counts)):
    able = [source for source, count in enumerate(counts) if count < limits[source]]
    if not able:
      break
    counts[min(able, key=deadline)] += 1
  return counts


def deal(counts: Sequence[int], behind: np.ndarray, has_rows: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Returns which source each row of a batch gets, int [B]; -1 where none of them has rows left.

  Args:
    counts: [S], how many rows each source gives.
    behind: int64 [S, B], by how much less row r has read of source s than the rows do on average.
    has_rows: bool [S, B], whether row r can still read from source s.
    order: int64 [B], a permutation that breaks ties.
  """
  num_rows = order.size
  dealt = np.full(num_rows, -1)
  # First the sources that only some rows can read, then the rare ones: the others can go wherever there is room.
  left = sorted(range(len(counts)), key=lambda source: (bool(has_rows[source].all()), counts[source], source))
  unreadable = np.where(has_rows, behind, np.iinfo(np.int64).min // (4 * num_rows))
  while left:
    source = left.pop(0)
    rows = np.flatnonzero((dealt < 0) & has_rows[source])
    count = min(counts[source], rows.size)
    if not count:
      continue
    # A row takes this source before another row does if it wants it more than what else it could get.
    wish = behind[source, rows]
    if left:
      wish = wish - unreadable[left][:, rows].max(axis=0)
    chosen = rows[np.argpartition(order[rows] - num_rows * wish, count - 1)[:count]]  # the keys are unique
    dealt[chosen] = source
  rows = np.flatnonzero(dealt < 0)
  if rows.size:  # some source had fewer rows than it was to give: whoever is behind most in what they can read
    best = unreadable[:, rows].argmax(axis=0)
    dealt[rows] = np.where(has_rows[best, rows], best, -1)
  return dealt
