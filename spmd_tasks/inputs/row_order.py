"""Which text is in which row: no row of a batch is a copy of another, and all text of a source comes equally often.

A source of few tokens (`small_tokens`) is read and cut once, by every host, into the N rows of an epoch
(epoch_rows.py). They are shuffled anew in each epoch, and a batch takes the next B of them. So a position is a number,
and batches go on across the borders of epochs: the first rows of an epoch are none of the last B of the one before.

Of a larger source, row r of all batches has a part of its own (Shares), which it reads again and again. No two rows
meet the same text, however far one is ahead, and a host reads the parts of its own rows alone. The parts are equal in
bytes, records or tokens, whatever the source can tell without reading, and end within blocks if need be.

Both are functions of the source and the input's fields, so the number of hosts may change.

Legend: B rows of the global batch, T tokens of a row, N rows of an epoch, n blocks of the source.
"""

import bisect
from collections.abc import Callable
from fractions import Fraction
import functools
from typing import Any

import numpy as np

from spmd_tasks.inputs.packing import TokenBlock

_SMALL_TOKENS = 1 << 22
_SMALL_BATCHES = 16  # so that the parts of a larger source are not few rows, of which one more or less would count
_NUM_PROBES = 8
_RUN = 1 << 16  # as many blocks of a part are shuffled at a time, which are in a random order already


def seems_small(
  read_block: Callable[[int], TokenBlock], num_blocks: int, sizes: np.ndarray | None, max_tokens: int
) -> bool:
  """Whether a source has at most `max_tokens` tokens, as estimated from some blocks and the sizes [n] of all."""
  probes = sorted({*np.linspace(0, num_blocks - 1, _NUM_PROBES).astype(int).tolist()})
  part = len(probes) / num_blocks if sizes is None else sizes[probes].sum() / max(sizes.sum(), 1)
  return sum(read_block(index).ids.size for index in probes) <= max_tokens * part


def small_tokens(batch_size: int, seq_len: int) -> int:
  """Returns up to how many tokens a source is read and cut as a whole."""
  return max(_SMALL_TOKENS, _SMALL_BATCHES * batch_size * seq_len)


def shuffled(size: int, seed: int, number: int, *, stream: int = 0, run: int | None = None) -> np.ndarray:
  """Returns permutation `number` of a stream of a seed; with `run`, each run of so many places by itself."""
  bits = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, stream, number])
  # By the order of random numbers, which is the same with every version of NumPy.
  return np.lexsort((np.random.Generator(bits).random(size), np.arange(size) // (run or size)))


class Shares:
  """The parts of a larger source, one for each row of the global batch.

  The blocks are in one order, shuffled or not, and cut into B parts of one size; a block on the border is divided.
  A row reads the blocks of its part, shuffled anew each time, without end.
  """

  def __init__(self, num_blocks: int, sizes: np.ndarray | None, batch_size: int, seed: int, shuffle: bool):
    self._seed, self._shuffle = seed, shuffle
    self._order: Any = range(num_blocks)
    if sizes is None and num_blocks <= _RUN:
      sizes = np.ones(num_blocks, np.int64)
    if sizes is not None:
      self._order = shuffled(num_blocks, seed, 0) if shuffle else np.arange(num_blocks)
      ends = np.concatenate([[0], np.cumsum(sizes[self._order], dtype=np.int64)])
      wanted = [row * int(ends[-1]) // batch_size for row in range(1, batch_size)]
      blocks = np.searchsorted(ends, wanted, 'right') - 1
      inner = [
        i + Fraction(place - int(ends[i]), int(ends[i + 1] - ends[i])) for i, place in zip(blocks.tolist(), wanted)
      ]
    else:
      if shuffle:  # in constant memory: there may be very many records
        import grain

        self._order = grain.MapDataset.range(num_blocks).seed(seed % (1 << 32)).shuffle()
      inner = [Fraction(row * num_blocks, batch_size) for row in range(1, batch_size)]
    self._borders = [Fraction(0), *inner, Fraction(num_blocks)]

  def num_blocks(self, row: int) -> int:
    """How many blocks a row's part has, those that are divided included."""
    start, end = self._borders[row : row + 2]
    return max(-(-end // 1) - start // 1, 1)

  def reads(self, row: int) -> Callable[[int], tuple[int, Fraction, Fraction]]:
    """Returns a function of 0, 1, ...: which block a row reads next, and from which fraction of it to which."""
    start, end = self._borders[row : row + 2]
    first, count = start // 1, self.num_blocks(row)
    runs = -(-count // _RUN)

    @functools.lru_cache(maxsize=1)
    def order(number: int) -> np.ndarray:
      size = min(_RUN, count - number % runs * _RUN)
      return shuffled(size, self._seed, number, stream=row + 1)

    def read(number: int) -> tuple[int, Fraction, Fraction]:
      epoch, inner = divmod(number, count)
      if self._shuffle:
        run, place = divmod(inner, _RUN)
        inner = run * _RUN + int(order(epoch * runs + run)[place])
      place = first + inner
      return int(self._order[place]), max(start - place, Fraction(0)), min(end - place, Fraction(1))

    return read


def cut(
  block: TokenBlock, start: Fraction, end: Fraction, seq_len: int, packing: bool, keeps_whole: bool
) -> TokenBlock:
  """Returns the part of a block between two fractions of it; the parts between neighbouring fractions are all of it.

  A block that is kept whole is in one part. Without packing the cut is where a row begins.
  """
  if (start, end) == (0, 1):
    return block

  def place(fraction: Fraction) -> int:
    size = block.ids.size
    offset = int(fraction * size)
    if keeps_whole:
      return size if fraction > Fraction(1, 2) else 0
    if packing or offset == size:
      return offset
    begin = [0, *block.ends][bisect.bisect_right(block.ends, offset)]
    return begin + (offset - begin) // seq_len * seq_len

  return block.part(place(start), place(end), is_last=end == 1)
