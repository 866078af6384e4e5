"""Makes an Input of plain data: batches as dicts of arrays by name, from anything that can be iterated.

    [{'image': images[:64], 'label': labels[:64]}, ...]      a list, or another sequence: len() and [i]
    grain.MapDataset, grain.IterDataset, grain.DataLoader, tf.data.Dataset, datasets.IterableDataset
    a function without arguments that returns one of these, or a generator function

Each batch is whole: its first dim counts the rows of all processes, of which process i of n keeps [i B/n, (i+1) B/n).
So the numbers do not depend on the number of processes, which may change when a job is resumed. A function with the
arguments `shard_index` and `shard_count` is called with them, and yields the rows of that process alone.

The shapes and dtypes are those of the first batch (int64 and float64 become int32 and float32, as in JAX, and
numbers in another byte order those of this machine). Training goes through the data again and again, in batches of as
many rows as the first one has: what is left of a larger or a smaller batch, such as the last one of a pass, goes with
the rows behind it. An eval set is read once, in the batches that the data have, and each row counts once: a smaller
batch is a mean over fewer rows.

A position is found again by the state of Grain or of an object with `state_dict` and `load_state_dict`, or `state` and
`restore`, by the index in a sequence, and otherwise by reading as many batches anew. In each case the last batch before
it is read again and compared with what the job has trained on.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import inspect
import json
from typing import Any
import zlib

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import JobError, UserError, naming_own_code
from spmd_tasks.extensions import require
from spmd_tasks.inputs import base

_END = object()


def as_input(name: str, given: Any, *, repeats: bool, again: Callable[[], Any] | None = None) -> Any:
  """Returns an Input as it is, and other data (see the module's docstring) as Batches.

  `again` makes the data once more, where `given` is an iterator, which can be read only once.
  """
  if base.is_input(given):
    return given
  is_iterable = hasattr(given, '__iter__') or _is_sequence(given)
  if isinstance(given, Mapping | str) or not (is_iterable or callable(given)):
    return given
  if hasattr(given, '__next__') and again is not None:
    return Batches(name, again, repeats=repeats, kind=type(given).__qualname__)
  return Batches(name, given, repeats=repeats, kind=getattr(given, '__qualname__', type(given).__qualname__))


class Batches:
  """The Input of plain data. See the module's docstring.

  Attributes:
    name: the config path, for messages.
    repeats: whether the data are read again and again, for training.
    gives_whole_batches: whether one iterator gives the rows of all processes.
  """

  def __init__(self, name: str, source: Any, *, repeats: bool, kind: str):
    self.name, self._source, self._kind, self.repeats = name, source, kind, repeats
    self._is_function = callable(source) and not hasattr(source, '__iter__') and not _is_sequence(source)
    names = inspect.signature(source).parameters if self._is_function else {}
    self.gives_whole_batches = not {'shard_index', 'shard_count'} <= {*names}
    self._spec: dict[str, jax.ShapeDtypeStruct] | None = None
    self._first_state: Any = None  # of data with a position of their own

  def __repr__(self) -> str:
    return f'Batches({self._kind})'

  @property
  def batch_size(self) -> int:
    return max(spec.shape[0] for spec in self.element_spec().values() if spec.shape)

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads the first batch, once, and returns its shapes and dtypes. Raises a UserError for what is no batch."""
    if self._spec is None:
      index, count = (0, 1) if self.gives_whole_batches else (jax.process_index(), jax.process_count())
      stream = self.stream(index, count, 0)
      with naming_own_code(f'reading {self.name}'):
        first = next(stream, _END)
      if first is _END:
        raise UserError(f'{self.name} has no batch: give data that can be iterated, and that have a first batch.')
      batch = self.checked(first)
      if hasattr(stream, 'close'):
        stream.close()
      self._spec = {
        name: jax.ShapeDtypeStruct(
          (len(rows) * count, *rows.shape[1:]) if rows.ndim else (),
          jax.dtypes.canonicalize_dtype(rows.dtype.newbyteorder('=')),
        )
        for name, rows in batch.items()
      }
    return self._spec

  def spec_of(self, batch: base.Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a batch of any number of rows."""
    return {name: jax.ShapeDtypeStruct(rows.shape, self.element_spec()[name].dtype) for name, rows in batch.items()}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'BatchesIterator':
    return BatchesIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    if not self.gives_whole_batches and len(states) != shard_count:
      raise UserError(
        f'{self.name} gives each process rows of its own, and was saved by {len(states)} processes: go on with as '
        'many, or give a function without shard_index and shard_count, whose batches are whole.'
      )
    return [states[index % len(states)] for index in range(shard_count)]

  def stream(self, shard_index: int, shard_count: int, num_skipped: int) -> Iterator[Any]:
    """Returns an iterator behind the first `num_skipped` batches of a pass; Grain's have their own position."""
    source = self._source
    with naming_own_code(f'opening {self.name}'):
      if self._is_function:
        source = source() if self.gives_whole_batches else source(shard_index=shard_index, shard_count=shard_count)
      if hasattr(source, 'to_iter_dataset'):  # a Grain dataset of random access, which reads ahead in threads
        source = source.to_iter_dataset()
      if type(source).__module__.startswith('tensorflow.'):
        import_tensorflow()
        return source.skip(num_skipped).as_numpy_iterator()
      if _is_sequence(source):
        return (source[index] for index in range(num_skipped, len(source)))
      if (methods := _state_methods(source)) is not None:
        state, restore = methods
        if self._first_state is None or self._is_function:
          self._first_state = state()
        else:
          restore(self._first_state)  # a state that was loaded would hold for each pass
        source = _Stateful(source, state, restore)
      stream = iter(source)
      for _ in range(num_skipped):
        next(stream, None)
      return stream

  def checked(self, batch: Any) -> base.Batch:
    """Returns a batch as numpy arrays. Raises a UserError if it is no dict of arrays of as many rows, as the first."""
    if not isinstance(batch, Mapping) or not batch:
      raise UserError(f'a batch of {self.name} is a {type(batch).__name__}: it must be a dict of arrays by name.')
    arrays = {str(name): np.asarray(rows) for name, rows in batch.items()}
    if self._spec is not None and arrays.keys() != self._spec.keys():
      names = f'{sorted(arrays)}, but the first one {sorted(self._spec)}'
      raise UserError(f'a batch of {self.name} has the arrays {names}: give the same ones in each batch.')
    for name, rows in arrays.items():
      if rows.dtype.kind not in 'biufcV':
        raise UserError(f'{name!r} in a batch of {self.name} is of dtype {rows.dtype}: give numbers.')
    counts = {name: len(rows) for name, rows in arrays.items() if rows.ndim}
    if len({*counts.values()}) != 1:
      raise UserError(
        f'the arrays in a batch of {self.name} have {counts} rows: the first dim of each must count the rows.'
      )
    return arrays


class BatchesIterator(base.InputIterator):
  """The rows of one shard of Batches. Its state is plain JSON data."""

  def __init__(self, batches: Batches, shard_index: int, shard_count: int):
    self._batches, self._shard = batches, (shard_index, shard_count)
    size = batches.batch_size
    rows = base.shard_rows(size, shard_index, shard_count)
    self._num_rows = size if batches.gives_whole_batches else len(rows)  # that are read for a batch
    self._rows = rows if batches.gives_whole_batches else range(len(rows))  # of them
    self._stream: Iterator[Any] | None = None
    self._num_passes = self._num_read = self._digest = 0
    self._before: Any = None  # the stream's own position before the last batch
    self._last: base.Batch = {}  # the last batch that was read
    self._num_left = 0  # rows of it that are still to come
    self._has_warned = False

  @property
  def in_order(self) -> bool:
    """Whether rows of all processes follow one another."""
    return self._batches.repeats and self._batches.gives_whole_batches

  def __next__(self) -> base.Batch:
    if self._batches.repeats:
      return self._rows_at(self._gather(self._num_rows), self._rows)
    batch = self._next_batch()
    if not self._batches.gives_whole_batches:
      return batch
    return self._rows_at(batch, base.shard_rows(_num_rows(batch), *self._shard))

  def next_rows(self, count: int, places: Sequence[int]) -> base.Batch:
    return self._rows_at(self._gather(count), places)

  @staticmethod
  def _rows_at(batch: base.Batch, places: Any) -> base.Batch:
    if isinstance(places, range):  # without a copy
      places = slice(places.start, places.stop)
    return {name: rows[places] if rows.ndim else rows for name, rows in batch.items()}

  def _gather(self, count: int) -> base.Batch:
    """Returns the next rows of the data, those of batches that follow one another together."""
    parts: list[base.Batch] = []
    while count > 0:
      if self._num_left == 0:
        self._last = self._next_batch()
        self._num_left = _num_rows(self._last)
        if self._num_left != self._num_rows and not self._has_warned:
          self._has_warned = True
          logging.warning(
            'Batch %d of %s has %d rows where the first has %d: training goes on with batches of %d, in which rows of '
            'several of its batches go together.',
            *(self._num_read, self._batches.name, self._num_left, self._num_rows, self._num_rows),
          )
      used = min(count, self._num_left)
      start = _num_rows(self._last) - self._num_left
      parts.append(self._rows_at(self._last, range(start, start + used)))
      count, self._num_left = count - used, self._num_left - used
    return parts[0] if len(parts) == 1 else self._joined(parts)

  def _joined(self, parts: Sequence[base.Batch]) -> base.Batch:
    """Returns the rows of several batches as one. Raises a UserError: they have other shapes, or a number each."""
    for name, first in parts[0].items():
      for part in parts[1:]:
        if part[name].shape[1:] != first.shape[1:] or not (first.ndim or np.array_equal(part[name], first)):
          what = f'rows of the shapes {[[*part[name].shape[1:]] for part in parts]}'
          if not first.ndim:
            what = f'one number each, {[part[name].item() for part in parts]}'
          raise UserError(
            f'the batches of {self._batches.name} have other numbers of rows than the first, {self._num_rows}, so that '
            f'rows of several go together; but {name!r} has {what}: give batches of {self._num_rows} rows, or rows of '
            'one shape, and no number for a whole batch.'
          )
    return {name: np.concatenate([part[name] for part in parts]) if x.ndim else x for name, x in parts[0].items()}

  def _next_batch(self) -> base.Batch:
    """Returns the next batch as the data have it; training begins anew at the end."""
    if self._stream is None:
      self._stream = self._batches.stream(*self._shard, self._num_read)
    num_ends = 0
    while True:
      before = _position_of(self._stream)
      given = self._read()
      if given is _END:
        if not self._batches.repeats:
          raise StopIteration
        num_ends += 1
        if num_ends == 2:
          raise UserError(f'{self._batches.name} gives no batch any more: give data that can be iterated again.')
        self._num_passes, self._num_read = self._num_passes + 1, 0
        self._stream = self._batches.stream(*self._shard, 0)
        continue
      self._num_read += 1
      batch = self._batches.checked(given)
      if _num_rows(batch) == 0:
        continue
      self._before, self._digest = before, digest(batch)
      return batch

  def _read(self) -> Any:
    """Returns the stream's next batch, or _END."""
    assert self._stream is not None
    try:
      with naming_own_code(f'reading {self._batches.name}'):
        return next(self._stream, _END)
    except (UserError, JobError):
      raise
    except Exception as error:  # of a library, such as TensorFlow's, which quotes the stack of a Python function
      message = str(error).partition('\nTraceback')[0]
      raise JobError(
        f'reading a batch of {self._batches.name} failed, after {self._num_read} in pass {self._num_passes}: '
        f'{type(error).__name__}: {message}'
      ) from error

  def get_state(self) -> base.State:
    state = {'kind': 'batches', 'num_passes': self._num_passes, 'num_read': self._num_read, 'digest': self._digest}
    state['num_left'] = self._num_left  # rows of the last batch
    return state if self._before is None else state | {'before': self._before}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, {'kind': 'batches'})
    self.close()
    self._num_passes, self._num_read, self._digest = (int(state[key]) for key in ('num_passes', 'num_read', 'digest'))
    self._before, self._num_left = state.get('before'), int(state.get('num_left', 0))
    if self._num_read == 0:
      return
    for stream in self._streams_before_last():
      self._stream = stream
      last = self._read()
      if last is not _END and digest(checked := self._batches.checked(last)) == self._digest:
        self._last = checked
        return
      self.close()
    raise UserError(
      f'batch {self._num_read} of {self._batches.name} is not what it was when the job was saved: it must give the '
      'same batches each time (give every random generator and shuffle a seed), and its data must not have changed. '
      'Repair that, or begin anew in another job_log_dir.'
    )

  def _streams_before_last(self) -> Iterator[Iterator[Any]]:
    """Yields streams whose next batch should be the last one before the saved position."""
    if self._before is not None:
      stream: Any = self._batches.stream(*self._shard, 0)
      try:
        own = self._before
        stream.set_state(base64.b64decode(own['base64']) if 'base64' in own else own['json'])
        yield stream
        logging.warning('%s does not go on exactly from its own state.', self._batches.name)  # a buffer of a shuffle
      except ValueError as error:  # a DataLoader compares texts of its source, which may hold addresses
        logging.warning('Grain cannot go to its saved position in %s (%s).', self._batches.name, error)
    if self._num_read > 1:
      logging.warning(
        '%s is read from its beginning, %d batches, to find the position again.', self._batches.name, self._num_read - 1
      )
    yield self._batches.stream(*self._shard, self._num_read - 1)

  def close(self) -> None:
    stream: Any = self._stream
    self._stream = None
    # Closing a generator in which another thread is still reading is a ValueError; that thread is left to its timeout.
    with contextlib.suppress(ValueError):
      if hasattr(stream, 'close'):
        stream.close()


class _Stateful:
  """A pass over data with a position of their own, as Hugging Face's IterableDataset and torch's data loaders have."""

  def __init__(self, source: Any, state: Callable[[], Any], restore: Callable[[Any], Any]):
    self._source, self._state, self.set_state = source, state, restore
    self._stream: Iterator[Any] | None = None

  def __iter__(self) -> '_Stateful':
    return self

  def __next__(self) -> Any:
    self._stream = iter(self._source) if self._stream is None else self._stream
    return next(self._stream)

  def get_state(self) -> Any:
    return None if self._stream is None else self._state()


def _state_methods(source: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
  """The methods that give and take the position of data which have one."""
  for names in (('state_dict', 'load_state_dict'), ('state', 'restore')):
    if all(callable(getattr(source, name, None)) for name in names):
      return getattr(source, names[0]), getattr(source, names[1])
  return None


def import_tensorflow(wants: str = 'tf.data') -> Any:
  """Imports TensorFlow and hides the accelerators from it, because JAX owns them.

  Raises:
    UserError: TensorFlow is not installed; `wants` names what needs it.
  """
  require('tf-data', 'tensorflow', wants=wants)
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


def _is_sequence(source: Any) -> bool:
  is_sized = hasattr(source, '__len__') and hasattr(source, '__getitem__')
  return is_sized and not isinstance(source, Mapping) and 'tensorflow' not in type(source).__module__


def _position_of(stream: Any) -> Any:
  """Returns the stream's own position as JSON data; None if it has none."""
  if not hasattr(stream, 'get_state') or not hasattr(stream, 'set_state'):
    return None
  if (state := stream.get_state()) is None:
    return None
  if isinstance(state, bytes):
    return {'base64': base64.b64encode(state).decode()}
  try:
    return {'json': json.loads(json.dumps(state, default=int))}  # numpy's integers are those of Python
  except (TypeError, ValueError, RuntimeError):  # bytes or tensors, as of torch's loaders: batches are read again
    return None


def _num_rows(batch: base.Batch) -> int:
  return next(len(rows) for rows in batch.values() if rows.ndim)


def digest(batch: base.Batch) -> int:
  """Returns a checksum of a batch's bytes."""
  found = 0
  for name in sorted(batch):
    found = zlib.crc32(np.ascontiguousarray(batch[name]).view(np.uint8).data if batch[name].size else b'', found)
  return found
