"""TextInput: packed batches of text from any source, shuffled by Grain.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)  # training: never ends
    TextInput(source=StdlibText(split='valid'), ..., num_epochs=1, shuffle=False)          # an eval set: one pass

A training input (`num_epochs=None`) has one lane per row of the global batch (_packing.py). A host reads the lanes of
its rows; its worker processes share them out. A finite input is one stream, dealt to the rows in turn. Every host
reads the whole stream and keeps its own rows, so all hosts agree on the number of batches; only the last is padded.

In both cases the settings and the position alone determine the global batch. The number of hosts and of workers may
change between save and restore, and the batches stay exactly the same. A restore reads one block per lane again.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
from typing import Any, ClassVar

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs._lane_reader import LaneReader
from spmd_tasks.inputs.packing import BlockEncoder, TextEncoder
from spmd_tasks.inputs.text import TextSource
from spmd_tasks.inputs.tokenizers import Tokenizer

_PER_LANE = ('lanes', 'num_too_long')  # of a saved position


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput:
  """Packed language-model batches.

  Fields:
    source: the documents: StdlibText(), TextFiles, JsonLines, Parquet or ArrayRecord.
    tokenizer: ByteTokenizer() or BpeTokenizer.
    batch_size, seq_len: B and T of the global batch.
    seed, shuffle: the blocks are shuffled differently in each epoch.
    num_epochs: number of passes over the source; None repeats it without end.
    max_batches: ends the input early, for short evaluations.
    packing: False puts at most one document in a row.
    num_workers: processes per host that read and tokenize; 0 reads in this process. A finite input uses at most one.
    worker_buffer_size: number of batches that each worker prepares ahead.
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
  num_workers: int = 0
  worker_buffer_size: int = 2
  read_timeout_s: float = 120.0

  kind: ClassVar[str] = 'text'  # in saved positions

  def __post_init__(self):
    if self.seq_len < 1:
      raise UserError(f'seq_len {self.seq_len} must be at least 1.')
    if self.num_epochs is not None and self.num_epochs < 1:
      raise UserError(f'num_epochs {self.num_epochs} must be at least 1, or None to read for ever.')
    if self.num_workers < 0 or self.worker_buffer_size < 1:
      raise UserError(
        f'num_workers {self.num_workers} must not be negative, worker_buffer_size {self.worker_buffer_size} at least 1.'
      )

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return base.language_model_spec(self.batch_size, self.seq_len, self.block_encoder().dtypes)

  def block_encoder(self) -> BlockEncoder:
    """Makes the encoder from the source's blocks to tokens."""
    return TextEncoder(self.tokenizer)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'TextIterator':
    return TextIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    states = sorted(states, key=lambda state: state['shard_index'])
    saved_count = states[0]['shard_count']
    if [state['shard_index'] for state in states] != list(range(saved_count)):
      raise UserError(
        f'the states of all {saved_count} shards are needed, those of {[s["shard_index"] for s in states]} are there.'
      )
    batches = [state['num_batches'] for state in states]
    if len(set(batches)) > 1:
      raise UserError(f'the shards were saved after different numbers of batches, {batches}.')
    endless = self.num_epochs is None
    resharded = []
    for index in range(shard_count):
      rows = base.shard_rows(self.batch_size, index, shard_count)
      own = {}
      for name in [name for name in _PER_LANE if name in states[0]]:
        every = [lane for state in states for lane in state[name]] if endless else states[0][name]
        own[name] = every[rows.start : rows.stop] if endless else every
      resharded.append({**states[0], 'shard_index': index, 'shard_count': shard_count, **own})
    return resharded

  def epochs(self, state: base.State) -> float | None:
    """Returns how often the source has been read at a position, as a mean over the lanes of its shard.

    None for positions that were saved without the number of blocks.
    """
    if 'num_blocks' not in state:
      return None
    num_lanes = self.batch_size if self.num_epochs is None else 1
    blocks_per_lane = sum(num_read for num_read, _, _ in state['lanes']) / len(state['lanes'])
    return blocks_per_lane * num_lanes / state['num_blocks']


