"""The contract of inputs: Input (a config that makes an iterator) and InputIterator (batches, with a saved position).

Legend: B global batch size, T sequence length. A *shard* is the part of every batch that one host reads: rows
[i * B/n, (i+1) * B/n).

A batch is a dict of [B, T] arrays: `ids` (int32, what the model reads), `labels` (int32, the next token), `weights`
(float32, 0 where there is nothing to learn), `segment_ids` (int32, 0 is padding, documents count from 1), `segment_pos`
(int32, position within the segment). One whose rows are from S sources, named by the attribute `source_names` of the
input, has `row_sources` too: bool [B, S], from which source a row is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from spmd_tasks.errors import UserError

Batch = dict[str, np.ndarray]
State = dict[str, Any]

BATCH_DTYPES: Mapping[str, Any] = {
  'ids': np.int32,
  'labels': np.int32,
  'weights': np.float32,
  'segment_ids': np.int32,
  'segment_pos': np.int32,
}


@runtime_checkable
class InputIterator(Protocol):
  """Yields this shard's rows of each batch; the state alone determines the order."""

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """The next batch, [B / shard_count, T] each; StopIteration when a finite input ends.

    Every shard of a finite input yields the same number of batches, the last one filled up with rows of weight 0.
    """

  def get_state(self) -> State:
    """The position after the last batch returned: plain JSON data."""

  def set_state(self, state: State) -> None:
    """Continues after the batch at which `state` was taken, bit for bit.

    Raises a UserError: the state does not belong to this input; the message names both sides and the remedy. If only
    reading shows that the data has changed, the following `next` raises the error.
    """

  def close(self) -> None:
    """Closes open files, here none. Idempotent."""
    return None


class OrderedIterator(InputIterator, Protocol):
  """An iterator that may have its rows in one order, of which any can be picked; a Mixture then reads them in it."""

  @property
  def in_order(self) -> bool:
    """Whether `next_rows` may be called: the same on every shard. Another source is read by rows of its batches."""

  def next_rows(self, count: int, places: Sequence[int]) -> Batch:
    """Moves on by `count` rows, of all shards together, and returns those at `places` among them, [len(places), ...].

    Raises StopIteration if fewer rows are left. `__next__` is the same with the B rows of a batch and this shard's own.
    """


@runtime_checkable
class Input(Protocol):
  """An input: frozen fields, from which iterators are made. `batch_size` is global: all hosts together."""

  @property
  def batch_size(self) -> int: ...

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Global shapes and dtypes of a batch."""

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> InputIterator: ...

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    """Converts the states that another number of shards saved at one step into the states of `shard_count` shards.

    Raises a UserError: the conversion would not be exact.
    """


def is_input(given: Any) -> bool:
  """Whether an object is an Input rather than plain data, of which `as_input` of batches.py makes one."""
  return isinstance(given, type) or (hasattr(given, 'element_spec') and hasattr(given, 'make_iterator'))


def language_model_spec(
  batch_size: int, seq_len: int, dtypes: Mapping[str, Any] = BATCH_DTYPES
) -> dict[str, jax.ShapeDtypeStruct]:
  """The element spec of a language model's batch: [B, T] each. Raises a UserError: a size is not positive."""
  if batch_size < 1 or seq_len < 1:
    raise UserError(f'batch_size {batch_size} and seq_len {seq_len} must be at least 1.')
  return {name: jax.ShapeDtypeStruct((batch_size, seq_len), dtype) for name, dtype in dtypes.items()}


def empty_batch(num_rows: int, seq_len: int, pad_id: int = 0, dtypes: Mapping[str, Any] = BATCH_DTYPES) -> Batch:
  """A batch of padding, [num_rows, T] each: `pad_id` in ids and labels, zeros elsewhere."""
  fill = {'ids': pad_id, 'labels': pad_id}
  return {name: np.full((num_rows, seq_len), fill.get(name, 0), dtype) for name, dtype in dtypes.items()}


def shard_rows(batch_size: int, shard_index: int, shard_count: int) -> range:
  """The rows of the global batch that a shard reads.

  Raises a UserError: the batch does not divide by the shards, or there is no such shard.
  """
  if shard_count < 1 or not 0 <= shard_index < shard_count:
    raise UserError(f'shard_index {shard_index} is not in [0, shard_count) with shard_count {shard_count}.')
  if batch_size < 1 or batch_size % shard_count:
    above = -(-max(batch_size, 1) // shard_count) * shard_count
    raise UserError(
      f'batch_size {batch_size} does not divide by shard_count {shard_count}, the number of hosts that read: '
      f'set batch_size to a multiple of it, such as {above}.'
    )
  rows = batch_size // shard_count
  return range(shard_index * rows, (shard_index + 1) * rows)


def source_names(given: Any) -> tuple[str, ...]:
  """Returns the names of a mixture's sources, also of a mixture within a SpanCorruption; () for other inputs."""
  return getattr(given, 'source_names', ())


def source_of_rows(given: Any, batch: Mapping[str, np.ndarray]) -> list[str]:
  """Returns of each row of a mixture's batch the name of its source; [] for other inputs."""
  names = source_names(given)
  return [names[number] for number in batch['row_sources'].argmax(axis=1)] if names else []


def epochs_of(source: Any, state: State) -> float | None:
  """Returns how often an input has been read at a position, by its method `epochs(state)`; None where it has none."""
  return source.epochs(state) if hasattr(source, 'epochs') else None


def is_in_order(iterator: InputIterator) -> bool:
  """Whether an iterator is an OrderedIterator that has its rows in one order."""
  return getattr(iterator, 'in_order', False)


def progress_of(source: Any, state: State) -> dict[str, float]:
  """Metrics of a position, by name, from an input's method `progress(state)`; {} where it has none."""
  return dict(source.progress(state)) if hasattr(source, 'progress') else {}


def data_of(state: State) -> dict[str, Any]:
  """The entries of a position that say which data it is of, by path: digests of sources, tokenizers and templates."""
  found = {name: state[name] for name in ('source', 'tokenizer', 'template') if isinstance(state.get(name), str)}
  for name, inner in state.items():
    if isinstance(inner, dict):
      found |= {f'{name}.{path}': value for path, value in data_of(inner).items()}
  return found


def check_state(state: State, expected: Mapping[str, Any], source: Any = None) -> None:
  """Checks that a saved state was taken from an input with the same fields; `source` is of files of a `pattern`.

  Raises a UserError: a field differs or is missing; the message names it and both sides.
  """
  afresh = 'or start the input afresh from its beginning.'
  pattern = getattr(source, 'pattern', None)
  files = '' if pattern is None else f' than now match {pattern!r}'
  for name, value in expected.items():
    if name not in state:
      raise UserError(
        f'the saved input state has no {name!r} (it has {sorted(state)}): restore with its own input, {afresh}'
      )
    if state[name] != value and name == 'source':  # digests, which say nothing to a person
      raise UserError(
        f'the saved input state was taken from other data{files}: files with other names or sizes, or another config '
        f'of the source. Put the files and the config back, {afresh}'
      )
    if state[name] != value:
      raise UserError(
        f'the saved input state has {name} = {state[name]!r}, but this input has {name} = {value!r}: continuing '
        f'would read other data. Restore with {name} = {state[name]!r}, {afresh}'
      )
