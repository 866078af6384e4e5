"""Assigns text to rows, so that no row of a batch copies another and all text of a source is read equally often.

Every host reads a small source (`small_source_tokens`) completely and packs it once into the N rows of an epoch
(epoch_rows.py). The rows are reshuffled in each epoch, and a batch takes the next B of them, so a position is a number.
A batch may span two epochs: none of the first rows of an epoch is among the last B rows of the epoch before.

A larger source is divided among the rows of the global batch (Shares): row r of each batch reads share r again and
again. No two rows read the same text, even if one is ahead, and a host reads only the shares of its own rows. The
shares have equal sizes, in whatever unit the source knows without reading (bytes, records, tokens), and may end within
a block.

With `num_epochs`, a larger source is one stream of blocks (`stream_order`). None of the first blocks of an epoch is
among the last blocks of the epoch before.

All of this depends only on the source and the input's fields, so the number of hosts may change.

Legend: B rows of the global batch, T tokens of a row, N rows of an epoch, n blocks of the source.
"""

import bisect
from collections.abc import Callable, Container
from fractions import Fraction
import functools
import itertools
from typing import Any

import numpy as np

from spmd_tasks.inputs.packing import TokenBlock

_SMALL_TOKENS = 1 << 22
_SMALL_BATCHES = 16  # shares of a larger source have at least 16 rows, so that a partly filled row hardly matters
_NUM_PROBES = 8
_SHUFFLE_WINDOW = 1 << 16  # blocks of a share that are reshuffled together


def is_small(
  read_block: Callable[[int], TokenBlock], num_blocks: int, sizes: np.ndarray | None, max_tokens: int
) -> bool:
  """Whether a source has at most `max_tokens` tokens, estimated from a few blocks and all sizes [n]."""
  probes = sorted({*np.linspace(0, num_blocks - 1, _NUM_PROBES).astype(int).tolist()})
  fraction = len(probes) / num_blocks if sizes is None else sizes[probes].sum() / max(sizes.sum(), 1)
  return sum(read_block(index).ids.size for index in probes) <= max_tokens * fraction


def small_source_tokens(batch_size: int, seq_len: int) -> int:
  """Returns up to how many tokens a source is small."""
  return max(_SMALL_TOKENS, _SMALL_BATCHES * batch_size * seq_len)


