"""Makes an Input from plain data: anything that yields batches, as dicts of arrays by name.

    [{'image': images[:64], 'label': labels[:64]}, ...]      a list, or another sequence: len() and [i]
    grain.MapDataset, grain.IterDataset, grain.DataLoader, tf.data.Dataset, datasets.IterableDataset
    a function without arguments that returns one of these, or a generator function

A batch is global: its first dim counts the rows of all processes, and process i of n keeps the rows [i B/n, (i+1) B/n).
The numbers therefore do not depend on the number of processes, which may change when a job is resumed. A function with
the arguments `shard_index` and `shard_count` yields only the rows of that process. One with the argument `epoch` gets
the number of times that training has read the data, from 0, for example to seed a shuffle.

The first batch determines the shapes and dtypes; int64 and float64 become int32 and float32, as in JAX. Training reads
the data again and again and regroups the rows into batches of the first batch's size: it splits larger batches, and
fills up smaller ones, such as the last of an epoch, with the rows that follow. An eval set is read once and keeps its
batches.

A restore uses the state of Grain, or of an object with `state_dict` and `load_state_dict` or `state` and `restore`; it
uses the index in a sequence; and otherwise it reads the same number of batches again. In each case it also reads the
last batch before the position again, and compares it with the batch that the job trained on.
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

from spmd_tasks.errors import JobError, UserError, own_code_errors
from spmd_tasks.extensions import require
from spmd_tasks.inputs import base

_END = object()


def as_input(name: str, data: Any, *, repeats: bool, again: Callable[[], Any] | None = None) -> Any:
  """Returns plain data (see the module's docstring) as Batches, and any other value as it is.

  `again` makes the data anew if `data` is an iterator, which can be read only once.
  """
  if base.is_input(data):
    return data
  is_iterable = hasattr(data, '__iter__') or _is_sequence(data)
  if isinstance(data, Mapping | str) or not (is_iterable or callable(data)):
    return data
  if hasattr(data, '__next__') and again is not None:
    return Batches(name, again, repeats=repeats, kind=type(data).__qualname__)
  return Batches(name, data, repeats=repeats, kind=getattr(data, '__qualname__', type(data).__qualname__))


class Batches:
  """The Input of plain data. See the module's docstring.

  Attributes:
    name: the config path, for messages.
    repeats: whether the data are read again and again, for training.
    gives_whole_batches: whether an iterator of the data yields the rows of all processes.
  """

  def __init__(self, name: str, source: Any, *, repeats: bool, kind: str):
    self.name, self._source, self._kind, self.repeats = name, source, kind, repeats
    self._is_function = callable(source) and not hasattr(source, '__iter__') and not _is_sequence(source)
    names = inspect.signature(source).parameters if self._is_function else {}
    self.gives_whole_batches = not {'shard_index', 'shard_count'} <= {*names}
    self._takes_epoch = 'epoch' in names
    self._spec: dict[str, jax.ShapeDtypeStruct] | None = None
    self._first_state: Any = None  # the state at the beginning, if the data have a state

  def __repr__(self) -> str:
    return f'Batches({self._kind})'

  @property
  def batch_size(self) -> int:
    return max(spec.shape[0] for spec in self.element_spec().values() if spec.shape)

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the first batch, which is read once. Raises a UserError if it is invalid."""
    if self._spec is None:
      index, count = (0, 1) if self.gives_whole_batches else (jax.process_index(), jax.process_count())
      stream = self.stream(index, count)
      with own_code_errors(f'reading {self.name}'):
        first = next(stream, _END)
      if first is _END:
        raise UserError(f'{self.name} is empty: return data with at least one batch.')
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
        f'{self.name} yields the rows of one process, and was saved by {len(states)} processes, not {shard_count}: '
        f'resume with {len(states)}, or drop its arguments shard_index and shard_count and yield global batches.'
      )
    return [states[index % len(states)] for index in range(shard_count)]

  def stream(self, shard_index: int, shard_count: int, epoch: int = 0, num_skipped: int = 0) -> Iterator[Any]:
    """Returns an iterator of an epoch, counted from 0, after its first `num_skipped` batches."""
    source = self._source
    with own_code_errors(f'opening {self.name}'):
      if self._is_function:
        shard = {} if self.gives_whole_batches else {'shard_index': shard_index, 'shard_count': shard_count}
        source = source(**shard, **({'epoch': epoch} if self._takes_epoch else {}))
      if hasattr(source, 'to_iter_dataset'):  # a Grain MapDataset, which then reads ahead in threads
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
          restore(self._first_state)  # otherwise each epoch would begin at the state that was loaded
        source = _Stateful(source, state, restore)
      stream = iter(source)
      for _ in range(num_skipped):
        next(stream, None)
      return stream

  def checked(self, batch: Any) -> base.Batch:
    """Returns a batch as numpy arrays. Raises a UserError unless they have one number of rows and the spec's names."""
    if not isinstance(batch, Mapping) or not batch:
      raise UserError(f'a batch of {self.name} is a {type(batch).__name__}: it must be a dict of arrays by name.')
    arrays = {str(name): np.asarray(rows) for name, rows in batch.items()}
    if self._spec is not None and arrays.keys() != self._spec.keys():
      names = f'{sorted(arrays)}, but the first batch has {sorted(self._spec)}'
      raise UserError(f'a batch of {self.name} has the arrays {names}: use the same names in all batches.')
    for name, rows in arrays.items():
      if rows.dtype.kind not in 'biufcV':
        raise UserError(f'{name!r} in a batch of {self.name} has dtype {rows.dtype}: convert it to numbers.')
    counts = {name: len(rows) for name, rows in arrays.items() if rows.ndim}
    if len({*counts.values()}) != 1:
      raise UserError(f'the arrays in a batch of {self.name} have {counts} rows: their first dims must be equal.')
    return arrays


