"""TextInput: packed batches of text from any source, shuffled by Grain.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)  # training: never ends
    TextInput(source=StdlibText(split='valid'), ..., num_epochs=1, shuffle=False)          # an eval set: one pass

An endless input of a small source takes its batches from the shuffled rows of each epoch. An endless input of a larger
source has one lane per row of the global batch, which reads a share of the source, and a host reads only the lanes of
its rows (row_order.py). One epoch, or several epochs of a larger source, are one lane, which is packed into the rows in
turn: every host reads all of it and keeps its rows, so all hosts agree on the number of batches, of which only the last
is padded.

The global batch always depends only on the config and the position, so the number of hosts may change between save and
restore. A restore reads one block per lane, or a small source, again.
"""

from collections.abc import Callable, Generator, Sequence
import contextlib
import dataclasses
import functools
import queue
import threading
from typing import Any, ClassVar

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.epoch_rows import EpochRows, RowSequence, read_all
from spmd_tasks.inputs.packing import BlockEncoder, Lane, TextEncoder, TokenBlock, pack_batch
from spmd_tasks.inputs.row_order import Shares, is_small, permutation, slice_block, small_source_tokens, stream_order
from spmd_tasks.inputs.text import OpenSource, TextSource
from spmd_tasks.inputs.tokenizers import Tokenizer

_IDENTITY = ('batch_size', 'seq_len', 'seed', 'shuffle', 'num_epochs', 'packing')  # fields that determine the batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput:
  """Packed language-model batches.

  Fields:
    source: the documents: StdlibText(), TextFiles, JsonLines, Parquet, ArrayRecord, TarShards or MegatronTokens.
    tokenizer: ByteTokenizer(), or a tokenizer of tokenizer_files.py.
    batch_size, seq_len: B and T of the global batch.
    seed, shuffle: whether to shuffle rows or blocks, differently in each epoch, and the seed.
    num_epochs: how often the source is read; None repeats it forever.
    max_batches: ends the input early, for short evaluations.
    packing: False puts at most one document in a row.
    read_timeout_s: how many seconds reading a block may take before an error that names the block.
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
        no_limit = '' if name == 'seq_len' else ', or None for no limit'
        raise UserError(f'{name} {number} must be at least 1{no_limit}.')

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return base.language_model_spec(self.batch_size, self.seq_len, self.block_encoder().dtypes)

  def block_encoder(self) -> BlockEncoder:
    """Returns the encoder that tokenizes the source's blocks."""
    return TextEncoder(self.tokenizer)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'TextIterator':
    return TextIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    states = sorted(states, key=lambda state: state['shard_index'])
    assert [state['shard_index'] for state in states] == list(range(states[0]['shard_count']))
    assert len({state['num_batches'] for state in states}) == 1
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
    """Returns how many epochs lie before a position, averaged over the lanes of its shard."""
    if 'num_rows' in state:
      return state['num_rows'] / state['num_rows_of_epoch']
    lanes = state.get('lanes', [(0, 0, 0)])
    parts = state.get('num_parts', [state['num_blocks']] * len(lanes))  # blocks that a lane reads in an epoch
    return sum(num_read / num for (num_read, _, _), num in zip(lanes, parts, strict=True)) / len(lanes)


