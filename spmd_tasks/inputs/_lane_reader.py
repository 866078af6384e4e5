"""Reads lanes of token blocks: BlockReader tokenizes single blocks, LaneReader packs them into batches.

A process of the job runs a LaneReader directly (`num_workers=0`) or in a worker process (_worker_processes.py).
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import queue
import threading
from typing import Any

import numpy as np

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.packing import BlockEncoder, Lane, TokenBlock, pack_batch
from spmd_tasks.inputs.text import OpenSource


class BlockReader:
  """Random access to the token blocks of an opened source.

  Reading happens in a thread of its own, so that a file system that hangs becomes an error after `timeout_s` seconds.
  """

  def __init__(self, source: OpenSource, encoder: BlockEncoder, timeout_s: float):
    self._source = source
    self._encoder = encoder
    self._timeout_s = timeout_s
    self._thread: _Worker | None = None

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> TokenBlock:
    """Reads and tokenizes block `index`.

    Raises:
      UserError: the block's content is damaged.
      JobError: the block could not be read, or not within `timeout_s`, or its file is not what it was.
    """
    if self._thread is None:
      self._thread = _Worker(self._read)
    try:
      return self._thread.call(index, self._timeout_s)
    except queue.Empty:
      self.close()  # it is stuck, and ends when the read does; another attempt needs another thread
      raise JobError(
        f'reading {self._source.block_name(index)} has not ended within {self._timeout_s:g} s: the file system may '
        'hang. If it is only slow, raise read_timeout_s.'
      ) from None

  def _read(self, index: int) -> TokenBlock:
    try:
      return self._encoder.encode(self._source[index])
    except ValueError as e:
      name = self._source.block_name(index)
      raise UserError(f'unusable input in {name}: {e}') from e
    except JobError:
      raise
    except Exception as e:
      name = self._source.block_name(index)
      raise JobError(f'reading {name} failed: {type(e).__name__}: {e}') from e

  def close(self) -> None:
    if self._thread is not None:
      self._thread.stop()
      self._thread = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneReader:
  """Reads some lanes of a TextInput. Picklable, as worker processes receive it.

  Fields:
    source: the opened source.
    lanes: indices of the lanes to read, of `num_lanes` in all.
    rows: for a finite input, which rows of the global batch to keep; its one lane is dealt to all rows in turn.
    encoder: makes tokens of the source's blocks.
    batch_size, seq_len, ...: the fields of the same names of TextInput.
  """

  source: OpenSource
  num_lanes: int
  lanes: tuple[int, ...]
  rows: range | None = None
  encoder: BlockEncoder
  batch_size: int
  seq_len: int
  seed: int
  shuffle: bool
  num_epochs: int | None
  packing: bool
  read_timeout_s: float

  def batches(self, positions: np.ndarray) -> Iterator[tuple[base.Batch, np.ndarray]]:
    """Yields batches of these lanes' rows with the positions after them: int64 [len(lanes), 5].

    A position is `Lane.position` and the two numbers of `Lane.num_too_long`.
    """
    import grain

    reader = BlockReader(self.source, self.encoder, self.read_timeout_s)
    blocks = grain.MapDataset.source(reader)
    if self.shuffle:
      blocks = blocks.seed(self.seed).shuffle()
    blocks = blocks.repeat(self.num_epochs)

    def read_block(index: int) -> TokenBlock | None:
      return blocks[index] if index < len(blocks) else None

    @functools.cache
    def goes_on() -> bool:
      self._check_has_tokens(reader)
      return self.shuffle

    try:
      lanes = [
        Lane(lane, self.num_lanes, read_block, len(reader), goes_on, self.packing, self.encoder.keeps_whole)
        for lane in self.lanes
      ]
      for lane, (*position, truncated, skipped) in zip(lanes, positions.tolist(), strict=True):
        lane.seek(*position)
        lane.num_too_long[:] = truncated, skipped
      row_lanes = lanes if self.rows is None else lanes * self.batch_size
      pad_id, dtypes = self.encoder.pad_id, self.encoder.dtypes
      while (batch := pack_batch(row_lanes, self.seq_len, pad_id, dtypes)) is not None:
        if self.rows is not None:
          batch = {name: rows[self.rows.start : self.rows.stop] for name, rows in batch.items()}
        yield batch, np.array([(*lane.position, *lane.num_too_long) for lane in lanes], np.int64)
    finally:
      reader.close()

  def _check_has_tokens(self, reader: BlockReader) -> None:
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


class _Worker:
  """A daemon thread that calls one function; concurrent.futures would wait for a stuck thread when Python exits."""

  def __init__(self, function: Callable[[int], Any]):
    self._function = function
    self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=self._run, name='input-block-reader', daemon=True).start()

  def _run(self) -> None:
    while (request := self._requests.get()) is not None:
      try:
        result, error = self._function(request), None
      except BaseException as e:
        result, error = None, e
      self._results.put((result, error))

  def call(self, request: int, timeout_s: float) -> Any:
    self._requests.put(request)
    result, error = self._results.get(timeout=timeout_s)
    if error is not None:
      raise error
    return result

  def stop(self) -> None:
    self._requests.put(None)