def permutation(size: int, seed: int, index: int, *, stream: int = 0, window: int | None = None) -> np.ndarray:
  """Returns permutation `index` of a random stream; with `window`, consecutive windows are permuted separately."""
  bits = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, stream, index])
  # Sorts random numbers: Generator.permutation may change between versions of NumPy.
  return np.lexsort((np.random.Generator(bits).random(size), np.arange(size) // (window or size)))


@functools.lru_cache(maxsize=4)
def order_of_epoch(num_rows: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the permutation of an epoch's rows, int [N].

  Any min(N, B) consecutive rows of the endless sequence of epochs are distinct.
  """
  if num_rows < 3 * batch_size:
    # One order for all epochs, shuffled within windows so short that no row moves forward by more than N - B.
    window = max(num_rows - batch_size + 1, 1)
    return permutation(num_rows, seed, 0)[permutation(num_rows, seed, epoch + 1, window=window)]
  order = permutation(num_rows, seed, epoch + 1)
  if epoch > 0:
    last = {*permutation(num_rows, seed, epoch)[-batch_size:].tolist()}
    for position, item in boundary_swaps(lambda position: int(order[position]), last, batch_size).items():
      order[position] = item
  return order


def boundary_swaps(order: Callable[[int], int], last: Container[int], window: int) -> dict[int, int]:
  """Returns position -> new item, such that none of the first `window` items of an epoch is in `last`.

  `order(position)` is the item at a position before the swaps. An epoch has at least 3 * window items; `last` has
  `window` items.
  """
  repeated = [position for position in range(window) if order(position) in last]
  others = (position for position in itertools.count(window) if order(position) not in last)
  pairs = list(zip(repeated, others))
  return {a: order(b) for a, b in pairs} | {b: order(a) for a, b in pairs}


def stream_order(num_blocks: int, num_epochs: int, seed: int, batch_size: int) -> Callable[[int], int]:
  """Returns a function: position in the stream -> block, for several shuffled epochs of a larger source.

  The first blocks of an epoch, at least as many as a batch reads, are not among the last blocks of the epoch before. A
  batch of B rows reads at most B blocks if none is empty, and n / 16 on average.
  """
  if batch_size <= num_blocks < 3 * batch_size:
    return lambda position: int(
      order_of_epoch(num_blocks, batch_size, seed, position // num_blocks)[position % num_blocks]
    )
  import grain  # takes seconds to import, and small sources do not need it

  order = grain.MapDataset.range(num_blocks).seed(seed).shuffle().repeat(num_epochs)
  window = max(min(batch_size, num_blocks // 3), min(8 * batch_size, num_blocks // 4))

  @functools.lru_cache(maxsize=2)
  def swaps(epoch: int) -> dict[int, int]:
    start = epoch * num_blocks
    last = {order[start - 1 - offset] for offset in range(window)} if epoch else set[int]()
    return boundary_swaps(lambda offset: order[start + offset], last, window)

  def block_at(position: int) -> int:
    epoch, offset = divmod(position, num_blocks)
    return int(swaps(epoch).get(offset, order[position]))

  return block_at


class Shares:
  """The shares of a larger source, one for each row of the global batch.

  The blocks are put in one order, shuffled or not, and divided into B shares of equal size; a share may begin and end
  within a block. A row reads the blocks of its share again and again, reshuffled each time.
  """

  def __init__(self, num_blocks: int, sizes: np.ndarray | None, batch_size: int, seed: int, shuffle: bool):
    self._seed, self._shuffle = seed, shuffle
    self._order: Any = range(num_blocks)
    if sizes is None and num_blocks <= _SHUFFLE_WINDOW:
      sizes = np.ones(num_blocks, np.int64)
    if sizes is not None:
      self._order = permutation(num_blocks, seed, 0) if shuffle else np.arange(num_blocks)
      ends = np.concatenate([[0], np.cumsum(sizes[self._order], dtype=np.int64)])
      cuts = [row * int(ends[-1]) // batch_size for row in range(1, batch_size)]
      blocks = np.searchsorted(ends, cuts, 'right') - 1
      inner = [i + Fraction(cut - int(ends[i]), int(ends[i + 1] - ends[i])) for i, cut in zip(blocks.tolist(), cuts)]
    else:
      if shuffle:  # by Grain, in constant memory: there may be very many records
        import grain

        self._order = grain.MapDataset.range(num_blocks).seed(seed % (1 << 32)).shuffle()
      inner = [Fraction(row * num_blocks, batch_size) for row in range(1, batch_size)]
    self._boundaries = [Fraction(0), *inner, Fraction(num_blocks)]  # of the shares, in blocks of `_order`

  def num_blocks(self, row: int) -> int:
    """Returns how many blocks a share touches."""
    start, end = self._boundaries[row : row + 2]
    return max(-(-end // 1) - start // 1, 1)

  def block_ranges(self, row: int) -> Callable[[int], tuple[int, Fraction, Fraction]]:
    """Returns a function: read number 0, 1, ... of a share -> (block, start, end), fractions of the block."""
    start, end = self._boundaries[row : row + 2]
    first, count = start // 1, self.num_blocks(row)
    num_windows = -(-count // _SHUFFLE_WINDOW)

    @functools.lru_cache(maxsize=1)
    def order(index: int) -> np.ndarray:
      size = min(_SHUFFLE_WINDOW, count - index % num_windows * _SHUFFLE_WINDOW)
      return permutation(size, self._seed, index, stream=row + 1)

    def block_range(number: int) -> tuple[int, Fraction, Fraction]:
      epoch, offset = divmod(number, count)
      if self._shuffle:
        window, inner = divmod(offset, _SHUFFLE_WINDOW)
        offset = window * _SHUFFLE_WINDOW + int(order(epoch * num_windows + window)[inner])
      index = first + offset
      return int(self._order[index]), max(start - index, Fraction(0)), min(end - index, Fraction(1))

    return block_range


def slice_block(
  block: TokenBlock, start: Fraction, end: Fraction, seq_len: int, packing: bool, keeps_whole: bool
) -> TokenBlock:
  """Returns the tokens of a block between two fractions of it; adjacent slices concatenate to the block.

  A block that is kept whole is all in one slice. Without packing, a slice ends where a row ends.
  """
  if (start, end) == (0, 1):
    return block

  def offset_of(fraction: Fraction) -> int:
    size = block.ids.size
    offset = int(fraction * size)
    if keeps_whole:
      return size if fraction > Fraction(1, 2) else 0
    if packing or offset == size:
      return offset
    begin = [0, *block.ends][bisect.bisect_right(block.ends, offset)]
    return begin + (offset - begin) // seq_len * seq_len

  return block.part(offset_of(start), offset_of(end), is_last=end == 1)
