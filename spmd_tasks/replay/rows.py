"""Describes the rows of a batch: their origins, documents and first words, and entries that are not finite.

    describe_rows(job, position)      # [{'row': 0, 'source': 'web', 'from': ['a.jsonl bytes 0-930'], ...}, ...]

The batch is read again from its position in the input. The description depends on the input: a TextInput knows the
blocks of each row, plain data the batch and row that it was, a Mixture the source of each row and the source's
description, and other data only the number of the batch.
"""

import contextlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.experiment import Job, make_training_iterator
from spmd_tasks.inputs import Batch, Input, InputIterator, Mixture, State
from spmd_tasks.inputs.base import RowIterator, reads_rows, source_of_rows
from spmd_tasks.inputs.tokenizers import decode_all

_SHOWN_TOKENS = 32


def describe_rows(job: Job, position: State | None) -> list[dict[str, Any]]:
  """Reads the batch after `position` (None: the first batch), and describes this process's rows."""
  with contextlib.closing(make_training_iterator(job)) as iterator:
    if position is not None:
      iterator.set_state(position)
    before, batch = iterator.get_state(), next(iterator)
    origins = _origins(job.train_input, iterator, before, batch)
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  sources = source_of_rows(job.train_input, batch)
  first = jax.process_index() * num_rows
  described = []
  for row in range(num_rows):
    entry: dict[str, Any] = {'row': first + row, 'from': origins[row]}
    if sources:
      entry['source'] = sources[row]
    described.append(entry | _contents(job, batch, row))
  return described


def _contents(job: Job, batch: Batch, row: int) -> dict[str, Any]:
  """Returns the lengths of a row's documents, its loss weight, its first words, and its values that are not finite."""
  entry: dict[str, Any] = {'not_finite': {}}
  for name, rows in batch.items():
    if rows.ndim and jnp.issubdtype(rows.dtype, jnp.inexact):
      with np.errstate(over='ignore'):  # a float64 may be infinite in float32
        values = rows[row].astype(jax.dtypes.canonicalize_dtype(rows.dtype))
      if count := int(np.sum(~np.isfinite(values))):
        entry['not_finite'][name] = count
  if 'segment_ids' in batch:
    entry['tokens_per_document'] = np.bincount(batch['segment_ids'][row].ravel())[1:].tolist()
  if 'weights' in batch:
    entry['loss_weight'] = float(batch['weights'][row].sum())
  ids = batch.get('ids')
  if ids is not None and ids.ndim == 2:
    first_ids = ids[row, :_SHOWN_TOKENS].tolist()
    entry['begins'] = first_ids if job.tokenizer is None else decode_all(job.tokenizer, first_ids)
  return entry


def _origins(source: Input, iterator: InputIterator, before: State, batch: Batch) -> list[list[str]]:
  """Returns the origins in the data of each of this process's rows of an iterator's last batch."""
  if isinstance(source, Mixture):
    return _origins_in_mixture(source, before, batch)
  if hasattr(iterator, 'origins') and (origins := iterator.origins()) is not None:
    return origins
  after = iterator.get_state()
  numbers = {
    name: after[name] for name in ('num_passes', 'num_read', 'num_batches') if isinstance(after.get(name), int)
  }
  num_rows = max(len(rows) for rows in batch.values() if rows.ndim)
  return [[', '.join(f'{name} {number}' for name, number in numbers.items())] if numbers else []] * num_rows


def _origins_in_mixture(mixture: Mixture, before: State, batch: Batch) -> list[list[str]]:
  """Reads the rows of each source again, from the position before the batch; returns their origins."""
  process, num_processes = jax.process_index(), jax.process_count()
  with contextlib.closing(mixture.make_iterator(process, num_processes)) as mixture_iterator:
    mixture_iterator.set_state(before)
    choice = mixture_iterator.next_choice()
  state, num_rows = before['choice'], len(batch['row_sources'])
  own = slice(process * num_rows, (process + 1) * num_rows)
  num_read = (np.array(state['rows_read'])[:, None] + np.array(state['rows_read_beyond']))[:, own]
  origins: list[list[str]] = [[] for _ in range(num_rows)]
  for index, (name, source) in enumerate(mixture.leaves.items()):
    rows = np.flatnonzero(choice[own] == index)
    saved = before['sources'][name]
    with contextlib.closing(source.make_iterator(process, num_processes)) as iterator:
      iterator.set_state(saved['position'])
      if reads_rows(iterator):
        start, indices = iterator.get_state(), np.cumsum(choice == index)[own][rows] - 1
        source_rows = cast(RowIterator, iterator).next_rows(int((choice == index).sum()), indices.tolist())
        for row, origin in zip(rows, _origins(source, iterator, start, source_rows), strict=True):
          origins[row] = origin
        continue
      for number in range(saved['first_batch'], int(num_read[index, rows].max(initial=-1)) + 1):
        start, source_batch = iterator.get_state(), next(iterator)
        selected = rows[num_read[index, rows] == number]
        batch_origins = _origins(source, iterator, start, source_batch) if selected.size else []
        for row in selected:
          origins[row] = batch_origins[row]
  return origins
