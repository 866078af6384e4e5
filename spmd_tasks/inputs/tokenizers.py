"""The Tokenizer protocol, and ByteTokenizer, which encodes UTF-8 bytes and needs no file."""

from collections.abc import Sequence
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from spmd_tasks.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
  """Encodes text to ids and decodes ids to text. `bos_id` is None if the vocabulary has no bos.

  Optional methods: `encode_prompt(text)` encodes a prompt with the ids that begin every text; `decode_all(ids)` decodes
  special tokens too; `encode_with_offsets(text)` also returns the characters [start, end) of each token,
  int64 [num_tokens, 2]; `bytes_of_tokens(ids)` returns the bytes that each token adds to a text.
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
    """Returns the ids of `text`, without bos and eos."""

  def encode_array(self, text: str) -> np.ndarray:
    """Returns the ids of `text` as an array, int32 [num_tokens]."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`; pad, bos and eos have no text."""

  def fingerprint(self) -> str:
    """Returns a digest that changes whenever the encoding of any text changes."""


def tokenizer_of(source: object) -> Tokenizer | None:
  """Returns the tokenizer of an input or a task; None if it has none."""
  return getattr(source, 'tokenizer', None)


def decode_all(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """Returns the text of `ids`, including the names of special tokens if the tokenizer has names for them."""
  return getattr(tokenizer, 'decode_all', tokenizer.decode)(ids)


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
  """Returns the ids of a prompt, which begin with one bos if the vocabulary has one."""
  if hasattr(tokenizer, 'encode_prompt'):
    return tokenizer.encode_prompt(text)
  ids = tuple(tokenizer.encode(text))
  if tokenizer.bos_id is None or ids[:1] == (tokenizer.bos_id,):
    return ids
  return (tokenizer.bos_id, *ids)


def decode_generated(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """Returns the text of generated ids; ids outside the vocabulary, which a model may sample, have no text."""
  vocab_size = tokenizer.vocab_size
  return tokenizer.decode([token for token in ids if token < vocab_size])


def bytes_of_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
  """Returns the UTF-8 bytes that each token adds to a text, such as one byte of a character.

  Special tokens and ids outside the vocabulary add none.
  """
  known = [token for token in ids if token < tokenizer.vocab_size]
  to_bytes = getattr(tokenizer, 'bytes_of_tokens', lambda ids: [tokenizer.decode([token]).encode() for token in ids])
  bytes_of_token = dict(zip(known, to_bytes(known), strict=True))
  return [bytes_of_token.get(token, b'') for token in ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
  """UTF-8 bytes: ids 0, 1 and 2 are pad, bos and eos, and byte b is id b + 3. The vocabulary has 259 entries."""

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
    """Inverts `encode`; bytes that are not UTF-8, which a model may sample, become U+FFFD."""
    first = self.num_special
    ids = ids if isinstance(ids, (list, tuple)) else np.asarray(ids, np.int64).reshape(-1).tolist()
    try:
      text = bytes([token - first for token in ids if not 0 <= token < first])
    except ValueError:
      raise UserError(f'ids {min(ids)} to {max(ids)} must be in the vocabulary, [0, {self.vocab_size}).') from None
    return text.decode('utf-8', errors='replace')

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    first = self.num_special
    return [bytes([token - first]) if first <= token < first + 256 else b'' for token in ids]

  def fingerprint(self) -> str:
    return 'bytes+3'
