"""The rows of a small source, cut once, in another order in each epoch; row_order.py says why.

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
  """Returns all blocks of a source in an order; None if, against all signs, they have over twice `max_tokens`."""
  blocks, num_tokens = [], 0
  for index in order:
    blocks.append(read_block(index))
    num_tokens += blocks[-1].ids.size
    if num_tokens > 2 * max_tokens:
      return None
  return blocks


class EpochRows:
  """All rows of a small source, as they were cut, one after another.

  Args:
    blocks: of the source, in the order in which they are cut.
    make_lane: (read_block, num_blocks) -> the Lane that cuts them.
    make_batch: makes a batch of padding of a number of rows.

  Attributes:
    num_rows: N. The last row that is cut may have padding at its end.
    digest: of all tokens.
  """

  def __init__(
    self, blocks: Sequence[TokenBlock], make_lane: Callable[..., Lane], make_batch: Callable[[int], base.Batch]
  ):
    self._lane = make_lane(lambda number: blocks[number] if number < len(blocks) else None, len(blocks))
    self._make_batch, scratch = make_batch, make_batch(1)
    self._positions = np.arange(scratch['ids'].shape[1], dtype=np.int32)
    starts = []  # of rows: how many blocks are behind the current one, and tokens used of it
    start = self._lane.position
    while self._lane.fill_row(scratch, 0, self._positions):
      starts.append(start[:2])
      start = self._lane.position
    self._starts = np.array(starts, np.int64)
    self.num_rows = len(starts)
    self.digest = zlib.crc32(np.array([block.digest for block in blocks], np.uint32).tobytes())
    if any(too_long := self._lane.num_too_long.tolist()):
      logging.warning(
        'Of the documents of an epoch, %d were truncated and %d left out, because they have more than seq_len = %d '
        'tokens.',
        *(*too_long, self._positions.size),
      )

  def batch(self, numbers: Sequence[int | None]) -> base.Batch:
    """Returns rows by the numbers by which they were cut; None gives padding."""
    batch = self._make_batch(len(numbers))
    for row, number in enumerate(numbers):
      if number is not None:
        self._fill_row(batch, row, number)
    return batch

  def blocks_of(self, number: int) -> list[int]:
    """The numbers of the blocks that a row is from."""
    self._fill_row(self._make_batch(1), 0, number)
    return self._lane.blocks_of_row

  def _fill_row(self, batch: base.Batch, row: int, number: int) -> None:
    num_read, offset = self._starts[number].tolist()
    self._lane.seek(num_read, offset, None)
    self._lane.fill_row(batch, row, self._positions)


class RowSequence:
  """The rows of all epochs, of all shards, one after another, and a position among them.

  Attributes:
    num_read: how many rows are behind the position.
    last: the numbers of this shard's rows of the last batch within their epoch; None is padding.
  """

  def __init__(self, rows: EpochRows, batch_size: int, seed: int | None, num_epochs: int | None):
    """Shuffles the rows of each epoch, if there is a seed."""
    self.rows, self._batch_size, self._seed = rows, batch_size, seed
    self._num_rows = math.inf if num_epochs is None else num_epochs * rows.num_rows
    self.num_read = 0
    self.last: list[int | None] = []
    self._has_warned = False

  @property
  def num_left(self) -> float:
    return self._num_rows - self.num_read

  def next_rows(self, count: int, places: Sequence[int]) -> base.Batch:
    """As OrderedIterator.next_rows, but rows behind the last epoch are padding."""
    if count > self.rows.num_rows and not self._has_warned:
      self._has_warned = True
      logging.warning(
        'An epoch has %d rows, but a batch takes %d of them, so that some are copies of one another. Set batch_size to '
        'at most %d, or give more text.',
        *(self.rows.num_rows, count, self.rows.num_rows),
      )
    self.last = [self._number(self.num_read + place) if place < self.num_left else None for place in places]
    self.num_read += count
    return self.rows.batch(self.last)

  def _number(self, place: int) -> int:
    epoch, inner = divmod(place, self.rows.num_rows)
    if self._seed is None:
      return inner
    return int(order_of_epoch(self.rows.num_rows, self._batch_size, self._seed, epoch)[inner])

  def get_state(self) -> base.State:
    return {'num_rows': self.num_read, 'num_rows_of_epoch': self.rows.num_rows, 'digest': self.rows.digest}
