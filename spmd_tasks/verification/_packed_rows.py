"""PackedRows: a batch whose rows have three documents each, and batches that differ from it in some of them.

In every second row a document starts in the middle, which is a border between devices that share a row; in the others,
a document has the middle. Each row keeps one document: rows 0 and 1 the first, rows 2 and 3 the second and so on.
Batches of few rows come several times, until every document was kept.

Shapes: B rows, T sequence, S sequence of an encoder.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.verification._settings import Batch

NUM_DOCUMENTS = 3
Columns = Mapping[int, Sequence[slice]]  # T or S -> for each row, the columns of the document that it keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """Two batches in which the documents that rows keep are the same, and alone have loss weights.

  Attributes:
    name: 'beside others' or 'alone': what the second batch has around them.
    batches: the first one and the other.
    columns: of the kept documents in both.
  """

  name: str
  batches: tuple[Batch, Batch]
  columns: tuple[Columns, Columns]


class PackedRows:
  """Rows of three documents, with the shapes of a batch.

  Attributes:
    batch: every token has the loss weight 1.
  """

  def __init__(self, batch: Batch, seed: int):
    """Takes the tokens and labels of `batch`. Raises a UserError if all are the same, so that none can be changed."""
    self._columns: dict[int, list[list[slice]]] = {}  # T or S -> row -> the columns of its documents
    self._shape, self._rng = batch['ids'].shape, np.random.default_rng((seed, 44))
    self.batch = dict(batch)
    for side in ('encoder_', ''):
      if f'{side}ids' in batch:
        self.batch |= self._pack(batch, side)
    # The values that other documents have, by entry.
    self._tokens = {name: np.unique(x) for name, x in self.batch.items() if name in ('ids', 'encoder_ids')}
    if self._has_entry('labels'):
      labels = batch['labels']
      known = labels[batch['weights'] > 0] if self._has_entry('weights') else labels
      self._tokens['labels'] = np.unique(known if known.size else np.maximum(labels, 0))
      is_known = np.isin(labels, self._tokens['labels'])
      self.batch['labels'] = np.where(is_known, labels, self._tokens['labels'][0])
    if self._has_entry('weights'):
      self.batch['weights'] = np.ones_like(batch['weights'])
    if len(self._tokens['ids']) < 2:
      raise UserError('all tokens of the batch are the same, so documents cannot differ.')

  def _has_entry(self, name: str) -> bool:
    return name in self.batch and self.batch[name].shape == self._shape

  def _pack(self, batch: Batch, side: str) -> Batch:
    num_rows, length = batch[f'{side}ids'].shape
    middle, short, long = length // 2, max(length // 4, 1), max(length // 3, 1)
    bounds = ((0, short, short + long, length), (0, max(middle - long, 1), middle, length))
    columns = [[slice(*pair) for pair in itertools.pairwise(bounds[row % 2])] for row in range(num_rows)]
    lengths = np.array([[place.stop - place.start for place in places] for places in columns])
    position = np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    values = {
      'ids': np.maximum(batch[f'{side}ids'], 1),
      'segment_ids': np.array([np.repeat(np.arange(NUM_DOCUMENTS) + 1, row) for row in lengths]),
      'segment_pos': position,
      'prefix_mask': position < np.array([np.repeat((row + 1) // 2, row) for row in lengths]),
    }
    self._columns[length] = columns
    return {side + name: x.astype(batch[side + name].dtype) for name, x in values.items() if side + name in batch}

  def _kept(self) -> Iterator[list[int]]:
    """Yields the number of the document that each row keeps."""
    num_rows = self._shape[0]
    for first in range(0, NUM_DOCUMENTS, max(num_rows // 2, 1)):
      yield [(row // 2 + first) % NUM_DOCUMENTS for row in range(num_rows)]

  def pairs(self) -> Iterator[Pair]:
    """Yields pairs of batches: the second has other documents around the kept ones, or nothing but padding."""
    for kept in self._kept():
      own = {length: [places[k] for places, k in zip(rows, kept)] for length, rows in self._columns.items()}
      first = {length: [slice(0, p.stop - p.start) for p in places] for length, places in own.items()}
      base = self._with_weights(own)
      others = self._changed(base, [{*range(NUM_DOCUMENTS)} - {k} for k in kept])
      yield Pair(name='beside others', batches=(base, others), columns=(own, own))
      yield Pair(name='alone', batches=(base, self._alone(base, own)), columns=(own, first))

  def quadruples(self) -> Iterator[tuple[Batch, Batch, Batch, Batch]]:
    """Yields the batch; with other kept documents; with others around them; and with both. All tokens have weights."""
    for kept in self._kept():
      first = self._changed(self.batch, [{k} for k in kept])
      second = self._changed(self.batch, [{*range(NUM_DOCUMENTS)} - {k} for k in kept])
      both = {name: np.where(second[name] != x, second[name], first[name]) for name, x in self.batch.items()}
      yield self.batch, first, second, both

  def _changed(self, batch: Batch, documents: Sequence[set[int]]) -> Batch:
    """Returns the batch with other tokens and labels in these documents of each row."""
    batch = dict(batch)
    for name, tokens in self._tokens.items():
      x = batch[name]
      steps = self._rng.integers(1, max(len(tokens), 2), x.shape)
      other = tokens[(np.searchsorted(tokens, x) + steps) % len(tokens)]
      is_changed = np.zeros(x.shape, bool)
      for row, numbers in enumerate(documents):
        for number in numbers:
          is_changed[row, self._columns[x.shape[1]][row][number]] = True
      batch[name] = np.where(is_changed, other, x).astype(x.dtype)
    return batch

  def _with_weights(self, own: Columns) -> Batch:
    """Returns the batch with the loss weight 0 outside of these columns."""
    if not self._has_entry('weights'):
      return self.batch
    weights = np.zeros_like(self.batch['weights'])
    for row, place in enumerate(own[self._shape[1]]):
      weights[row, place] = 1
    return {**self.batch, 'weights': weights}

  def _alone(self, batch: Batch, own: Columns) -> Batch:
    """Returns the batch with these columns at the start of the row, and zeros after them."""
    batch = dict(batch)
    for name, x in batch.items():
      if x.ndim > 1 and len(x) == self._shape[0] and x.shape[1] in own:
        batch[name] = np.zeros_like(x)
        for row, place in enumerate(own[x.shape[1]]):
          batch[name][row, : place.stop - place.start] = x[row, place]
        if name.endswith('segment_ids'):
          batch[name] = np.minimum(batch[name], 1)
    return batch


def at_columns(x: np.ndarray, columns: Columns, *, without_last: int = 0) -> np.ndarray:
  """Returns the tokens [n, ...] of x [B, T, ...] in a row's columns, without the last ones of each document."""
  kept = [x[row, place] for row, place in enumerate(columns[x.shape[1]])]
  return np.concatenate([tokens[: max(len(tokens) - without_last, 1)] for tokens in kept])
