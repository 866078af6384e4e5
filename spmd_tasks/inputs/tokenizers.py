"""What a tokenizer is, and ByteTokenizer, the one that needs no file: raw UTF-8 bytes."""

from collections.abc import Sequence
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from spmd_tasks.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
  """Text to ids and back. `bos_id` is None where the vocabulary has none.

  Some have more: `encode_prompt(text)`, ids behind those with which every text begins; `decode_all(ids)`, which shows
  special tokens; `encode_with_offsets(text)`, also each token's characters [start, end), int64 [num_tokens, 2];
  `bytes_of_tokens(ids)`, the bytes that each token adds to a text.
  """

  @property
  def vocab_size(self) -> int: ...
  @property
  def pad_id(self) -> int: ...
  @property
  def bos_id(self) -> int | None: ...
  @property
  def eos_id(self) -> int: ...

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without bos and eos."""

  def encode_array(self, text: str) -> np.ndarray:
    """Returns the ids of `encode` as an array, int32 [num_tokens]."""

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids`; pad, bos and eos give nothing."""

  def fingerprint(self) -> str:
    """A digest that changes whenever the encoding of any text changes."""


def tokenizer_of(source: object) -> Tokenizer | None:
  """The tokenizer of an input or a task; None where it has none."""
  return getattr(source, 'tokenizer', None)


def decode_all(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """The text of `ids`, with special tokens by their names where the tokenizer has such."""
  return getattr(tokenizer, 'decode_all', tokenizer.decode)(ids)


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
  """The ids of a prompt: they begin with bos where the vocabulary has one, also where `text` does not contain it."""
  if hasattr(tokenizer, 'encode_prompt'):
    return tokenizer.encode_prompt(text)
  ids = tuple(tokenizer.encode(text))
  if tokenizer.bos_id is None or ids[:1] == (tokenizer.bos_id,):
    return ids
  return (tokenizer.bos_id, *ids)


def decode_generated(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """The text of generated ids; ids outside the vocabulary, which a model with a larger one may sample, give no text."""
  vocab_size = tokenizer.vocab_size
  return tokenizer.decode([token for token in ids if token < vocab_size])


def bytes_of_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
  """Returns the UTF-8 bytes that each token adds to a text behind other tokens, such as one byte of a character.

  Special tokens and ids outside the vocabulary add none.
  """
  known = [token for token in ids if token < tokenizer.vocab_size]
  of_known = getattr(tokenizer, 'bytes_of_tokens', lambda ids: [tokenizer.decode([token]).encode() for token in ids])
  added = dict(zip(known, of_known(known), strict=True))
  return [added.get(token, b'') for token in ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
  """UTF-8 bytes: ids 0, 1 and 2 are pad, bos and eos; byte b is id b + 3, so that a vocabulary has 259 entries."""

  pad_id: int = dataclasses.field(default=0, init=False)
  bos_id: int = dataclasses.field(default=1, init=False)
  eos_id: int = dataclasses.field(default=2, init=False)
  num_special: int = dataclasses.field(default=3, init=False)

  @property
  def vocab_size(self) -> int:
    return 256 + self.num_special

  def encode_array(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode('utf-8'), np.uint8).astype(np.int32) + self.num_special

  def encode(self, text: str) -> list[int]:
    return self.encode_array(text).tolist()

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    points = np.frombuffer(text.encode('utf-32-le'), np.uint32)
    num_bytes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    starts = np.repeat(np.arange(len(points), dtype=np.int64), num_bytes)
    return self.encode_array(text), np.stack([starts, starts + 1], axis=1)

  def decode(self, ids: Sequence[int]) -> str:
    """Exact for what `encode` made; a sequence of bytes that is not UTF-8, as a model may sample, gives U+FFFD."""
    first = self.num_special
    ids = ids if isinstance(ids, (list, tuple)) else np.asarray(ids, np.int64).reshape(-1).tolist()
    try:
      text = bytes([token - first for token in ids if not 0 <= token < first])
    except ValueError:
      raise UserError(f'ids {min(ids)} to {max(ids)} are not all in the bytes [0, {self.vocab_size}).') from None
    return text.decode('utf-8', errors='replace')

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    first = self.num_special
    return [bytes([token - first]) if first <= token < first + 256 else b'' for token in ids]

  def fingerprint(self) -> str:
    return 'bytes+3'
