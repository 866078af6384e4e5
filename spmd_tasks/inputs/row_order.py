"""Which text is in which row: no row of a batch is a copy of another, and all text of a source comes equally often.

A source of few tokens (`small_tokens`) is read and cut once, by every host, into the N rows of an epoch
(epoch_rows.py). They are shuffled anew in each epoch, and a batch takes the next B of them. So a position is a number,
and batches go on across the borders of epochs: the first rows of an epoch are none of the last B of the one before.

Of a larger source, row r of all batches has a part of its own (Shares), which it reads again and again. No two rows
meet the same text, however far one is ahead, and a host reads the parts of its own rows alone. The parts are equal in
bytes, records or tokens, whatever the source can tell without reading, and end within blocks if need be.

A few passes over a larger source are one stream of its blocks (`stream_order`). The first blocks of a pass are none of
the last blocks of the pass before.

All are functions of the source and the input's fields, so the number of hosts may change.

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


@functools.lru_cache(maxsize=4)
def order_of_epoch(num_rows: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the permutation of an epoch's rows, int [N].

  Any B rows that follow one another, also those of two epochs, are different ones if N is at least B; otherwise any N.
  """
  if num_rows < 3 * batch_size:
    # One order, in which runs are shuffled that are so short that no row comes more than N - B places earlier.
    run = max(num_rows - batch_size + 1, 1)
    return shuffled(num_rows, seed, 0)[shuffled(num_rows, seed, epoch + 1, run=run)]
  order = shuffled(num_rows, seed, epoch + 1)
  if epoch > 0:
    last = {*shuffled(num_rows, seed, epoch)[-batch_size:].tolist()}
    for place, number in exchanges(lambda place: int(order[place]), last, batch_size).items():
      order[place] = number
  return order


def exchanges(order: Callable[[int], int], last: Container[int], window: int) -> dict[int, int]:
  """Returns the numbers that change places, by place, so that the first `window` of an epoch are none of `last`.

  `order(place)` is the number at a place of the epoch. An epoch has at least 3 `window` places; `last` has `window`.
  """
  early = [place for place in range(window) if order(place) in last]
  others = (place for place in itertools.count(window) if order(place) not in last)
  pairs = list(zip(early, others))
  return {a: order(b) for a, b in pairs} | {b: order(a) for a, b in pairs}


def stream_order(num_blocks: int, num_epochs: int, seed: int, batch_size: int) -> Callable[[int], int]:
  """Returns a function of 0, 1, ...: which block comes next in shuffled passes over a larger source.

  The first blocks of a pass, at least as many as a batch takes, are none of the last blocks of the pass before: B rows
  take at most B blocks if none is empty, and n / 16 on average.
  """
  if batch_size <= num_blocks < 3 * batch_size:
    return lambda number: int(order_of_epoch(num_blocks, batch_size, seed, number // num_blocks)[number % num_blocks])
  import grain

  order = grain.MapDataset.range(num_blocks).seed(seed).shuffle().repeat(num_epochs)
  window = max(min(batch_size, num_blocks // 3), min(8 * batch_size, num_blocks // 4))

  @functools.lru_cache(maxsize=2)
  def exchanged(epoch: int) -> dict[int, int]:
    start = epoch * num_blocks
    last = {order[start - 1 - place] for place in range(window)} if epoch else set[int]()
    return exchanges(lambda place: order[start + place], last, window)

  def read(number: int) -> int:
    epoch, place = divmod(number, num_blocks)
    return int(exchanged(epoch).get(place, order[number]))

  return read


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