class TextIterator:
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
      **{
        name: getattr(settings, name) for name in ('batch_size', 'seq_len', 'seed', 'shuffle', 'num_epochs', 'packing')
      },
    }
    rows = base.shard_rows(settings.batch_size, shard_index, shard_count)
    names = ('batch_size', 'seq_len', 'seed', 'shuffle', 'num_epochs', 'packing', 'read_timeout_s')
    shared: dict[str, Any] = {'source': source, 'encoder': self._encoder} | {
      name: getattr(settings, name) for name in names
    }
    if settings.num_epochs is None:
      num_groups = min(max(settings.num_workers, 1), len(rows))
      lanes = [tuple(int(row) for row in part) for part in np.array_split(rows, num_groups)]
      self._readers = [LaneReader(num_lanes=settings.batch_size, lanes=part, **shared) for part in lanes]
    else:
      self._readers = [LaneReader(num_lanes=1, lanes=(0,), rows=rows, **shared)]
    self._positions = [np.zeros((len(reader.lanes), 5), np.int64) for reader in self._readers]
    self._num_batches = 0
    self._streams: list[Any] | None = None
    self._closed = False
    self._num_reported = 0  # documents that were too long, when that was last logged

  def __iter__(self) -> Iterator[base.Batch]:
    return self

  def __next__(self) -> base.Batch:
    if self._closed:
      raise UserError('this input iterator has been closed: make another one from its settings.')
    limit = self._settings.max_batches
    if limit is not None and self._num_batches >= limit:
      raise StopIteration
    try:
      if self._streams is None:
        self._streams = self._start_streams()
      parts = [next(stream) for stream in self._streams]
    except BaseException:
      # Some lanes may have moved on: another attempt starts again behind the last batch, so that no row is lost.
      self._stop_streams()
      raise
    self._positions = [positions for _, positions in parts]
    self._num_batches += 1
    self._report_too_long()
    if len(parts) == 1:
      return parts[0][0]
    return {name: np.concatenate([batch[name] for batch, _ in parts]) for name in parts[0][0]}

  def _start_streams(self) -> list[Any]:
    if self._settings.num_workers == 0:
      return [reader.batches(at) for reader, at in zip(self._readers, self._positions, strict=True)]
    from spmd_tasks.inputs._worker_processes import WorkerStream

    return [
      WorkerStream(reader, positions, self._settings.worker_buffer_size)
      for reader, positions in zip(self._readers, self._positions, strict=True)
    ]

  def _stop_streams(self) -> None:
    streams, self._streams = self._streams, None
    for stream in streams or []:
      stream.close()

  def get_state(self) -> base.State:
    positions = np.concatenate(self._positions)
    progress = {'num_batches': self._num_batches, 'num_blocks': self._num_blocks, 'lanes': positions[:, :3].tolist()}
    if self._encoder.keeps_whole:
      progress['num_too_long'] = positions[:, 3:].tolist()
    return {**self._identity, **self._shard, **progress}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._identity)
    shard_count = self._shard['shard_count']
    if self._settings.num_epochs is None and state.get('shard_count') != shard_count:
      raise UserError(
        f'the saved input state has shard_count = {state.get("shard_count")!r}, but this input has shard_count = '
        f'{shard_count}: pass the states of all shards through `reshard_states` first, or restore with as many hosts.'
      )
    if self._settings.num_epochs is None:
      base.check_state(state, self._shard)
    positions = np.array(state['lanes'], np.int64)
    expected = sum(len(reader.lanes) for reader in self._readers)
    if positions.shape != (expected, 3) or positions.min() < 0:
      raise UserError(
        f'the saved input state is damaged: lanes have shape {positions.shape}, expected {(expected, 3)}.'
      )
    too_long = np.array(state.get('num_too_long', np.zeros((expected, 2))), np.int64).reshape(expected, 2)
    self._stop_streams()
    ends = np.cumsum([len(reader.lanes) for reader in self._readers])[:-1]
    self._positions = np.split(np.concatenate([positions, too_long], axis=1), ends)
    self._num_batches = int(state['num_batches'])

  @property
  def num_too_long(self) -> tuple[int, int]:
    """Counts the documents that did not fit in a row: (truncated, left out)."""
    truncated, skipped = np.concatenate(self._positions)[:, 3:].sum(axis=0).tolist()
    return truncated, skipped

  def _report_too_long(self) -> None:
    """Logs how many documents were too long: the first time, and whenever there are ten times as many."""
    truncated, skipped = self.num_too_long
    if truncated + skipped >= max(1, 10 * self._num_reported):
      self._num_reported = truncated + skipped
      logging.warning(
        '%d batches were read so far; %d documents in them were truncated and %d left out, because they have more than '
        'seq_len = %d tokens.',
        self._num_batches,
        truncated,
        skipped,
        self._settings.seq_len,
      )

  def close(self) -> None:
    self._closed = True
    # Closing a stream in which another thread is still reading is a ValueError; that thread is left to its timeout.
    with contextlib.suppress(ValueError):
      self._stop_streams()
