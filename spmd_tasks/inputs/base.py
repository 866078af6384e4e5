"""The protocols of inputs: an Input makes InputIterators, which yield batches from a position that can be saved.

Legend: B global batch size, T sequence length, S sources of a mixture. A *shard* is the part of each batch that one
host reads: shard i of n has the rows [i * B/n, (i+1) * B/n).

A language model's batch is a dict of [B, T] arrays: `ids` (int32, what the model reads), `labels` (int32, the next
token), `weights` (float32, the weight in the loss), `segment_ids` (int32, 0 is padding, documents count from 1) and
`segment_pos` (int32, position within the segment). A mixture's batch also has `row_sources`, bool [B, S]: which source
each row comes from, in the order of the input's attribute `source_names`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from spmd_tasks.errors import UserError

Batch = dict[str, np.ndarray]
State = dict[str, Any]

START_OVER = 'start a new job from the weights of this one: another job_log_dir, and --set init_from=DIR.'

BATCH_DTYPES: Mapping[str, Any] = {
  'ids': np.int32,
  'labels': np.int32,
  'weights': np.float32,
  'segment_ids': np.int32,
  'segment_pos': np.int32,
}


@runtime_checkable
class InputIterator(Protocol):
  """Yields this shard's rows of each batch. The batches depend only on the input and the state."""

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """Returns the next batch, arrays of B / shard_count rows. Raises StopIteration when a finite input ends.

    All shards of a finite input yield the same number of batches; the last batch is padded with rows of weight 0.
    """

  def get_state(self) -> State:
    """Returns the position after the last batch, as JSON data."""

  def set_state(self, state: State) -> None:
    """Moves to a position; the batches that follow are bit for bit those that followed it before.

    Raises a UserError if the state was saved by a different input. If the data have changed in a way that only reading
    reveals, the next call of `next` raises instead.
    """

  def close(self) -> None:
    """Closes open files. May be called twice."""
    return None


class RowIterator(InputIterator, Protocol):
  """An iterator over one sequence of rows, from which a Mixture can read any number of rows at a time."""

  @property
  def reads_rows(self) -> bool:
    """Whether `next_rows` may be called; the same on all shards. If not, only whole batches can be read."""

  def next_rows(self, count: int, indices: Sequence[int]) -> Batch:
    """Advances by `count` rows of the global sequence and returns the rows at `indices` in [0, count).

    `__next__` is `next_rows(B, this shard's rows)`. Raises StopIteration if fewer than `count` rows are left.
    """


@runtime_checkable
class Input(Protocol):
  """A frozen dataclass that makes iterators. `batch_size` is global, for all hosts together."""

  @property
  def batch_size(self) -> int: ...

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global shapes and dtypes of a batch."""

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> InputIterator: ...

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    """Converts the states of all shards, saved at one step, into states for `shard_count` shards.

    Raises a UserError if the batches would not stay the same.
    """


def is_input(value: Any) -> bool:
  """Whether a value is an Input; plain data becomes one by `as_input` of batches.py."""
  return isinstance(value, type) or (hasattr(value, 'element_spec') and hasattr(value, 'make_iterator'))


def language_model_spec(
  batch_size: int, seq_len: int, dtypes: Mapping[str, Any] = BATCH_DTYPES
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the element spec of a language model's batch, [B, T] each. Raises a UserError if a size is below 1."""
  if batch_size < 1 or seq_len < 1:
    raise UserError(f'batch_size {batch_size} and seq_len {seq_len} must be at least 1.')
  return {name: jax.ShapeDtypeStruct((batch_size, seq_len), dtype) for name, dtype in dtypes.items()}


def empty_batch(num_rows: int, seq_len: int, pad_id: int = 0, dtypes: Mapping[str, Any] = BATCH_DTYPES) -> Batch:
  """Returns a batch of padding, [num_rows, T] each: `pad_id` in ids and labels, zeros elsewhere."""
  fill = {'ids': pad_id, 'labels': pad_id}
  return {name: np.full((num_rows, seq_len), fill.get(name, 0), dtype) for name, dtype in dtypes.items()}


def shard_rows(batch_size: int, shard_index: int, shard_count: int) -> range:
  """Returns the rows of the global batch that a shard reads. Raises a UserError if B is not divisible by the shards."""
  assert 0 <= shard_index < shard_count, (shard_index, shard_count)
  if batch_size < 1 or batch_size % shard_count:
    above = -(-max(batch_size, 1) // shard_count) * shard_count
    raise UserError(
      f'batch_size {batch_size} is not divisible by {shard_count}, the number of hosts that read: use a multiple, '
      f'such as {above}.'
    )
  rows = batch_size // shard_count
  return range(shard_index * rows, (shard_index + 1) * rows)


def source_names(source: Any) -> tuple[str, ...]:
  """Returns the names of a mixture's sources, also of a mixture within a SpanCorruption; () for other inputs."""
  return getattr(source, 'source_names', ())


def source_of_rows(source: Any, batch: Mapping[str, np.ndarray]) -> list[str]:
  """Returns the source name of each row of a mixture's batch; [] for other inputs."""
  names = source_names(source)
  return [names[index] for index in batch['row_sources'].argmax(axis=1)] if names else []


def epochs_of(source: Any, state: State) -> float | None:
  """Returns how many epochs of an input lie before a position; None if the input has no method `epochs(state)`."""
  return source.epochs(state) if hasattr(source, 'epochs') else None


def batch_sizes(source: Any) -> tuple[int, ...]:
  """Returns the batch sizes of an input, once each; () if `element_spec` has the only one."""
  return getattr(source, 'batch_sizes', ())


def reads_rows(iterator: InputIterator) -> bool:
  """Whether an iterator is a RowIterator whose `next_rows` may be called."""
  return getattr(iterator, 'reads_rows', False)


def progress_of(source: Any, state: State) -> dict[str, float]:
  """Returns the metrics of a position by name; {} if the input has no method `progress(state)`."""
  return dict(source.progress(state)) if hasattr(source, 'progress') else {}


def data_of(state: State) -> dict[str, Any]:
  """Returns the digests in a position, by path, of the sources, tokenizers and templates that it was saved with."""
  digests = {name: state[name] for name in ('source', 'tokenizer', 'template') if isinstance(state.get(name), str)}
  for name, inner in state.items():
    if isinstance(inner, dict):
      digests |= {f'{name}.{path}': value for path, value in data_of(inner).items()}
  return digests


def check_state(state: State, expected: Mapping[str, Any], source: Any = None) -> None:
  """Raises a UserError unless a saved state has the `expected` fields; `source` names its files in the message."""
  restart = f'or {START_OVER}'
  pattern = getattr(source, 'pattern', None)
  files = '' if pattern is None else f' than now match {pattern!r}'
  for name, value in expected.items():
    saved = state.get(name)
    if saved != value and name == 'source':  # a digest, which tells a user nothing
      raise UserError(
        f'the saved input state was taken from other data{files}: names or sizes of files, or fields of the source, '
        f'have changed. Restore them, {restart}'
      )
    if saved != value:
      if name == 'batch_size':
        restart = f'put it into a BatchRamp (docs/inputs.md), or {START_OVER}'
      raise UserError(
        f'the saved input state has {name} = {saved!r}, but this input has {name} = {value!r}, which gives other '
        f'batches. Restore with {name} = {saved!r}, {restart}'
      )
