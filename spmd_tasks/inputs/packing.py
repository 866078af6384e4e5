"""Packs tokenized documents into rows of T tokens without padding between them.

A *lane* reads a sequence of blocks, which row_order.py determines, and packs rows from it: each row continues where the
lane's last row ended. A lane's position includes a digest of its current block, so that a restore notices changed text.

Grain's ConcatThenSplitIterDataset is not used: it packs one stream per worker, so the data would depend on the number
of workers, and a batch would consist of neighboring text.

Legend: T sequence length, N tokens of a block.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, ClassVar, Protocol
import zlib

from absl import logging
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.text import Block
from spmd_tasks.inputs.tokenizers import Tokenizer, encode_prompt

_NUM_EMPTY_BEFORE_CHECK = 64


@dataclasses.dataclass(frozen=True)
class TokenBlock:
  """The tokens of one block of documents.

  Fields:
    ids, labels: int32 [N].
    ends: the end offset of each document, increasing.
    arrays: further arrays of the batch by name, [N] each; without `weights` every token has weight 1.
    num_truncated, num_skipped: how many documents were too long and were truncated, or left out.
  """

  ids: np.ndarray
  labels: np.ndarray
  ends: tuple[int, ...]
  arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  num_truncated: int = 0
  num_skipped: int = 0

  @functools.cached_property
  def digest(self) -> int:
    digest = zlib.crc32(self.labels.tobytes(), zlib.crc32(self.ids.tobytes()))
    for name in sorted(self.arrays):
      digest = zlib.crc32(self.arrays[name].tobytes(), digest)
    return digest

  def part(self, start: int, end: int, *, is_last: bool) -> 'TokenBlock':
    """Returns the tokens [start, end). The last part counts the documents that were too long."""
    inner = [stop - start for stop in self.ends if start < stop < end]
    ends = (*inner, end - start) if end > start else ()
    arrays = {name: values[start:end] for name, values in self.arrays.items()}
    counts = {'num_truncated': self.num_truncated, 'num_skipped': self.num_skipped} if is_last else {}
    return TokenBlock(self.ids[start:end], self.labels[start:end], ends, arrays, **counts)


class BlockEncoder(Protocol):
  """Tokenizes the blocks of a source. Picklable, because worker processes use it too.

  Attributes:
    pad_id: the id of padding.
    dtypes: the dtypes of a batch's arrays by name; each array is [B, T].
    keeps_whole: whether a block is never divided between two rows; then no block has more than T tokens.
  """

  @property
  def pad_id(self) -> int: ...
  @property
  def dtypes(self) -> Mapping[str, Any]: ...
  @property
  def keeps_whole(self) -> bool: ...

  def encode(self, block: Block) -> TokenBlock:
    """Returns the tokens of a block. Raises a UserError if its content is invalid."""

  def identity(self) -> dict[str, Any]:
    """Returns JSON data that change whenever the tokens of a block would change."""


@dataclasses.dataclass(frozen=True)
class TextEncoder:
  """The BlockEncoder of plain documents, texts or arrays of ids, which may continue in the next row.

  A document `a b c` becomes ids `bos a b c` with labels `a b c eos`: each token is predicted once, from the tokens
  before it. Without a bos the first token is read but not predicted. A text that continues in another block has no eos.
  Empty texts are left out.
  """

  tokenizer: Tokenizer
  keeps_whole: ClassVar[bool] = False
  dtypes: ClassVar[Mapping[str, Any]] = base.BATCH_DTYPES

  @property
  def pad_id(self) -> int:
    return self.tokenizer.pad_id

  def identity(self) -> dict[str, Any]:
    return {'tokenizer': self.tokenizer.fingerprint()}

  def encode(self, block: Block) -> TokenBlock:
    ids, labels = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    ends: list[int] = []
    tokenizer = self.tokenizer
    start = np.array(encode_prompt(tokenizer, ''), np.int32)
    end = np.array([tokenizer.eos_id], np.int32)
    for text, is_end in block.documents:
      tokens = tokenizer.encode_array(text) if isinstance(text, str) else _without_eos(text, is_end, tokenizer)
      sequence = np.concatenate([start, tokens, end] if is_end else [start, tokens])
      if tokens.size and sequence.size > 1:
        ids.append(sequence[:-1])
        labels.append(sequence[1:])
        ends.append(sequence.size - 1 + (ends[-1] if ends else 0))
    return TokenBlock(np.concatenate(ids), np.concatenate(labels), tuple(ends))


def _without_eos(ids: np.ndarray, is_end: bool, tokenizer: Tokenizer) -> np.ndarray:
  """Returns the ids of a tokenized document without its eos. Raises a UserError if one is outside the vocabulary."""
  if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
    raise UserError(
      f'the documents have ids from {ids.min()} to {ids.max()}, outside the vocabulary of {tokenizer.vocab_size} '
      'entries: use the tokenizer that wrote them.'
    )
  has_eos = is_end and ids.size > 0 and ids[-1] == tokenizer.eos_id
  return ids[: ids.size - has_eos].astype(np.int32)


class Lane:
  """A position in a sequence of blocks, from which rows are packed.

  Args:
    read_block: returns a block by its index in the sequence; None after the last block.
    num_blocks: the number of blocks in an epoch. Each epoch has the same blocks, in any order.
    check_has_tokens: raises an error if no block of the whole source has a token; called after many empty blocks. If
      only this lane's blocks are empty, its further rows are padding.
    packing: False puts one document, or T tokens of a long document, in each row.
    keeps_whole: see BlockEncoder; a block that does not fit in the rest of a row begins the next row.
  """

  def __init__(
    self,
    read_block: Callable[[int], TokenBlock | None],
    num_blocks: int,
    check_has_tokens: Callable[[], None],
    packing: bool = True,
    keeps_whole: bool = False,
  ):
    self._read_block, self._num_blocks, self._check_has_tokens = read_block, num_blocks, check_has_tokens
    self._packing, self._keeps_whole = packing, keeps_whole
    self._is_starved = False
    self.num_too_long = np.zeros(2, np.int64)  # documents truncated and skipped in the blocks before the current one
    self.blocks_of_row: list[int] = []  # indices of the blocks that the last row is packed from
    self._num_read = self._offset = self._next_document = 0
    self._block: TokenBlock | None = None

  @property
  def position(self) -> tuple[int, int, int]:
    """(index of the current block, offset in it, its digest, or 0 if the offset is 0)."""
    return self._num_read, self._offset, self._block.digest if self._block is not None and self._offset else 0

  def seek(self, num_read: int, offset: int, digest: int | None) -> None:
    """Moves to a `position`. Raises a UserError if the block has another digest; None skips this comparison."""
    self._num_read, self._offset, self._next_document, self._block = num_read, offset, 0, None
    self._is_starved = False
    if offset == 0:
      return
    block = self._block = self._read_block(num_read)
    if block is None or offset > block.ids.size or digest not in (None, block.digest):
      raise UserError(
        f'the text or its tokenizer has changed since the input state was saved (at token {offset} of block '
        f'{num_read}): restore them, or {base.START_OVER}'
      )
    self._next_document = bisect.bisect_right(block.ends, offset)

  def _current_block(self) -> TokenBlock | None:
    """Returns the block of the next token; None at the end."""
    num_empty, first = 0, self._num_read
    while True:
      if self._block is None:
        self._block = self._read_block(self._num_read)
      if self._block is None or self._offset < self._block.ids.size:
        return self._block
      num_empty = num_empty + 1 if self._block.ids.size == 0 else 0
      # Also checked early, so that a source without text does not take a whole epoch to detect.
      if num_empty in (_NUM_EMPTY_BEFORE_CHECK, self._num_blocks):
        self._check_has_tokens()
      if num_empty == 2 * self._num_blocks:  # which include one whole epoch
        logging.warning(
          'One row of each batch is padding, because the %d blocks that it reads have no text: set block_bytes to more '
          'than the longest record, or reduce batch_size.',
          self._num_blocks,
        )
        self._is_starved, self._num_read, self._block = True, first, None
        return None
      self.num_too_long += (self._block.num_truncated, self._block.num_skipped)
      self._num_read, self._offset, self._next_document, self._block = self._num_read + 1, 0, 0, None

  def fill_row(self, batch: base.Batch, row: int, positions: np.ndarray) -> bool:
    """Writes the next row into `batch`; returns False at the end of the lane. `positions` is arange(T)."""
    self.blocks_of_row = []
    if self._is_starved:
      return True
    seq_len = positions.size
    used, segment = 0, 0
    while used < seq_len:
      block = self._current_block()
      if block is None or (self._keeps_whole and block.ids.size > self._offset + seq_len - used):
        break
      if self._num_read not in self.blocks_of_row[-1:]:
        self.blocks_of_row.append(self._num_read)
      start, document_end = self._offset, block.ends[self._next_document]
      count = min(seq_len - used, document_end - start)
      segment += 1
      tokens = slice(used, used + count)
      batch['ids'][row, tokens] = block.ids[start : start + count]
      batch['labels'][row, tokens] = block.labels[start : start + count]
      batch['weights'][row, tokens] = 1
      for name, values in block.arrays.items():
        batch[name][row, tokens] = values[start : start + count]
      batch['segment_ids'][row, tokens] = segment
      batch['segment_pos'][row, tokens] = positions[:count]
      used += count
      self._offset += count
      if self._offset == document_end:
        self._next_document += 1
      if not self._packing and not (self._keeps_whole and self._offset < block.ids.size):
        break
    return used > 0 or self._is_starved


def pack_batch(
  lanes: Sequence[Lane], seq_len: int, pad_id: int = 0, dtypes: Mapping[str, Any] = base.BATCH_DTYPES
) -> base.Batch | None:
  """Packs one row from each lane, [len(lanes), T]; a lane may occur several times. None if all lanes have ended."""
  batch = base.empty_batch(len(lanes), seq_len, pad_id, dtypes)
  positions = np.arange(seq_len, dtype=np.int32)
  filled = [lane.fill_row(batch, row, positions) for row, lane in enumerate(lanes)]
  return batch if any(filled) else None
