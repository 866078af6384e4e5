"""Names the rows of a batch: their sources, the blocks of text that they are from, their documents, their first words.

    describe_rows(job, position)      # [{'row': 0, 'source': 'web', 'from': ['a.jsonl: lines 1 to 9'], ...}, ...]

The batch is read again from its position in the input. What is known depends on the input: of a TextInput the blocks
(a text file's part, a file's lines), of a Mixture the source of each row and what that source knows, of other data the
number of the batch.
"""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any

import grain
import jax
import numpy as np

from spmd_tasks.experiment import Job, make_training_iterator
from spmd_tasks.inputs import Batch, Input, Mixture, State, TextInput
from spmd_tasks.inputs.base import shard_rows, source_of_rows
from spmd_tasks.inputs.tokenizers import decode_all

_SHOWN_TOKENS = 32


def describe_rows(job: Job, position: State | None) -> list[dict[str, Any]]:
  """Reads this process's rows of the batch behind `position` (None: the first) and says of each what is known."""
  with contextlib.closing(make_training_iterator(job)) as iterator:
    if position is not None:
      iterator.set_state(position)
    before, batch = iterator.get_state(), next(iterator)
    after = iterator.get_state()
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  places, sources = _places(job.train_input, before, after, batch), source_of_rows(job.train_input, batch)
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


def _places(given: Input, before: State, after: State, batch: Batch) -> list[list[str]]:
  """Returns where in the data each of this process's rows is from."""
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  if isinstance(given, Mixture):
    return _places_of_mixture(given, before, batch)
  if isinstance(given, TextInput) and given.num_epochs is None:
    lanes = shard_rows(given.batch_size, jax.process_index(), jax.process_count())
    pairs = zip(lanes, before['lanes'], after['lanes'], strict=True)
    blocks = _Blocks(given)
    return [list(blocks.names(lane, begin, end)) for lane, begin, end in pairs]
  numbers = {
    name: after[name] for name in ('num_passes', 'num_read', 'num_batches') if isinstance(after.get(name), int)
  }
  return [[', '.join(f'{name} {number}' for name, number in numbers.items())] if numbers else []] * num_rows


class _Blocks:
  """The blocks of a TextInput's source in the order of reading."""

  def __init__(self, given: TextInput):
    self._given = given
    self._source = given.source.open()
    order = grain.MapDataset.source(range(len(self._source)))
    if given.shuffle:
      order = order.seed(given.seed).shuffle()
    self._order = order.repeat(None)

  def names(self, lane: int, begin: list[int], end: list[int]) -> Iterator[str]:
    """Names the blocks that a lane has read between two positions; see Lane of inputs/packing.py."""
    (first, offset, _), (last, used, _) = begin, end
    for number in range(first, last + (used > 0)):
      index = int(self._order[lane + number * self._given.batch_size])
      if number > first or not offset or offset < self._num_tokens(index):
        yield self._source.block_name(index)

  @functools.cached_property
  def _encoder(self) -> Any:
    return self._given.block_encoder()

  def _num_tokens(self, index: int) -> int:
    return int(self._encoder.encode(self._source[index]).ids.size)


def _places_of_mixture(given: Mixture, before: State, batch: Batch) -> list[list[str]]:
  """Reads, for each row, the batch of its source that the row is taken from."""
  is_from = batch['row_sources']
  choice, index, count = before['choice'], jax.process_index(), jax.process_count()
  read = np.array(choice['rows_read'])[:, None] + np.array(choice['rows_read_beyond'])
  read = read[:, index * len(is_from) : (index + 1) * len(is_from)]
  places: list[list[str]] = [[] for _ in is_from]
  for number, (name, source) in enumerate(given.sources.items()):
    rows = np.flatnonzero(is_from[:, number])
    saved = before['sources'][name]
    with contextlib.closing(source.make_iterator(index, count)) as iterator:
      iterator.set_state(saved['position'])
      for wanted in range(saved['first_batch'], int(read[number, rows].max(initial=-1)) + 1):
        begin, own = iterator.get_state(), next(iterator)
        if not (here := rows[read[number, rows] == wanted]).size:
          continue
        found = _places(source, begin, iterator.get_state(), own)
        for row in here:
          places[row] = found[row]
  return places
