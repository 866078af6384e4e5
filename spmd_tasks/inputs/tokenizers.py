"""Tokenizers: raw UTF-8 bytes, which need no file, and byte-pair encoding by the `tokenizers` library."""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import hashlib
import os
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.files import read_bytes
from spmd_tasks.wings import require


@runtime_checkable
class Tokenizer(Protocol):
  """Text to ids and back. `bos_id` is None where the vocabulary has none."""

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
    ...

  def encode_array(self, text: str) -> np.ndarray:
    """Returns the ids of `encode` as an array, int32 [num_tokens]."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids`; pad, bos and eos give nothing."""
    ...

  def fingerprint(self) -> str:
    """A digest that changes whenever the encoding of any text changes."""
    ...


@runtime_checkable
class PromptEncoder(Protocol):
  """A tokenizer that puts more than `bos_id` before a text."""

  def encode_prompt(self, text: str) -> tuple[int, ...]:
    """The ids of `text` after those with which every text begins, once."""
    ...


@runtime_checkable
class OffsetEncoder(Protocol):
  """A tokenizer that knows which characters its tokens are."""

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of `text` as `encode_array`, and each token's characters [start, end): int64 [num_tokens, 2]."""
    ...


@runtime_checkable
class SpecialTokenDecoder(Protocol):
  """A tokenizer that can show special tokens, which `decode` leaves out."""

  def decode_all(self, ids: Sequence[int]) -> str:
    """The text of `ids` with special tokens by their names."""
    ...


@runtime_checkable
class HasTokenizer(Protocol):
  """An input, or a task, whose ids are a tokenizer's."""

  @property
  def tokenizer(self) -> Tokenizer | None: ...


def tokenizer_of(source: object) -> Tokenizer | None:
  """The tokenizer of an input or a task; None where it has none."""
  return source.tokenizer if isinstance(source, HasTokenizer) else None


def decode_all(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """The text of `ids`, with special tokens by their names where the tokenizer has such."""
  return tokenizer.decode_all(ids) if isinstance(tokenizer, SpecialTokenDecoder) else tokenizer.decode(ids)


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
  """The ids of a prompt: they begin with bos where the vocabulary has one, also where `text` does not contain it."""
  if isinstance(tokenizer, PromptEncoder):
    return tokenizer.encode_prompt(text)
  ids = tuple(tokenizer.encode(text))
  if tokenizer.bos_id is None or ids[:1] == (tokenizer.bos_id,):
    return ids
  return (tokenizer.bos_id, *ids)


def decode_generated(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """The text of generated ids; ids outside the vocabulary, which a model with a larger one may sample, give no text."""
  return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])


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
    values = np.asarray(ids, np.int64).reshape(-1)
    if values.size and (values.min() < 0 or values.max() >= self.vocab_size):
      raise UserError(
        f'an id in [{values.min()}, {values.max()}] is outside the byte vocabulary [0, {self.vocab_size}).'
      )
    values = values[values >= self.num_special] - self.num_special
    return values.astype(np.uint8).tobytes().decode('utf-8', errors='replace')

  def fingerprint(self) -> str:
    return 'bytes+3'


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdTokenizer:
  """Ids written as numbers, for a model whose tokenizer is elsewhere: '5 17 3' is the ids 5, 17 and 3.

  Generated ids begin with a space each, so that texts can be joined.
  """

  vocab_size: int
  eos_id: int
  pad_id: int = 0
  bos_id: int | None = None

  def encode(self, text: str) -> list[int]:
    """Raises UserError where the text holds anything but ids of the vocabulary."""
    words = text.split()
    for word in words:
      if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
        raise UserError(
          f'{word[:40]!r} is no id: this model has no tokenizer; write its ids, below {self.vocab_size}, with spaces '
          'between them.'
        )
    return [int(word) for word in words]

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    return ''.join(f' {token}' for token in ids if token != self.eos_id)

  def fingerprint(self) -> str:
    return f'ids {self.vocab_size}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class BpeTokenizer:
  """A vocabulary file of the `tokenizers` library (Hugging Face's tokenizer.json).

  The special tokens are looked up by name on the first use of the file; a UserError names a missing one.
  `bos_token=None` and `pad_token=None` mean that the vocabulary has none (pad is then id 0, in positions of weight 0).
  """

  path: str
  eos_token: str = '<eos>'
  bos_token: str | None = '<bos>'
  pad_token: str | None = '<pad>'

  @functools.cached_property
  def _tokenizer(self) -> Any:
    return load_tokenizer_file(self.path)

  def __getstate__(self) -> dict[str, Any]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def _special_id(self, token: str) -> int:
    found = self._tokenizer.token_to_id(token)
    if found is None:
      raise UserError(
        f'{self.path} has no token {token!r}: name the special tokens that it does have in eos_token, bos_token and '
        'pad_token (None for no bos or no pad).'
      )
    return found

  @functools.cached_property
  def eos_id(self) -> int:
    return self._special_id(self.eos_token)

  @functools.cached_property
  def bos_id(self) -> int | None:
    return None if self.bos_token is None else self._special_id(self.bos_token)

  @functools.cached_property
  def pad_id(self) -> int:
    return 0 if self.pad_token is None else self._special_id(self.pad_token)

  @functools.cached_property
  def vocab_size(self) -> int:
    return self._tokenizer.get_vocab_size()

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    return offsets_of(self._tokenizer.encode(text, add_special_tokens=False))

  def decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

  def to_json(self) -> str:
    """The tokenizer as the text of a tokenizer.json."""
    return self._tokenizer.to_str()

  def fingerprint(self) -> str:
    return 'bpe ' + digest_of(self.path)


def load_tokenizer_file(path: str) -> Any:
  """The `tokenizers.Tokenizer` of a tokenizer.json.

  Raises:
    UserError: there is no such file, or it is of another kind.
  """
  require('huggingface', 'tokenizers', wants=path)
  import tokenizers

  if not os.path.exists(path):
    raise UserError(f'there is no tokenizer file {path}: train one with train_bpe, or correct the path.')
  try:
    return tokenizers.Tokenizer.from_buffer(read_bytes(path))
  except Exception as e:  # the library raises a bare Exception
    raise UserError(f'{path} is not a tokenizer.json of the tokenizers library: {e}') from e


def offsets_of(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
  """The ids of a `tokenizers.Encoding`, int32 [N], and the characters of each token, int64 [N, 2]."""
  return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def digest_of(path: str) -> str:
  """A digest of a file's bytes."""
  return hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()


def train_bpe(texts: Iterable[str], path: str, vocab_size: int, min_frequency: int = 2) -> BpeTokenizer:
  """Trains a byte-level BPE vocabulary on `texts`, saves it at `path` and returns it.

  All 256 bytes are in the alphabet, so that any text is encoded and decoded exactly. `<pad>`, `<bos>` and `<eos>` are
  ids 0, 1 and 2. The result may have fewer than `vocab_size` entries when the texts have too few pairs to merge.

  Raises:
    UserError: vocab_size has no room for the bytes and the special tokens.
  """
  require('huggingface', 'tokenizers', wants='train_bpe')
  import tokenizers

  special = ['<pad>', '<bos>', '<eos>']
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  if vocab_size < len(alphabet) + len(special):
    raise UserError(f'vocab_size {vocab_size} must be at least {len(alphabet)} bytes + {len(special)} special tokens.')
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    min_frequency=min_frequency,
    special_tokens=special,
    initial_alphabet=alphabet,
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(path)
  return BpeTokenizer(path=path)
