"""Byte-pair encoding by the `tokenizers` library, which reads Hugging Face's tokenizer.json."""

import abc
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import hashlib
import os
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.files import read_bytes
from spmd_tasks.wings import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer(abc.ABC):
  """A tokenizer of the `tokenizers` library, which is read from the file or folder `path` on first use."""

  path: str

  def __getstate__(self) -> dict[str, Any]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @functools.cached_property
  @abc.abstractmethod
  def _tokenizer(self) -> Any:
    """The `tokenizers.Tokenizer`."""

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids`; special tokens and ids outside the vocabulary give nothing.

    Some decoders drop a space before the first token, so decode a continuation together with tokens before it.
    """
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

  def to_json(self) -> str:
    """The tokenizer as the text of a tokenizer.json."""
    return self._tokenizer.to_str()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BpeTokenizer(FileTokenizer):
  """A vocabulary file of the `tokenizers` library (Hugging Face's tokenizer.json).

  The special tokens are looked up by name on the first use of the file; a UserError names a missing one.
  `bos_token=None` and `pad_token=None` mean that the vocabulary has none (pad is then id 0, in positions of weight 0).
  """

  eos_token: str = '<eos>'
  bos_token: str | None = '<bos>'
  pad_token: str | None = '<pad>'

  @functools.cached_property
  def _tokenizer(self) -> Any:
    return load_tokenizer_file(self.path)

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
