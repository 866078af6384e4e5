"""TextInput: packed batches of text from any source, shuffled by Grain.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)  # training: never ends
    TextInput(source=StdlibText(split='valid'), ..., num_epochs=1, shuffle=False)          # an eval set: one pass

A training input (`num_epochs=None`) has one lane per row of the global batch (packing.py). A host reads the lanes of
its rows. A finite input is one stream, dealt to the rows in turn. Every host reads the whole stream and keeps its own
rows, so all hosts agree on the number of batches; only the last is padded.

In both cases the config and the position alone determine the global batch, so the number of hosts may change between
save and restore. A restore reads one block per lane again.
"""

from collections.abc import Generator, Sequence
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
from spmd_tasks.inputs.packing import BlockEncoder, Lane, TextEncoder, TokenBlock, pack_batch
from spmd_tasks.inputs.text import OpenSource, TextSource
from spmd_tasks.inputs.tokenizers import Tokenizer

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
      for name in ('lanes', 'num_too_long') if endless else ():
        if name in states[0]:
          own[name] = [lane for state in states for lane in state[name]][rows.start : rows.stop]
      resharded.append({**states[0], **own})
    return resharded

  def epochs(self, state: base.State) -> float:
    """Returns how often the source has been read at a position, as a mean over the lanes of its shard."""
    num_lanes = self.batch_size if self.num_epochs is None else 1
    blocks_per_lane = sum(num_read for num_read, _, _ in state['lanes']) / len(state['lanes'])
    return blocks_per_lane * num_lanes / state['num_blocks']


class TextIterator(base.InputIterator):
  """The batches of one shard of a TextInput. Its state is plain JSON data."""

  def __init__(self, settings: TextInput, shard_index: int, shard_count: int):
    self._settings = settings
    self._shard = {'shard_index': shard_index, 'shard_count': shard_count}
    source = settings.source.open()
    self._num_blocks = len(source)
    self._encoder = settings.block_encoder()
    self._identity = {
      'kind': settings.kind,
      'source': source.fingerprint(),
      **self._encoder.identity(),
      **{name: getattr(settings, name) for name in _IDENTITY},
    }
    self._source = source
    rows = base.shard_rows(settings.batch_size, shard_index, shard_count)
    is_endless = settings.num_epochs is None
    self._lanes, self._num_lanes = (tuple(rows), settings.batch_size) if is_endless else ((0,), 1)
    self._rows = None if is_endless else slice(rows.start, rows.stop)
    self._positions = np.zeros((len(self._lanes), 5), np.int64)  # Lane.position and the numbers of Lane.num_too_long
    self._num_batches = 0
    self._stream: Generator[tuple[base.Batch, np.ndarray], None, None] | None = None
    self._closed = False
    self._num_reported = 0  # documents that were too long, when that was last logged

  def __next__(self) -> base.Batch:
    if self._closed:
      raise UserError('this input iterator has been closed: make another one from its Input.')
    limit = self._settings.max_batches
    if limit is not None and self._num_batches >= limit:
      raise StopIteration
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
    return batch

  def _batches(self, positions: np.ndarray) -> Generator[tuple[base.Batch, np.ndarray], None, None]:
    """Yields this shard's rows of the batches, with the positions after them: int64 [len(lanes), 5]."""
    import grain

    s = self._settings
    reader = BlockReader(self._source, self._encoder, s.read_timeout_s)
    blocks = grain.MapDataset.source(reader)
    if s.shuffle:
      blocks = blocks.seed(s.seed).shuffle()
    blocks = blocks.repeat(s.num_epochs)

    def read_block(index: int) -> TokenBlock | None:
      return blocks[index] if index < len(blocks) else None

    @functools.cache
    def goes_on() -> bool:
      _check_has_tokens(reader)
      return s.shuffle

    try:
      lanes = [
        Lane(lane, self._num_lanes, read_block, len(reader), goes_on, s.packing, self._encoder.keeps_whole)
        for lane in self._lanes
      ]
      for lane, (*position, truncated, skipped) in zip(lanes, positions.tolist(), strict=True):
        lane.seek(*position)
        lane.num_too_long[:] = truncated, skipped
      row_lanes = lanes if self._rows is None else lanes * s.batch_size
      pad_id, dtypes = self._encoder.pad_id, self._encoder.dtypes
      while (batch := pack_batch(row_lanes, s.seq_len, pad_id, dtypes)) is not None:
        if self._rows is not None:
          batch = {name: rows[self._rows] for name, rows in batch.items()}
        yield batch, np.array([(*lane.position, *lane.num_too_long) for lane in lanes], np.int64)
    finally:
      reader.close()

  def _stop(self) -> None:
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.close()

  def get_state(self) -> base.State:
    lanes = self._positions[:, :3].tolist()
    progress = {'num_batches': self._num_batches, 'num_blocks': self._num_blocks, 'lanes': lanes}
    if self._encoder.keeps_whole:
      progress['num_too_long'] = self._positions[:, 3:].tolist()
    return {**self._identity, **self._shard, **progress}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._identity)
    shard_count = self._shard['shard_count']
    if self._settings.num_epochs is None:
      if state.get('shard_count') != shard_count:
        raise UserError(
          f'the saved input state has shard_count = {state.get("shard_count")!r}, but this input has shard_count = '
          f'{shard_count}: pass the states of all shards through `reshard_states` first, or restore with as many hosts.'
        )
      base.check_state(state, self._shard)
    positions = np.array(state['lanes'], np.int64)
    expected = len(self._lanes)
    if positions.shape != (expected, 3) or positions.min() < 0:
      raise UserError(
        f'the saved input state is damaged: lanes have shape {positions.shape}, expected {(expected, 3)}.'
      )
    too_long = np.array(state.get('num_too_long', np.zeros((expected, 2))), np.int64).reshape(expected, 2)
    self._stop()
    self._positions = np.concatenate([positions, too_long], axis=1)
    self._num_batches = int(state['num_batches'])

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


def _check_has_tokens(reader: BlockReader) -> None:
  """Raises a UserError if no block has any."""
  num_skipped = 0
  for index in range(len(reader)):
    block = reader[index]
    if block.ids.size:
      return
    num_skipped += block.num_skipped
  if num_skipped:
    raise UserError(f'none of the {num_skipped} records fits in a row, so that all are left out: raise seq_len.')
  raise UserError(f'none of the {len(reader)} blocks of text has any: give a source with text to train on.')