class TextIterator(base.InputIterator):
  """Yields the batches of one shard of a TextInput."""

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
    self._positions = np.zeros((self._num_lanes, 5), np.int64)  # of each lane: Lane.position and Lane.num_too_long
    self._num_batches = 0
    self._size_is_known = settings.num_epochs == 1  # whether the source is small matters only if it is repeated
    self._row_sequence: RowSequence | None = None  # of a small source that is repeated
    self._pending_state: base.State | None = None  # set, but the iterator has not moved there yet
    self._lanes: list[Lane] = []
    self._stream: Generator[tuple[base.Batch, np.ndarray], None, None] | None = None
    self._closed = False
    self._num_reported = 0  # documents that were too long when this was last logged

  @property
  def reads_rows(self) -> bool:
    """Whether `next_rows` may be called: whether a small source is repeated, which is then read."""
    self._prepare()
    return self._row_sequence is not None

  def __next__(self) -> base.Batch:
    self._prepare()
    limit = self._settings.max_batches
    if limit is not None and self._num_batches >= limit:
      raise StopIteration
    if self._row_sequence is not None:
      if self._row_sequence.num_left <= 0:
        raise StopIteration
      return self._next_rows(self._settings.batch_size, self._rows)
    if self._stream is None:
      self._stream = self._batches(self._positions)
    try:
      batch, self._positions = next(self._stream)
    except BaseException:
      # Some lanes may have advanced: the next attempt starts again after the last batch, so that no row is lost.
      self._stop()
      raise
    self._num_batches += 1
    self._report_too_long()
    return self.finish(batch)

  def next_rows(self, count: int, indices: Sequence[int]) -> base.Batch:
    self._prepare()
    assert self._row_sequence is not None
    limit = self._settings.max_batches
    num_left = self._row_sequence.num_left
    if limit is not None:
      num_left = min(num_left, limit * self._settings.batch_size - self._row_sequence.num_read)
    if num_left < count:
      raise StopIteration
    return self._next_rows(count, indices)

  def _next_rows(self, count: int, indices: Sequence[int]) -> base.Batch:
    assert self._row_sequence is not None
    batch = self._row_sequence.next_rows(count, indices)
    self._num_batches = self._row_sequence.num_read // self._settings.batch_size
    return self.finish(batch)

  def finish(self, batch: base.Batch) -> base.Batch:
    """Converts packed rows into a batch; subclasses override it."""
    return batch

  def origins(self) -> list[list[str]] | None:
    """Returns the names of the blocks that each row of the last batch is packed from; None for a single stream."""
    if self._row_sequence is not None:
      rows = self._row_sequence.rows
      packed = [[] if row is None else rows.blocks_of(row) for row in self._row_sequence.last]
      blocks = [[self._block_order[index] for index in indices] for indices in packed]
    elif self._settings.num_epochs is None:
      blocks = [
        [self._shares.block_ranges(row)(number)[0] for number in lane.blocks_of_row]
        for row, lane in zip(self._rows, self._lanes, strict=True)
      ]
    else:
      return None
    return [[self._source.block_name(int(index)) for index in indices] for indices in blocks]

  def _prepare(self) -> None:
    """Reads a small source, or divides a larger one, on the first call; then moves to a state that was set."""
    assert not self._closed, 'the iterator is closed'
    if not self._size_is_known:
      self._read_or_divide()
      self._size_is_known = True
    state, self._pending_state = self._pending_state, None
    if state is not None:
      try:
        self._seek(state)
      except BaseException:
        self._pending_state = state
        raise

  def _read_or_divide(self) -> None:
    """Reads a small source and packs its rows; divides a larger source among the rows of the batch."""
    s = self._settings
    blocks = self._small_blocks()
    if blocks is None:
      if s.num_epochs is None:
        self._shares = Shares(self._num_blocks, self._sizes, s.batch_size, s.seed, s.shuffle)
      return
    _check_has_tokens(blocks)
    make_batch = lambda num_rows: base.empty_batch(num_rows, s.seq_len, self._encoder.pad_id, self._encoder.dtypes)
    rows = EpochRows(blocks, functools.partial(self._make_lane, lambda: None), make_batch)
    self._row_sequence = RowSequence(rows, s.batch_size, s.seed if s.shuffle else None, s.num_epochs)

  def _small_blocks(self) -> list[TokenBlock] | None:
    """Returns the blocks of a small source, in the order in which they are packed; None if the source is larger."""
    s = self._settings
    limit = small_source_tokens(s.batch_size, s.seq_len)
    reader = BlockReader(self._source, self._encoder, s.read_timeout_s)
    try:
      if not is_small(reader.__getitem__, self._num_blocks, self._sizes, limit):
        return None
      order = permutation(self._num_blocks, s.seed, 0) if s.shuffle else np.arange(self._num_blocks)
      self._block_order = order.tolist()
      return read_all(reader.__getitem__, self._block_order, limit)
    finally:
      reader.close()

  def _make_lane(
    self, check: Callable[[], None], read_block: Callable[[int], TokenBlock | None], num_blocks: int
  ) -> Lane:
    return Lane(read_block, num_blocks, check, self._settings.packing, self._encoder.keeps_whole)

  def _batches(self, positions: np.ndarray) -> Generator[tuple[base.Batch, np.ndarray], None, None]:
    """Yields this shard's rows of each batch, and the positions after the batch, int64 [lanes, 5]."""
    s = self._settings
    reader = BlockReader(self._source, self._encoder, s.read_timeout_s)
    check = functools.cache(lambda: _check_has_tokens(reader))
    try:
      if s.num_epochs is None:
        lanes = [
          self._make_lane(check, self._share_blocks(reader, row), self._shares.num_blocks(row)) for row in self._rows
        ]
        row_lanes = lanes
      else:
        lanes = [self._make_lane(check, self._stream_blocks(reader), self._num_blocks)]
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

  def _share_blocks(self, reader: 'BlockReader', row: int) -> Callable[[int], TokenBlock]:
    """Returns the `read_block` of a lane over one row's share of the source."""
    s, block_range, keeps_whole = self._settings, self._shares.block_ranges(row), self._encoder.keeps_whole

    def read_block(number: int) -> TokenBlock:
      index, start, end = block_range(number)
      return slice_block(reader[index], start, end, s.seq_len, s.packing, keeps_whole)

    return read_block

  def _stream_blocks(self, reader: 'BlockReader') -> Callable[[int], TokenBlock | None]:
    """Returns the `read_block` of a lane over all epochs of the source."""
    s, num_blocks = self._settings, len(reader)
    assert s.num_epochs is not None
    length = num_blocks * s.num_epochs
    order = lambda position: position % num_blocks
    if s.shuffle:
      order = stream_order(num_blocks, s.num_epochs, s.seed, s.batch_size)
    return lambda position: reader[order(position)] if position < length else None

  def _stop(self) -> None:
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.close()

  def get_state(self) -> base.State:
    if self._pending_state is not None:
      return {**self._pending_state, **self._shard}
    progress: dict[str, Any] = {'num_batches': self._num_batches, 'num_blocks': self._num_blocks}
    if self._row_sequence is not None:
      progress |= self._row_sequence.get_state()
    elif self._size_is_known:  # if not, nothing has been read
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
    self._stop()
    self._pending_state = state

  def _seek(self, state: base.State) -> None:
    """Moves to a saved position. Raises a UserError if the text has changed without changing its size."""
    s, self._num_batches = self._settings, int(state['num_batches'])
    positions, too_long = np.zeros((self._num_lanes, 3)), np.zeros((self._num_lanes, 2))
    num_rows = 0
    if 'num_rows' in state:
      num_rows = int(state['num_rows'])
      if self._row_sequence is None or state['digest'] != self._row_sequence.rows.digest:
        raise UserError(
          f'the text or its tokenizer has changed since the input state was saved: restore them, or {base.START_OVER}'
        )
    elif 'lanes' in state and (self._row_sequence is not None or (s.num_epochs is None and 'num_parts' not in state)):
      num_rows = self._num_batches * s.batch_size
      if self._row_sequence is None:
        epochs = np.array(state['lanes'])[:, 0] * s.batch_size / self._num_blocks
        positions[:, 0] = [int(num * self._shares.num_blocks(row)) for num, row in zip(epochs, self._rows, strict=True)]
      logging.warning(
        'The input state was saved by an earlier version, which read rows in another order. The input continues after '
        '%d batches of the new order, which repeats some text of this epoch and omits some.',
        self._num_batches,
      )
    elif 'lanes' in state:
      positions, too_long = np.array(state['lanes']), np.array(state.get('num_too_long', too_long))
    if self._row_sequence is not None:
      self._row_sequence.num_read = num_rows
    self._positions = np.concatenate([positions, too_long], axis=1).astype(np.int64)

  def _report_too_long(self) -> None:
    """Logs how many documents were too long, the first time and whenever their number has grown tenfold."""
    truncated, skipped = self._positions[:, 3:].sum(axis=0).tolist()
    if truncated + skipped >= max(1, 10 * self._num_reported):
      self._num_reported = truncated + skipped
      counts = self._num_batches, truncated, skipped, self._settings.seq_len
      logging.warning(
        'In the first %d batches, %d documents were truncated and %d left out, because they have more than seq_len = '
        '%d tokens.',
        *counts,
      )

  def close(self) -> None:
    self._closed = True
    # Python raises a ValueError if another thread is still reading from the stream; its timeout ends that thread.
    with contextlib.suppress(ValueError):
      self._stop()


