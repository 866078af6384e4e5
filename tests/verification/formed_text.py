"""FormedText: synthetic tokens in rows that are padded, packed from several documents, or weighted."""

import dataclasses
from typing import Any

import numpy as np

from spmd_tasks.inputs import SyntheticText

FORMS = ('full', 'padded', 'packed', 'weighted', 'bare')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormedText(SyntheticText):
  """SyntheticText whose rows have lengths, documents or weights that depend on their tokens.

  Fields:
    form: 'full': whole rows. 'padded': rows of 0 to T tokens. 'packed': up to three documents per row, then padding.
      'weighted': whole rows with weights from 0 to 2. 'bare': whole rows without segment ids.
  """

  form: str = 'padded'

  def element_spec(self) -> Any:
    return _without_segments(super().element_spec()) if self.form == 'bare' else super().element_spec()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> Any:
    return _FormedRows(super().make_iterator(shard_index, shard_count), self.form)


class _FormedRows:
  """Changes the rows of a SyntheticIterator; has no other state."""

  def __init__(self, rows: Any, form: str):
    self._rows, self._form = rows, form

  def __iter__(self):
    return self

  def __next__(self):
    batch = next(self._rows)
    length = batch['ids'].shape[1]
    columns = np.arange(length)[None, :]
    # Lengths are functions of a row's own tokens, so they do not depend on the process that reads the row.
    first, second, third = (batch['ids'].astype(np.int64) @ np.arange(1, length + 1) ** n for n in (1, 2, 3))
    if self._form == 'padded':
      stop = first[:, None] % (length + 1)
      _mask(batch, columns < stop)
    elif self._form == 'packed':
      starts = np.sort(np.stack([first, second, third], axis=1) % (length + 1), axis=1)
      _mask(batch, columns < np.maximum(starts[:, 2:], 1))
      segments = 1 + (columns >= starts[:, :1]).astype(np.int32) + (columns >= starts[:, 1:2])
      batch['segment_ids'] *= segments
      first_columns = np.where(columns == 0, 0, np.where(np.diff(segments, axis=1, prepend=1) > 0, columns, 0))
      batch['segment_pos'][:] = np.maximum(columns - np.maximum.accumulate(first_columns, axis=1), 0)
    elif self._form == 'weighted':
      batch['weights'] *= (first % 5)[:, None].astype(np.float32) / 2
    return _without_segments(batch) if self._form == 'bare' else batch

  def __getattr__(self, name):
    return getattr(self._rows, name)


def _without_segments(batch: Any) -> Any:
  return {name: values for name, values in batch.items() if not name.startswith('segment')}


def _mask(batch: Any, is_text: np.ndarray) -> None:
  for name in ('weights', 'segment_ids'):
    batch[name] *= is_text.astype(batch[name].dtype)
