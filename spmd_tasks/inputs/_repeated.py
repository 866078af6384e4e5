"""Repeats a finite input without end, its epochs one behind the other without padding between them."""

from collections.abc import Iterator, Sequence
import dataclasses

import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
  """The rows of a finite input again and again, but for those without a token to learn (weights all 0), as in padding.

  Where an epoch ends within a batch, the next one goes on in the same batch. So a row's place in the batch changes from
  epoch to epoch, and every host reads the input whole and keeps its rows.
  """

  input: base.Input

  @property
  def batch_size(self) -> int:
    return self.input.batch_size

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self.input.element_spec()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'RepeatedIterator':
    rows = base.shard_rows(self.batch_size, shard_index, shard_count)
    return RepeatedIterator(self.input.make_iterator(0, 1), self.batch_size, rows)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    if any(state != states[0] for state in states):
      raise UserError('the shards were saved at different batches.')
    return [dict(states[0]) for _ in range(shard_count)]

  def epochs(self, state: base.State) -> float:
    """Returns how often the input has been read at a position: whole epochs, unless the input itself counts finer."""
    within = base.epochs_of(self.input, state['input'])
    return state['epoch'] + (within or 0.0)


class RepeatedIterator:
  """The rows `rows` of each batch of a Repeated."""

  def __init__(self, iterator: base.InputIterator, batch_size: int, rows: range):
    self._iterator = iterator
    self._batch_size = batch_size
    self._rows = rows
    self._beginning = iterator.get_state()
    self._epoch = 0
    self._batch: base.Batch | None = None  # rows that are kept, the first `_used` of which have been used
    self._used = 0
    self._before = self._beginning  # the position before `_batch`
    self._resume: base.State | None = None  # where to go on after an error

  def __iter__(self) -> Iterator[base.Batch]:
    return self

  def __next__(self) -> base.Batch:
    if self._resume is not None:
      self.set_state(self._resume)
    position = self.get_state()
    parts, missing = [], self._batch_size
    try:
      while missing:
        batch = self._current()
        count = min(missing, _num_rows(batch) - self._used)
        parts.append({name: rows[self._used : self._used + count] for name, rows in batch.items()})
        self._used += count
        missing -= count
    except BaseException:
      self._resume = position  # or the rows that are in `parts` would be lost
      raise
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {name: rows[self._rows.start : self._rows.stop] for name, rows in whole.items()}

  def _current(self) -> base.Batch:
    """A batch of which rows are left."""
    num_ends = 0
    while self._batch is None or self._used >= _num_rows(self._batch):
      skipped = self._used if self._batch is None else 0  # of a restored position
      self._before = self._iterator.get_state()
      try:
        batch = next(self._iterator)
      except StopIteration:
        num_ends += 1
        if num_ends > 1:
          raise UserError(
            'it cannot be repeated, for it has no row with a token to learn: put examples in it, or leave it out.'
          ) from None
        self._iterator.set_state(self._beginning)
        self._epoch += 1
        self._batch, self._used = None, 0
        continue
      self._batch, self._used = _rows_with_weight(batch), skipped
      num_ends = 0 if _num_rows(self._batch) else num_ends
    return self._batch

  def get_state(self) -> base.State:
    if self._resume is not None:
      return self._resume
    if self._batch is not None and self._used >= _num_rows(self._batch):
      return {'kind': 'repeated', 'epoch': self._epoch, 'input': self._iterator.get_state(), 'num_rows_used': 0}
    at = self._iterator.get_state() if self._batch is None else self._before
    return {'kind': 'repeated', 'epoch': self._epoch, 'input': at, 'num_rows_used': self._used}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, {'kind': 'repeated'})
    self._iterator.set_state(state['input'])
    self._epoch = int(state['epoch'])
    self._batch, self._used, self._resume = None, int(state['num_rows_used']), None

  def close(self) -> None:
    self._iterator.close()


def _num_rows(batch: base.Batch) -> int:
  return len(next(iter(batch.values())))


def _rows_with_weight(batch: base.Batch) -> base.Batch:
  weights = batch.get('weights')
  if weights is None:
    return batch
  is_kept = weights.reshape(len(weights), -1).any(axis=1)
  return batch if is_kept.all() else {name: rows[is_kept] for name, rows in batch.items()}
