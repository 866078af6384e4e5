"""TfDataInput: batches from TFRecord files, or from any tf.data.Dataset of examples, at an exactly restorable position.

TensorFlow is imported when an iterator is made, not before, and is kept away from the accelerators.

An example is a dict of 1-D features of at most T elements. `ids` must be there; what is missing of the other four is
derived: `labels` are the next ids (the last id then has nothing to predict: weight 0), `weights` 1, `segment_ids` 1,
`segment_pos` 0, 1, ... Short features are padded.

A position is a number of batches: restoring reads the dataset anew and skips that many, so it takes time in proportion,
and it asks for a dataset that gives the same examples every time. That is checked: a digest of the last batch is part
of the state, and a dataset that gives another batch there (an unseeded shuffle, changed files) is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import os
from typing import Any, Protocol, runtime_checkable
import zlib

import jax
import numpy as np

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.text import common_root, expand_globs, file_fingerprint, refuse_changed_size


@runtime_checkable
class TfDataSource(Protocol):
  """Makes a tf.data.Dataset of examples."""

  def dataset(self, shard_index: int, shard_count: int) -> Any:
    """One epoch of this shard's examples, in a fixed order."""
    ...

  def fingerprint(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecords:
  """TFRecord files of tf.train.Example with integer list features (`weights`: floats), read in the order of their
  names.

  Fields:
    pattern: a glob pattern or several.
    features: feature name in the files -> name in the batch.
    shuffle_buffer: examples to shuffle among, 0 for none.
  """

  pattern: str | tuple[str, ...]
  features: Mapping[str, str] = dataclasses.field(default_factory=lambda: {'ids': 'ids'})
  compression: str = ''
  shuffle_buffer: int = 0
  seed: int = 0

  def dataset(self, shard_index: int, shard_count: int) -> Any:
    tf = import_tensorflow()
    spec = {
      name: tf.io.RaggedFeature(tf.float32 if target == 'weights' else tf.int64)
      for name, target in self.features.items()
    }

    def parse(record):
      example = tf.io.parse_single_example(record, spec)
      return {target: example[name] for name, target in self.features.items()}

    files = expand_globs(self.pattern, 'TFRecord')

    def check_size(path, size):
      refuse_changed_size(path.numpy().decode(), int(size))
      return False  # this is no record

    def records_of(path, size):
      # At a file's end, because TensorFlow takes a file that was cut between two records for a whole one.
      check = tf.data.Dataset.from_tensors(path).filter(lambda path: tf.py_function(check_size, [path, size], tf.bool))
      return tf.data.TFRecordDataset(path, compression_type=self.compression).concatenate(check)

    sizes = [os.path.getsize(path) for path in files]
    examples = tf.data.Dataset.from_tensor_slices((files, sizes)).flat_map(records_of).shard(shard_count, shard_index)
    if self.shuffle_buffer:
      examples = examples.shuffle(self.shuffle_buffer, seed=self.seed, reshuffle_each_iteration=True)
    return examples.map(parse)

  def fingerprint(self) -> str:
    files = expand_globs(self.pattern, 'TFRecord')
    settings = (sorted(self.features.items()), self.compression, self.shuffle_buffer, self.seed)
    return file_fingerprint(common_root(files), files, 'tfrecord', settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfDataFunction:
  """Any function `(shard_index, shard_count) -> tf.data.Dataset` of one epoch of that shard's examples.

  `name` stands for the function in saved states: change it when the function gives other examples.
  """

  function: Callable[[int, int], Any]
  name: str

  def dataset(self, shard_index: int, shard_count: int) -> Any:
    return self.function(shard_index, shard_count)

  def fingerprint(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfDataInput:
  """Batches of a TfRecords or a TfDataFunction.

  With `num_epochs=None` each host asks the source for its own shard, and the number of hosts cannot change between save
  and restore. A finite input is read whole by every host, which keeps its rows: all hosts see the same number of
  batches, the last one padded, and the number of hosts may change.

  With `vocab_size`, an example with an id outside [0, vocab_size), or a label with a weight, is an error that names the
  example; without it, only what no vocabulary has, such as a negative id.
  """

  source: TfDataSource
  batch_size: int
  seq_len: int
  num_epochs: int | None = None
  max_batches: int | None = None
  pad_id: int = 0
  vocab_size: int | None = None

  def __post_init__(self):
    if self.num_epochs is not None and self.num_epochs < 1:
      raise UserError(f'num_epochs {self.num_epochs} must be at least 1, or None to read for ever.')

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return base.language_model_spec(self.batch_size, self.seq_len)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'TfDataIterator':
    return TfDataIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    if self.num_epochs is None and len(states) != shard_count:
      raise UserError(
        f'an endless tf.data input saved by {len(states)} hosts cannot be continued exactly by {shard_count}, as each '
        'host has its own dataset: restore with as many hosts, or start the input afresh from its beginning.'
      )
    return [{**states[i % len(states)], 'shard_index': i, 'shard_count': shard_count} for i in range(shard_count)]


def import_tensorflow() -> Any:
  """TensorFlow with the accelerators hidden from it: JAX owns them."""
  import tensorflow as tf

  for kind in ('GPU', 'TPU'):
    try:
      tf.config.set_visible_devices([], kind)
    except RuntimeError as e:
      if tf.config.get_visible_devices(kind):
        raise JobError(
          f'TensorFlow has already taken the {kind}s, which JAX needs: call tf.config.set_visible_devices([], '
          f'{kind!r}) right after importing it.'
        ) from e
  return tf


def complete_example(
  example: Mapping[str, np.ndarray], batch: base.Batch, row: int, vocab_size: int | None = None
) -> None:
  """Writes an example into one row of a batch of padding, deriving the features that it lacks.

  Raises:
    UserError: `ids` is missing, a feature is not 1-D, too long, or of another length than `ids`; an id, or a label with
      a weight, is outside [0, vocab_size).
  """
  if 'ids' not in example:
    raise UserError(f"an example has no feature 'ids' (it has {sorted(example)}): name it in `features`.")
  unknown = sorted(set(example) - set(base.BATCH_DTYPES))
  if unknown:
    raise UserError(f'an example has features {unknown}; a batch has {sorted(base.BATCH_DTYPES)} only: drop them.')
  ids = np.asarray(example['ids'])
  seq_len = batch['ids'].shape[1]
  for name, value in example.items():
    if np.ndim(value) != 1 or len(value) != len(ids) or len(value) > seq_len:
      raise UserError(
        f'feature {name!r} has shape {np.shape(value)}, ids {ids.shape}: all must be 1-D of one length of at most '
        f'seq_len = {seq_len}. Split longer examples, or raise seq_len.'
      )
  limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
  is_weighted = np.asarray(example.get('weights', np.ones(len(ids)))) != 0
  for name, counted in (('ids', np.ones(len(ids), bool)), ('labels', is_weighted)):
    values = np.asarray(example.get(name, ids))
    if (wrong := values[counted & ((values < 0) | (values >= limit))]).size:
      raise UserError(
        f'{name} have {wrong[0]}, which is outside the vocabulary, [0, {limit}): repair the example, or give a label '
        'that is not to be learnt the weight 0.'
      )
  size = len(ids)
  derived = {
    'labels': np.append(ids[1:], batch['labels'][row, 0]) if size else ids,
    'weights': np.ones(size),
    'segment_ids': np.ones(size),
    'segment_pos': np.arange(size),
  }
  if 'labels' not in example:
    derived['weights'][-1:] = 0
  for name, rows in batch.items():
    rows[row, :size] = example.get(name, derived.get(name))


class TfDataIterator:
  """The batches of one shard of a TfDataInput."""

  def __init__(self, settings: TfDataInput, shard_index: int, shard_count: int):
    self._settings = settings
    self._rows = base.shard_rows(settings.batch_size, shard_index, shard_count)
    self._shard = {'shard_index': shard_index, 'shard_count': shard_count}
    self._num_batches = 0
    self._last_digest = 0
    self._examples: Iterator[Mapping[str, np.ndarray]] | None = None

  def __iter__(self) -> Iterator[base.Batch]:
    return self

  def _open(self, num_skipped: int) -> Iterator[Mapping[str, np.ndarray]]:
    """The examples behind the first `num_skipped`."""
    tf = import_tensorflow()
    s = self._settings
    _ = self._identity
    shard = (0, 1) if s.num_epochs is not None else (self._shard['shard_index'], self._shard['shard_count'])
    options = tf.data.Options()
    options.deterministic = True
    dataset = s.source.dataset(*shard).repeat(s.num_epochs).with_options(options)
    return dataset.skip(num_skipped).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

  @property
  def _num_rows_read(self) -> int:
    return len(self._rows) if self._settings.num_epochs is None else self._settings.batch_size

  def __next__(self) -> base.Batch:
    s = self._settings
    if s.max_batches is not None and self._num_batches >= s.max_batches:
      raise StopIteration
    if self._examples is None:
      self._examples = self._open(self._num_batches * self._num_rows_read)
    batch = base.empty_batch(self._num_rows_read, s.seq_len, s.pad_id)
    num_read = 0
    for row in range(self._num_rows_read):
      number = self._num_batches * self._num_rows_read + row
      try:
        example = next(self._examples, None)
        if example is None:
          break
        complete_example(example, batch, row, s.vocab_size)
      except UserError as e:
        self._examples = None
        raise UserError(f'example {number} of {s.source}: {e}') from e
      except Exception as e:  # TensorFlow's, which name no source and quote the stack of a Python function
        self._examples = None
        cause = str(e).partition('\nTraceback')[0]
        raise JobError(f'reading example {number} of {s.source} failed: {type(e).__name__}: {cause}') from e
      num_read += 1
    if num_read == 0:
      raise StopIteration
    self._num_batches += 1
    self._last_digest = _digest(batch)
    if s.num_epochs is None:
      return batch
    return {name: rows[self._rows.start : self._rows.stop] for name, rows in batch.items()}

  @functools.cached_property
  def _identity(self) -> base.State:
    """Returns the settings that a position depends on, with the files as they were when reading began."""
    s = self._settings
    identity = {'kind': 'tf.data', 'source': s.source.fingerprint()}
    identity.update({name: getattr(s, name) for name in ('batch_size', 'seq_len', 'num_epochs', 'pad_id')})
    return {**identity, **(self._shard if s.num_epochs is None else {})}

  def get_state(self) -> base.State:
    progress = {'num_batches': self._num_batches, 'last_digest': self._last_digest}
    return {**self._identity, **self._shard, **progress}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._identity)
    num_batches = int(state['num_batches'])
    self._examples = None
    self._num_batches = max(num_batches - 1, 0)
    if num_batches == 0:
      return
    # Read the last batch before the position again: it shows whether the dataset is the one that was saved.
    found = None if next(self, None) is None else self._last_digest
    if found != state['last_digest']:
      self._examples, self._num_batches = None, 0
      raise UserError(
        f'batch {num_batches} of {self._settings.source} is not what it was when the state was saved: its order is not '
        'deterministic (give every shuffle a seed) or its data has changed. Repair that, or start the input afresh.'
      )

  def close(self) -> None:
    self._examples = None


def _digest(batch: base.Batch) -> int:
  digest = 0
  for name in sorted(batch):
    digest = zlib.crc32(batch[name].tobytes(), digest)
  return digest