class BatchesIterator(base.InputIterator):
  """Yields the rows of one shard of Batches."""

  def __init__(self, batches: Batches, shard_index: int, shard_count: int):
    self._batches, self._shard = batches, (shard_index, shard_count)
    size = batches.batch_size
    rows = base.shard_rows(size, shard_index, shard_count)
    self._num_rows = size if batches.gives_whole_batches else len(rows)  # how many rows are read for a batch
    self._rows = rows if batches.gives_whole_batches else range(len(rows))  # which of these rows the shard keeps
    self._stream: Iterator[Any] | None = None
    self._num_passes = self._num_read = self._digest = 0
    self._before: Any = None  # the stream's own state before the last batch
    self._last: base.Batch = {}  # the last batch that was read
    self._num_left = 0  # rows of the last batch that are not used yet
    self._gathered: list[tuple[int, int, range]] = []  # (epoch, index of a batch, its rows) that were gathered last
    self._indices: Sequence[int] = ()  # which of the gathered rows were returned
    self._has_warned = False

  @property
  def reads_rows(self) -> bool:
    """Whether the data are one sequence of the rows of all processes."""
    return self._batches.repeats and self._batches.gives_whole_batches

  def __next__(self) -> base.Batch:
    if self._batches.repeats:
      return self.next_rows(self._num_rows, self._rows)
    batch = self._next_batch()
    if not self._batches.gives_whole_batches:
      return batch
    return self._rows_at(batch, base.shard_rows(_num_rows(batch), *self._shard))

  def next_rows(self, count: int, indices: Sequence[int]) -> base.Batch:
    self._indices = indices
    return self._rows_at(self._gather(count), indices)

  def origins(self) -> list[list[str]]:
    """Returns where in the data each of the rows that were read last is, in training; all counts begin at 0."""
    rows = [(epoch, index, row) for epoch, index, rows in self._gathered for row in rows]
    return [['epoch {}, batches[{}], row {}'.format(*rows[index])] for index in self._indices]

  @staticmethod
  def _rows_at(batch: base.Batch, indices: Any) -> base.Batch:
    if isinstance(indices, range):
      indices = slice(indices.start, indices.stop)  # which copies nothing
    return {name: rows[indices] if rows.ndim else rows for name, rows in batch.items()}

  def _gather(self, count: int) -> base.Batch:
    """Returns the next `count` rows of the data, across the boundaries of its batches."""
    parts: list[base.Batch] = []
    self._gathered = []
    while count > 0:
      if self._num_left == 0:
        self._last = self._next_batch()
        self._num_left = _num_rows(self._last)
        if self._num_left != self._num_rows and not self._has_warned:
          self._has_warned = True
          logging.warning(
            'Batch %d of %s has %d rows, but the first has %d: training regroups the rows into batches of %d.',
            *(self._num_read, self._batches.name, self._num_left, self._num_rows, self._num_rows),
          )
      used = min(count, self._num_left)
      start = _num_rows(self._last) - self._num_left
      rows = range(start, start + used)
      self._gathered.append((self._num_passes, self._num_read - 1, rows))
      parts.append(self._rows_at(self._last, rows))
      count, self._num_left = count - used, self._num_left - used
    return parts[0] if len(parts) == 1 else self._joined(parts)

  def _joined(self, parts: Sequence[base.Batch]) -> base.Batch:
    """Concatenates rows of several batches. Raises a UserError if entries without rows differ."""
    for name, first in parts[0].items():
      values = [part[name].item() for part in parts if not first.ndim]
      if len({*values}) > 1:
        raise UserError(
          f'{name!r} in batches of {self._batches.name} has the values {values}, which cannot be regrouped into '
          f'batches of {self._num_rows} rows: use one value, or {self._num_rows} rows in each batch.'
        )
    return {name: np.concatenate([part[name] for part in parts]) if x.ndim else x for name, x in parts[0].items()}

  def _next_batch(self) -> base.Batch:
    """Returns the next batch of the data; training starts over at the end."""
    if self._stream is None:
      self._stream = self._open(self._num_read)
    num_ends = 0
    while True:
      before = _state_of(self._stream)
      value = self._read()
      if value is _END:
        if not self._batches.repeats:
          raise StopIteration
        num_ends += 1
        if num_ends == 2:
          raise UserError(
            f'{self._batches.name} is empty after its first epoch: return data that can be iterated again.'
          )
        self._num_passes, self._num_read = self._num_passes + 1, 0
        self._stream = self._open()
        continue
      self._num_read += 1
      batch = self._batches.checked(value)
      if _num_rows(batch) == 0:
        continue
      if self._batches.repeats:
        self._check_rows(batch)
      self._before, self._digest = before, digest(batch)
      return batch

  def _check_rows(self, batch: base.Batch) -> None:
    """Raises a UserError if rows of a batch differ in shape or dtype from the rows of the first batch."""
    for name, first in self._batches.element_spec().items():
      rows = batch[name]
      is_same_kind = np.can_cast(rows.dtype, first.dtype, 'same_kind') or rows.dtype == first.dtype
      if (bool(rows.ndim), rows.shape[1:]) != (bool(first.shape), first.shape[1:]) or not is_same_kind:
        dtypes = '' if is_same_kind else f', dtype {rows.dtype} and not {first.dtype}'
        raise UserError(
          f'batch {self._num_read} of {self._batches.name} has {name!r} {list(rows.shape)}, the first one '
          f'{list(first.shape)}{dtypes}: use the same dims, except for the number of rows, and the same kind of dtype.'
        )

  def _open(self, num_skipped: int = 0) -> Iterator[Any]:
    """Returns a stream of this epoch after its first `num_skipped` batches."""
    return self._batches.stream(*self._shard, self._num_passes, num_skipped)

  def _read(self) -> Any:
    """Returns the stream's next batch, or _END."""
    assert self._stream is not None
    try:
      with own_code_errors(f'reading {self._batches.name}'):
        return next(self._stream, _END)
    except (UserError, JobError):
      raise
    except Exception as error:  # from a library; TensorFlow's messages quote a traceback
      message = str(error).partition('\nTraceback')[0]
      raise JobError(
        f'reading {self._batches.name} failed after {self._num_read} batches of epoch {self._num_passes}: '
        f'{type(error).__name__}: {message}'
      ) from error

  def get_state(self) -> base.State:
    state = {'kind': 'batches', 'num_passes': self._num_passes, 'num_read': self._num_read, 'digest': self._digest}
    state |= {'num_left': self._num_left, 'batch_size': self._batches.batch_size}  # rows that the last batch has left
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
    size, saved = self._batches.batch_size, state.get('batch_size')
    remedy = 'restore the data, and seed every shuffle and random generator'
    if saved not in (None, size):
      ramp = f', and join them in a BatchRamp(source=..., sizes=((0, {size}),)) (docs/inputs.md)'
      remedy = (
        f'its batches had {saved} rows, and have {size}. Give batches of {saved} rows{ramp * (size % saved == 0)}'
      )
    raise UserError(
      f'batch {self._num_read} of {self._batches.name} has changed since the job was saved: {remedy}, or start in '
      'another job_log_dir.'
    )

  def _streams_before_last(self) -> Iterator[Iterator[Any]]:
    """Yields streams whose next batch should be the last batch before the saved position."""
    if self._before is not None:
      stream: Any = self._open()
      try:
        state = self._before
        stream.set_state(base64.b64decode(state['base64']) if 'base64' in state else state['json'])
        yield stream
        # For example, the state of a shuffle may not include its buffer.
        logging.warning('%s does not continue exactly from its own state.', self._batches.name)
      except ValueError as error:  # a DataLoader compares the repr of its source, which may contain addresses
        logging.warning('Grain cannot restore its state in %s (%s).', self._batches.name, error)
    if self._num_read > 1:
      logging.warning(
        'Reading %d batches of %s again to reach the saved position.', self._num_read - 1, self._batches.name
      )
    yield self._open(self._num_read - 1)

  def close(self) -> None:
    stream: Any = self._stream
    self._stream = None
    # Python raises a ValueError if another thread is still reading from a generator; its timeout ends that thread.
    with contextlib.suppress(ValueError):
      if hasattr(stream, 'close'):
        stream.close()


