"""TextInput: packed batches of text from any source, shuffled by Grain.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)  # training: never ends
    TextInput(source=StdlibText(split='valid'), ..., num_epochs=1, shuffle=False)          # an eval set: one pass

An input that repeats its source takes its rows from the shuffled rows of each epoch, or, if the source is too large for
that, has one lane per row of the global batch, which reads a part of the source (row_order.py). A host reads the lanes
of its own rows. A single pass, or a few over a large source, is one stream, dealt to the rows in turn. Every host reads
the whole stream and keeps its own rows, so all hosts agree on the number of batches; only the last is padded.

In all cases the config and the position alone determine the global batch, so the number of hosts may change between
save and restore. A restore reads one block per lane again, or a small source.
"""

from collections.abc import Callable, Generator, Sequence
import contextlib
import dataclasses
import functools
import queue
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.packing import BlockEncoder, Lane, TextEncoder, TokenBlock, pack_batch
from spmd_tasks.inputs.row_order import Shares, cut, seems_small, shuffled, small_tokens, stream_order
from spmd_tasks.inputs.text import OpenSource, TextSource
from spmd_tasks.inputs.tokenizers import Tokenizer

if TYPE_CHECKING:
  from spmd_tasks.inputs.epoch_rows import RowSequence

_IDENTITY = ('batch_size', 'seq_len', 'seed', 'shuffle', 'num_epochs', 'packing')  # fields that decide the batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput:
  """Packed language-model batches.

  Fields:
    source: the documents: StdlibText(), TextFiles, JsonLines, Parquet, ArrayRecord, TarShards or MegatronTokens.
    tokenizer: ByteTokenizer(), or one of tokenizer_files.py.
    batch_size, seq_len: B and T of the global batch.
    seed, shuffle: the blocks are shuffled differently in each epoch.
    num_epochs: number of passes over the source; None repeats it without end.
    max_batches: ends the input early, for short evaluations.
    packing: False puts at most one document in a row.
    read_timeout_s: seconds that reading one block may take; a longer read raises an error that names the block.
  """

  source: TextSource
  tokenizer: Tokenizer
  batch_size: int
  seq_len: int
  seed: int = 0
  shuffle: bool = True
  num_epochs: int | None = None
  max_batches: int | None = None
  packing: bool = True
  read_timeout_s: float = 120.0

  kind: ClassVar[str] = 'text'  # in saved positions

  def __post_init__(self):
    for name in ('seq_len', 'num_epochs', 'max_batches'):
      if (number := getattr(self, name)) is not None and number < 1:
        raise UserError(f'{name} {number} must be at least 1 (num_epochs, max_batches: None is no limit).')

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return base.language_model_spec(self.batch_size, self.seq_len, self.block_encoder().dtypes)

  def block_encoder(self) -> BlockEncoder:
    """Makes the encoder from the source's blocks to tokens."""
    return TextEncoder(self.tokenizer)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'TextIterator':
    return TextIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    states = sorted(states, key=lambda state: state['shard_index'])
    saved, saved_count = [state['shard_index'] for state in states], states[0]['shard_count']
    if saved != list(range(saved_count)):
      raise UserError(f'the states of all {saved_count} shards are needed, those of {saved} are there.')
    batches = [state['num_batches'] for state in states]
    if len(set(batches)) > 1:
      raise UserError(f'the shards were saved after different numbers of batches, {batches}.')
    endless = self.num_epochs is None
    resharded = []
    for index in range(shard_count):
      rows = base.shard_rows(self.batch_size, index, shard_count)
      own: dict[str, Any] = {'shard_index': index, 'shard_count': shard_count}
      for name in ('lanes', 'num_parts', 'num_too_long') if endless else ():
        if name in states[0]:
          own[name] = [lane for state in states for lane in state[name]][rows.start : rows.stop]
      resharded.append({**states[0], **own})
    return resharded

  def epochs(self, state: base.State) -> float:
    """Returns how often the source has been read at a position, as a mean over the lanes of its shard."""
    if 'num_rows' in state:
      return state['num_rows'] / state['num_rows_of_epoch']
    lanes = state.get('lanes', [(0, 0, 0)])
    parts = state.get('num_parts', [state['num_blocks']] * len(lanes))  # blocks that a lane reads in an epoch
    return sum(num_read / num for (num_read, _, _), num in zip(lanes, parts, strict=True)) / len(lanes)