class BlockReader:
  """Reads and tokenizes the blocks of an opened source in a thread, with a timeout for each block."""

  def __init__(self, source: OpenSource, encoder: BlockEncoder, timeout_s: float):
    self._source, self._encoder, self._timeout_s = source, encoder, timeout_s
    self._requests: queue.SimpleQueue[int | None] | None = None  # to the thread; None if there is none
    self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> TokenBlock:
    """Reads and tokenizes a block.

    Raises:
      UserError: the content is invalid.
      JobError: the block cannot be read within `timeout_s`, or its file has changed.
    """
    if self._requests is None:
      self._requests, self._results = queue.SimpleQueue(), queue.SimpleQueue()
      # A daemon thread: concurrent.futures would wait for a stuck thread when Python exits.
      queues = (self._requests, self._results)
      threading.Thread(target=self._serve, args=queues, name='input-block-reader', daemon=True).start()
    self._requests.put(index)
    try:
      block, error = self._results.get(timeout=self._timeout_s)
    except queue.Empty:
      self.close()  # the stuck thread ends when its read does; the next attempt starts another one
      raise JobError(
        f'reading {self._source.block_name(index)} took longer than {self._timeout_s:g} s: the file system may hang. '
        'If it is only slow, raise read_timeout_s.'
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
  """Raises a UserError if no block has a token."""
  num_skipped = 0
  for index in range(len(blocks)):
    block = blocks[index]
    if block.ids.size:
      return
    num_skipped += block.num_skipped
  if num_skipped:
    raise UserError(f'none of the {num_skipped} records fits in a row: raise seq_len.')
  raise UserError(f'the {len(blocks)} blocks of the source have no text: give a source with text.')