class _Stateful:
  """An iterator of data with a state, such as Hugging Face's IterableDataset and torch's data loaders."""

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
  """Returns the methods that get and set the state of data; None if the data have none."""
  for names in (('state_dict', 'load_state_dict'), ('state', 'restore')):
    if all(callable(getattr(source, name, None)) for name in names):
      return getattr(source, names[0]), getattr(source, names[1])
  return None


def import_tensorflow(wants: str = 'tf.data') -> Any:
  """Imports TensorFlow and hides the accelerators from it, because JAX owns them.

  Raises a UserError if TensorFlow is not installed; `wants` names what needs it.
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


def _state_of(stream: Any) -> Any:
  """Returns a stream's own state as JSON data; None if it has none."""
  if not hasattr(stream, 'get_state') or not hasattr(stream, 'set_state'):
    return None
  if (state := stream.get_state()) is None:
    return None
  if isinstance(state, bytes):
    return {'base64': base64.b64encode(state).decode()}
  try:
    return {'json': json.loads(json.dumps(state, default=int))}  # `default` converts numpy's integers
  except (TypeError, ValueError, RuntimeError):  # bytes or tensors, as in torch's loaders: batches are read again
    return None


def _num_rows(batch: base.Batch) -> int:
  return next(len(rows) for rows in batch.values() if rows.ndim)


def digest(batch: base.Batch) -> int:
  """Returns a checksum of a batch's bytes."""
  checksum = 0
  for name in sorted(batch):
    checksum = zlib.crc32(np.ascontiguousarray(batch[name]).view(np.uint8).data if batch[name].size else b'', checksum)
  return checksum
