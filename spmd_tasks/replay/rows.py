"""Names the rows of a batch: their sources, the blocks of text that they are from, their documents, their first words.

    describe_rows(job, position)      # [{'row': 0, 'source': 'web', 'from': ['a.jsonl: lines 1 to 9'], ...}, ...]

The batch is read again from its position in the input. What is known depends on the input: of a TextInput the blocks
(a text file's part, a file's lines), of a Mixture the source of each row and what that source knows, of other data the
number of the batch.
"""

import contextlib
from typing import Any, cast

import jax
import numpy as np

from spmd_tasks.experiment import Job, make_training_iterator
from spmd_tasks.inputs import Batch, Input, InputIterator, Mixture, State
from spmd_tasks.inputs.base import RowIterator, reads_rows, source_of_rows
from spmd_tasks.inputs.text_input import TextIterator
from spmd_tasks.inputs.tokenizers import decode_all

_SHOWN_TOKENS = 32


def describe_rows(job: Job, position: State | None) -> list[dict[str, Any]]:
  """Reads this process's rows of the batch behind `position` (None: the first) and says of each what is known."""
  with contextlib.closing(make_training_iterator(job)) as iterator:
    if position is not None:
      iterator.set_state(position)
    before, batch = iterator.get_state(), next(iterator)
    places = _places(job.train_input, iterator, before, batch)
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  sources = source_of_rows(job.train_input, batch)
  first = jax.process_index() * num_rows
  described = []
  for row in range(num_rows):
    entry: dict[str, Any] = {'row': first + row, 'from': places[row]}
    if sources:
      entry['source'] = sources[row]
    described.append(entry | _contents(job, batch, row))
  return described


def _contents(job: Job, batch: Batch, row: int) -> dict[str, Any]:
  """The documents of a row of tokens, and the text that it begins with."""
  entry: dict[str, Any] = {}
  if 'segment_ids' in batch:
    entry['tokens_per_document'] = np.bincount(batch['segment_ids'][row].ravel())[1:].tolist()
  if 'weights' in batch:
    entry['loss_weight'] = float(batch['weights'][row].sum())
  ids = batch.get('ids')
  if ids is not None and ids.ndim == 2:
    shown = ids[row, :_SHOWN_TOKENS].tolist()
    entry['begins'] = shown if job.tokenizer is None else decode_all(job.tokenizer, shown)
  return entry


def _places(given: Input, iterator: InputIterator, before: State, batch: Batch) -> list[list[str]]:
  """Returns where in the data each of this process's rows is from, of the last batch of an iterator."""
  if isinstance(given, Mixture):
    return _places_of_mixture(given, before, batch)
  if isinstance(iterator, TextIterator) and (origins := iterator.origins()) is not None:
    return origins
  after = iterator.get_state()
  numbers = {
    name: after[name] for name in ('num_passes', 'num_read', 'num_batches') if isinstance(after.get(name), int)
  }
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  return [[', '.join(f'{name} {number}' for name, number in numbers.items())] if numbers else []] * num_rows


def _places_of_mixture(given: Mixture, before: State, batch: Batch) -> list[list[str]]:
  """Reads the rows of each source again, from the position before the batch."""
  index, count = jax.process_index(), jax.process_count()
  with contextlib.closing(given.make_iterator(index, count)) as mixture:
    mixture.set_state(before)
    of_all = mixture.next_choice()
  choice, num_rows = before['choice'], len(batch['row_sources'])
  own = slice(index * num_rows, (index + 1) * num_rows)
  read = (np.array(choice['rows_read'])[:, None] + np.array(choice['rows_read_beyond']))[:, own]
  places: list[list[str]] = [[] for _ in range(num_rows)]
  for number, (name, source) in enumerate(given.leaves.items()):
    rows = np.flatnonzero(of_all[own] == number)
    saved = before['sources'][name]
    with contextlib.closing(source.make_iterator(index, count)) as iterator:
      iterator.set_state(saved['position'])
      if reads_rows(iterator):
        begin, ranks = iterator.get_state(), np.cumsum(of_all == number)[own][rows] - 1
        part = cast(RowIterator, iterator).next_rows(int((of_all == number).sum()), ranks.tolist())
        for row, found in zip(rows, _places(source, iterator, begin, part), strict=True):
          places[row] = found
        continue
      for wanted in range(saved['first_batch'], int(read[number, rows].max(initial=-1)) + 1):
        begin, part = iterator.get_state(), next(iterator)
        if not (here := rows[read[number, rows] == wanted]).size:
          continue
        of_batch = _places(source, iterator, begin, part)
        for row in here:
          places[row] = of_batch[row]
  return places