class TextIterator(base.InputIterator):
  """The batches of one shard of a TextInput. Its state is plain JSON data."""

  def __init__(self, settings: TextInput, shard_index: int, shard_count: int):
    self._settings = settings
    self._shard = {'shard_index': shard_index, 'shard_count': shard_count}
    source = settings.source.open()
    self._num_blocks = len(source)
    self._sizes: np.ndarray | None = source.sizes() if hasattr(source, 'sizes') else None
    self._encoder = settings.block_encoder()
    self._identity = {
      'kind': settings.kind,
      'source': source.fingerprint(),
      **self._encoder.identity(),
      **{name: getattr(settings, name) for name in _IDENTITY},
    }
    self._source = source
    self._rows = base.shard_rows(settings.batch_size, shard_index, shard_count)
    self._num_lanes = len(self._rows) if settings.num_epochs is None else 1
    self._positions = np.zeros((self._num_lanes, 5), np.int64)  # Lane.position and the numbers of Lane.num_too_long
    self._num_batches = 0
    self._has_looked = settings.num_epochs == 1  # whether it is known how large the source is
    self._small: RowSequence | None = None  # of a small source that is repeated
    self._set: base.State | None = None  # a position that was set, and to which the iterator has not gone yet
    self._lanes: list[Lane] = []
    self._stream: Generator[tuple[base.Batch, np.ndarray], None, None] | None = None
    self._closed = False
    self._num_reported = 0  # documents that were too long, when that was last logged

  @property
  def in_order(self) -> bool:
    """Whether `next_rows` may be called; then the source is small, and has been read."""
    self._prepare()
    return self._small is not None

  def __next__(self) -> base.Batch:
    self._prepare()
    limit = self._settings.max_batches
    if limit is not None and self._num_batches >= limit:
      raise StopIteration
    if self._small is not None:
      if self._small.num_left <= 0:
        raise StopIteration
      return self._take(self._settings.batch_size, self._rows)
    if self._stream is None:
      self._stream = self._batches(self._positions)
    try:
      batch, self._positions = next(self._stream)
    except BaseException:
      # Some lanes may have moved on: another attempt starts again behind the last batch, so that no row is lost.
      self._stop()
      raise
    self._num_batches += 1
    self._report_too_long()
    return self.finish(batch)

  def next_rows(self, count: int, places: Sequence[int]) -> base.Batch:
    self._prepare()
    assert self._small is not None
    limit = self._settings.max_batches
    num_left = self._small.num_left
    if limit is not None:
      num_left = min(num_left, limit * self._settings.batch_size - self._small.num_read)
    if num_left < count:
      raise StopIteration
    return self._take(count, places)

  def _take(self, count: int, places: Sequence[int]) -> base.Batch:
    assert self._small is not None
    batch = self._small.next_rows(count, places)
    self._num_batches = self._small.num_read // self._settings.batch_size
    return self.finish(batch)

  def finish(self, batch: base.Batch) -> base.Batch:
    """What becomes of packed rows; here nothing."""
    return batch

  def origins(self) -> list[list[str]] | None:
    """Returns of each row of the last batch the names of its blocks; None of a single stream."""
    if self._small is not None:
      of_rows = [[] if number is None else self._small.rows.blocks_of(number) for number in self._small.last]
      blocks = [[self._block_order[i] for i in numbers] for numbers in of_rows]
    elif self._settings.num_epochs is None:
      blocks = [
        [self._shares.reads(row)(number)[0] for number in lane.blocks_of_row]
        for row, lane in zip(self._rows, self._lanes, strict=True)
      ]
    else:
      return None
    return [[self._source.block_name(int(index)) for index in indices] for indices in blocks]

  def _prepare(self) -> None:
    """Reads a small source if that has not been done, and goes to the position that was set."""
    if self._closed:
      raise UserError('this input iterator has been closed: make another one from its Input.')
    if not self._has_looked:
      self._look()
      self._has_looked = True
    state, self._set = self._set, None
    if state is not None:
      try:
        self._go_to(state)
      except BaseException:
        self._set = state
        raise

  def _look(self) -> None:
    """Reads the source, if it is small, and cuts its rows; otherwise divides it among the rows of the batch."""
    s = self._settings
    blocks = self._small_blocks()
    if blocks is None:
      if s.num_epochs is None:
        self._shares = Shares(self._num_blocks, self._sizes, s.batch_size, s.seed, s.shuffle)
      return
    from spmd_tasks.inputs.epoch_rows import EpochRows, RowSequence

    _check_has_tokens(blocks)
    make_batch = lambda num: base.empty_batch(num, s.seq_len, self._encoder.pad_id, self._encoder.dtypes)
    rows = EpochRows(blocks, functools.partial(self._make_lane, lambda: None), make_batch)
    self._small = RowSequence(rows, s.batch_size, s.seed if s.shuffle else None, s.num_epochs)

  def _small_blocks(self) -> list[TokenBlock] | None:
    """Returns the blocks of a small source, in the order in which rows are cut; None for a large one."""
    s = self._settings
    limit = small_tokens(s.batch_size, s.seq_len)
    reader = BlockReader(self._source, self._encoder, s.read_timeout_s)
    try:
      if not seems_small(reader.__getitem__, self._num_blocks, self._sizes, limit):
        return None
      from spmd_tasks.inputs.epoch_rows import read_all

      order = shuffled(self._num_blocks, s.seed, 0) if s.shuffle else np.arange(self._num_blocks)
      self._block_order = order.tolist()
      return read_all(reader.__getitem__, self._block_order, limit)
    finally:
      reader.close()

  def _make_lane(
    self, check: Callable[[], None], read_block: Callable[[int], TokenBlock | None], num_blocks: int
  ) -> Lane:
    return Lane(read_block, num_blocks, check, self._settings.packing, self._encoder.keeps_whole)

  def _batches(self, positions: np.ndarray) -> Generator[tuple[base.Batch, np.ndarray], None, None]:
    """Yields this shard's rows of the batches, with the positions after them: int64 [lanes, 5]."""
    s = self._settings
    reader = BlockReader(self._source, self._encoder, s.read_timeout_s)
    check = functools.cache(lambda: _check_has_tokens(reader))
    try:
      if s.num_epochs is None:
        lanes = [
          self._make_lane(check, self._reads_share(reader, row), self._shares.num_blocks(row)) for row in self._rows
        ]
        row_lanes = lanes
      else:
        lanes = [self._make_lane(check, self._reads_stream(reader), self._num_blocks)]
        row_lanes = lanes * s.batch_size
      self._lanes = lanes
      for lane, (*position, truncated, skipped) in zip(lanes, positions.tolist(), strict=True):
        lane.seek(*position)
        lane.num_too_long[:] = truncated, skipped
      pad_id, dtypes = self._encoder.pad_id, self._encoder.dtypes
      while (batch := pack_batch(row_lanes, s.seq_len, pad_id, dtypes)) is not None:
        if row_lanes is not lanes:
          batch = {name: rows[self._rows.start : self._rows.stop] for name, rows in batch.items()}
        yield batch, np.array([(*lane.position, *lane.num_too_long) for lane in lanes], np.int64)
    finally:
      reader.close()

  def _reads_share(self, reader: 'BlockReader', row: int) -> Callable[[int], TokenBlock]:
    s, share, keeps_whole = self._settings, self._shares.reads(row), self._encoder.keeps_whole

    def read_block(number: int) -> TokenBlock:
      index, start, end = share(number)
      return cut(reader[index], start, end, s.seq_len, s.packing, keeps_whole)

    return read_block

  def _reads_stream(self, reader: 'BlockReader') -> Callable[[int], TokenBlock | None]:
    s, num_blocks = self._settings, len(reader)
    assert s.num_epochs is not None
    num_all = num_blocks * s.num_epochs
    order = lambda number: number % num_blocks
    if s.shuffle:
      order = stream_order(num_blocks, s.num_epochs, s.seed, s.batch_size)
    return lambda number: reader[order(number)] if number < num_all else None

  def _stop(self) -> None:
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.close()

  def get_state(self) -> base.State:
    if self._set is not None:
      return {**self._set, **self._shard}
    progress: dict[str, Any] = {'num_batches': self._num_batches, 'num_blocks': self._num_blocks}
    if self._small is not None:
      progress |= self._small.get_state()
    elif self._has_looked:  # before, it is at the beginning
      progress['lanes'] = self._positions[:, :3].tolist()
      if self._settings.num_epochs is None:
        progress['num_parts'] = [self._shares.num_blocks(row) for row in self._rows]
      if self._encoder.keeps_whole:
        progress['num_too_long'] = self._positions[:, 3:].tolist()
    return {**self._identity, **self._shard, **progress}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._identity, self._settings.source)
    shard_count = self._shard['shard_count']
    if self._settings.num_epochs is None:
      if state.get('shard_count') != shard_count:
        raise UserError(
          f'the saved input state has shard_count = {state.get("shard_count")!r}, but this input has shard_count = '
          f'{shard_count}: pass the states of all shards through `reshard_states` first, or restore with as many hosts.'
        )
      base.check_state(state, self._shard)
    if 'lanes' in state:
      positions = np.array(state['lanes'], np.int64)
      if positions.shape != (self._num_lanes, 3) or positions.min() < 0:
        raise UserError(
          f'the saved input state is damaged: lanes have shape {positions.shape}, expected {(self._num_lanes, 3)}.'
        )
    self._stop()
    self._set = state

  def _go_to(self, state: base.State) -> None:
    """Goes to a saved position. Raises a UserError: it is of other text of the same size."""
    s, self._num_batches = self._settings, int(state['num_batches'])
    positions, too_long = np.zeros((self._num_lanes, 3)), np.zeros((self._num_lanes, 2))
    num_rows = 0
    if 'num_rows' in state:
      num_rows = int(state['num_rows'])
      if self._small is None or state['digest'] != self._small.rows.digest:
        raise UserError('the text or its tokenizer is not what it was when the input state was saved: put it back.')
    elif 'lanes' in state and (self._small is not None or (s.num_epochs is None and 'num_parts' not in state)):
      num_rows = self._num_batches * s.batch_size
      if self._small is None:
        epochs = np.array(state['lanes'])[:, 0] * s.batch_size / self._num_blocks
        positions[:, 0] = [int(num * self._shares.num_blocks(row)) for num, row in zip(epochs, self._rows, strict=True)]
      logging.warning(
        'The input state was saved by an earlier version, which read rows in another order. The input goes on as if '
        '%d batches had been read in the new order: some text of this epoch comes again, and some is left out.',
        self._num_batches,
      )
    elif 'lanes' in state:
      positions, too_long = np.array(state['lanes']), np.array(state.get('num_too_long', too_long))
    if self._small is not None:
      self._small.num_read = num_rows
    self._positions = np.concatenate([positions, too_long], axis=1).astype(np.int64)

  def _report_too_long(self) -> None:
    """Logs how many documents were too long: the first time, and whenever there are ten times as many."""
    truncated, skipped = self._positions[:, 3:].sum(axis=0).tolist()
    if truncated + skipped >= max(1, 10 * self._num_reported):
      self._num_reported = truncated + skipped
      counts = self._num_batches, truncated, skipped, self._settings.seq_len
      logging.warning(
        '%d batches were read so far; %d documents in them were truncated and %d left out, because they have more than '
        'seq_len = %d tokens.',
        *counts,
      )

  def close(self) -> None:
    self._closed = True
    # Closing a stream in which another thread is still reading is a ValueError; that thread is left to its timeout.
    with contextlib.suppress(ValueError):
      self._stop()


