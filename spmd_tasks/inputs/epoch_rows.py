"""The rows of a small source: packed once, and reshuffled in each epoch. row_order.py says why.

Legend: B rows of the global batch, T tokens of a row, N rows of an epoch.
"""

from collections.abc import Callable, Sequence
import math
import zlib

from absl import logging
import numpy as np

from spmd_tasks.inputs import base
from spmd_tasks.inputs.packing import Lane, TokenBlock
from spmd_tasks.inputs.row_order import order_of_epoch


def read_all(read_block: Callable[[int], TokenBlock], order: Sequence[int], max_tokens: int) -> list[TokenBlock] | None:
  """Returns the blocks of a source in `order`; None if they have over twice `max_tokens`, contrary to the estimate."""
  blocks, num_tokens = [], 0
  for index in order:
    blocks.append(read_block(index))
    num_tokens += blocks[-1].ids.size
    if num_tokens > 2 * max_tokens:
      return None
  return blocks


class EpochRows:
  """Random access to the rows of a small source, in the order in which they were packed.

  Args:
    blocks: the source's blocks, in the order in which they are packed.
    make_lane: (read_block, num_blocks) -> the Lane that packs them.
    make_batch: num_rows -> a batch of padding.

  Attributes:
    num_rows: N. The last row may end in padding.
    digest: a checksum of all tokens.
  """

  def __init__(
    self, blocks: Sequence[TokenBlock], make_lane: Callable[..., Lane], make_batch: Callable[[int], base.Batch]
  ):
    self._lane = make_lane(lambda index: blocks[index] if index < len(blocks) else None, len(blocks))
    self._make_batch, scratch = make_batch, make_batch(1)
    self._positions = np.arange(scratch['ids'].shape[1], dtype=np.int32)
    starts = []  # for each row, the index of its first block and the offset in it
    start = self._lane.position
    while self._lane.fill_row(scratch, 0, self._positions):
      starts.append(start[:2])
      start = self._lane.position
    self._starts = np.array(starts, np.int64)
    self.num_rows = len(starts)
    self.digest = zlib.crc32(np.array([block.digest for block in blocks], np.uint32).tobytes())
    if any(too_long := self._lane.num_too_long.tolist()):
      logging.warning(
        '%d documents of an epoch were truncated and %d left out, because they have more than seq_len = %d tokens.',
        *(*too_long, self._positions.size),
      )

  def batch(self, indices: Sequence[int | None]) -> base.Batch:
    """Returns the rows at `indices`; None gives padding."""
    batch = self._make_batch(len(indices))
    for row, index in enumerate(indices):
      if index is not None:
        self._fill_row(batch, row, index)
    return batch

  def blocks_of(self, index: int) -> list[int]:
    """Returns the indices in `blocks` of the blocks that a row is packed from."""
    self._fill_row(self._make_batch(1), 0, index)
    return self._lane.blocks_of_row

  def _fill_row(self, batch: base.Batch, row: int, index: int) -> None:
    num_read, offset = self._starts[index].tolist()
    self._lane.seek(num_read, offset, None)
    self._lane.fill_row(batch, row, self._positions)


class RowSequence:
  """The rows of all epochs and shards in one sequence, and a position in it.

  Attributes:
    num_read: how many rows lie before the position.
    last: for each row of this shard's last batch, its index in EpochRows; None is padding.
  """

  def __init__(self, rows: EpochRows, batch_size: int, seed: int | None, num_epochs: int | None):
    """Shuffles the rows of each epoch unless `seed` is None."""
    self.rows, self._batch_size, self._seed = rows, batch_size, seed
    self._num_rows = math.inf if num_epochs is None else num_epochs * rows.num_rows
    self.num_read = 0
    self.last: list[int | None] = []
    self._has_warned = False

  @property
  def num_left(self) -> float:
    return self._num_rows - self.num_read

  def next_rows(self, count: int, indices: Sequence[int]) -> base.Batch:
    """Like RowIterator.next_rows, but rows after the last epoch are padding."""
    if count > self.rows.num_rows and not self._has_warned:
      self._has_warned = True
      logging.warning(
        'An epoch has %d rows, but a batch takes %d, so that batches repeat rows. Set batch_size to at most %d, or add '
        'text.',
        *(self.rows.num_rows, count, self.rows.num_rows),
      )
    self.last = [self._row_at(self.num_read + index) if index < self.num_left else None for index in indices]
    self.num_read += count
    return self.rows.batch(self.last)

  def _row_at(self, position: int) -> int:
    """Returns the index in EpochRows of the row at a position of the sequence."""
    epoch, offset = divmod(position, self.rows.num_rows)
    if self._seed is None:
      return offset
    return int(order_of_epoch(self.rows.num_rows, self._batch_size, self._seed, epoch)[offset])

  def get_state(self) -> base.State:
    return {'num_rows': self.num_read, 'num_rows_of_epoch': self.rows.num_rows, 'digest': self.rows.digest}