class BlockReader:
  """Random access to the token blocks of an opened source, read in a thread, which may hang for `timeout_s` seconds."""

  def __init__(self, source: OpenSource, encoder: BlockEncoder, timeout_s: float):
    self._source, self._encoder, self._timeout_s = source, encoder, timeout_s
    self._requests: queue.SimpleQueue[int | None] | None = None  # of the thread; None: there is none
    self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> TokenBlock:
    """Reads and tokenizes a block.

    Raises:
      UserError: its content is damaged.
      JobError: it could not be read, or not within `timeout_s`, or its file is not what it was.
    """
    if self._requests is None:
      self._requests, self._results = queue.SimpleQueue(), queue.SimpleQueue()
      # A daemon: concurrent.futures would wait for a stuck thread when Python exits.
      queues = (self._requests, self._results)
      threading.Thread(target=self._serve, args=queues, name='input-block-reader', daemon=True).start()
    self._requests.put(index)
    try:
      block, error = self._results.get(timeout=self._timeout_s)
    except queue.Empty:
      self.close()  # it is stuck, and ends when the read does; another attempt needs another thread
      raise JobError(
        f'reading {self._source.block_name(index)} has not ended within {self._timeout_s:g} s: the file system may '
        'hang. If it is only slow, raise read_timeout_s.'
      ) from None
    if error is not None:
      raise error
    return block

  def _serve(self, requests: queue.SimpleQueue, results: queue.SimpleQueue) -> None:
    while (index := requests.get()) is not None:
      try:
        results.put((self._read(index), None))
      except BaseException as error:
        results.put((None, error))

  def _read(self, index: int) -> TokenBlock:
    try:
      return self._encoder.encode(self._source[index])
    except ValueError as e:
      raise UserError(f'unusable input in {self._source.block_name(index)}: {e}') from e
    except JobError:
      raise
    except Exception as e:
      raise JobError(f'reading {self._source.block_name(index)} failed: {type(e).__name__}: {e}') from e

  def close(self) -> None:
    if self._requests is not None:
      self._requests.put(None)
      self._requests = None


def _check_has_tokens(blocks: Sequence[TokenBlock] | BlockReader) -> None:
  """Raises a UserError if no block has any."""
  num_skipped = 0
  for index in range(len(blocks)):
    block = blocks[index]
    if block.ids.size:
      return
    num_skipped += block.num_skipped
  if num_skipped:
    raise UserError(f'none of the {num_skipped} records fits in a row, so that all are left out: raise seq_len.')
  raise UserError(f'none of the {len(blocks)} blocks of text has any: give a source with text to train on.')
