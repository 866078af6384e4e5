"""Tokenizers that are read from files: Hugging Face's tokenizer.json, alone or in a model folder, and SentencePiece.

Also T5's bytes, and IdTokenizer for models without a tokenizer.
"""

import abc
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import hashlib
import json
import os
import re
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import read_bytes, read_text
from spmd_tasks.inputs.tokenizers import ByteTokenizer
from spmd_tasks.store_files import local_folder

_CONFIG = 'tokenizer_config.json'
_BYTE = re.compile(r'<0x([0-9A-F]{2})>')  # a piece of one byte in SentencePiece's vocabularies


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ListTokenizer(abc.ABC):
  """Base class of tokenizers whose `encode` returns a list. Pickled without cached files."""

  def __getstate__(self) -> dict[str, Any]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]: ...

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer(_ListTokenizer):
  """Base class of tokenizers of the `tokenizers` library, read from the file or folder `path` on first use."""

  path: str

  @functools.cached_property
  @abc.abstractmethod
  def _tokenizer(self) -> Any:
    """The `tokenizers.Tokenizer`."""

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`; special tokens and ids outside the vocabulary have no text.

    Some decoders drop a space before the first token: decode a continuation together with tokens before it.
    """
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

  def decode_all(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, including the names of special tokens; ids outside the vocabulary have no text."""
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

  def vocabulary(self, *, with_added_tokens: bool = True) -> dict[str, int]:
    """Returns the id of each token; without the added tokens, those that encode text."""
    return self._tokenizer.get_vocab(with_added_tokens=with_added_tokens)

  @functools.cached_property
  def added_tokens(self) -> dict[str, tuple[int, bool]]:
    """The tokens that are never split, by text: (id, whether `decode` omits it)."""
    added = self._tokenizer.get_added_tokens_decoder()
    return {token.content: (i, token.special) for i, token in added.items()}

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    prefix, length = self._decoding_prefix
    return [self._piece_bytes(token, self.decode([*prefix, token])[length:]) for token in ids]

  @functools.cached_property
  def _decoding_prefix(self) -> tuple[list[int], int]:
    """A token after which decoders keep spaces, and the length of its text."""
    ids = self.encode('a')[-1:]
    return ids, len(self.decode(ids))

  def _piece_bytes(self, token: int, text: str) -> bytes:
    """Returns the bytes of a token that adds `text`, in which U+FFFD may replace a part of a character."""
    if '\ufffd' not in text:
      return text.encode()
    piece = self._tokenizer.id_to_token(int(token))
    if byte := _BYTE.fullmatch(piece):
      return bytes([int(byte[1], 16)])
    byte_of_char = _byte_of_char()
    return bytes([byte_of_char[char] for char in piece]) if byte_of_char.keys() >= set(piece) else text.encode()

  def added_tokens_in(self, text: str, *, only_special: bool = False) -> list[int]:
    """Returns the added tokens in a text, such as <|im_end|>, in order, except whitespace."""
    added = self._tokenizer.get_added_tokens_decoder()
    ids = [token for token in self.encode(text) if token in added and added[token].content.strip()]
    return [token for token in ids if added[token].special or not only_special]

  def to_json(self) -> str:
    """Returns the text of a tokenizer.json."""
    return self._tokenizer.to_str()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BpeTokenizer(FileTokenizer):
  """Reads a tokenizer.json of the `tokenizers` library.

  Fields:
    eos_token, bos_token, pad_token: the texts of the special tokens. None means that the vocabulary has no bos, or no
      pad; padding is then id 0.
  """

  eos_token: str = '<eos>'
  bos_token: str | None = '<bos>'
  pad_token: str | None = '<pad>'

  @functools.cached_property
  def _tokenizer(self) -> Any:
    return load_tokenizer_file(self.path)

  def _special_id(self, token: str) -> int:
    token_id = self._tokenizer.token_to_id(token)
    if token_id is None:
      raise UserError(
        f'{self.path} has no token {token!r}: set eos_token, bos_token and pad_token to its special tokens, or the '
        'last two to None.'
      )
    return token_id

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderTokenizer(FileTokenizer):
  """Reads the tokenizer of a Hugging Face model folder, like `transformers`: tokenizer.json and the configs beside it.

  Tokens that only the configs list, such as `added_tokens_decoder` in tokenizer_config.json, are added: they are never
  split, and take the next ids if tokenizer.json does not contain them. The post-processor of tokenizer.json determines
  the tokens before a text (bos, or several tokens); `bos_token_id` in config.json is ignored, because models without a
  bos have it, too. The end of text is `eos_token` in tokenizer_config.json or special_tokens_map.json, or else the
  first `eos_token_id` in generation_config.json or config.json. Files are read on first use; nothing in them is run.
  """

  @functools.cached_property
  def _tokenizer(self) -> Any:
    path = self._file('tokenizer.json')
    if not os.path.exists(path) and os.path.isdir(local_folder(self.path)):
      raise UserError(
        f"{self.path} has no tokenizer.json: write one with transformers' "
        'AutoTokenizer.from_pretrained(...).save_pretrained(...).'
      )
    tokenizer = load_tokenizer_file(path)
    tokenizer.add_tokens(self._tokens_of_configs(tokenizer))
    tokenizer.no_padding()  # a file may have been saved with the settings of its training
    tokenizer.no_truncation()
    return tokenizer

  def _tokens_of_configs(self, tokenizer: Any) -> list[Any]:
    """Returns the tokens that the configs list, but tokenizer.json does not have as added tokens."""
    from tokenizers import AddedToken

    config = read_json_object(self._file(_CONFIG))
    extra = config.get('extra_special_tokens') or config.get('additional_special_tokens') or ()
    special = [text for text in self.special_tokens.values() if tokenizer.token_to_id(text) is not None]
    special += [text for text in map(_token_text, extra) if text is not None]
    try:
      listed = {int(i): AddedToken(**token) for i, token in (config.get('added_tokens_decoder') or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
      raise UserError(f'{self._file(_CONFIG)} has an invalid token in added_tokens_decoder: {error}.') from error
    if 'added_tokens_decoder' not in config:  # older folders
      for text, i in read_json_object(self._file('added_tokens.json')).items():
        is_special = text in special
        listed[i] = AddedToken(text, normalized=not is_special, special=is_special)
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = {token.content: token for _, token in sorted(listed.items()) if token.content not in present}
    named = dict.fromkeys(text for text in special if text not in present | tokens.keys())
    return [*tokens.values(), *(AddedToken(text, special=True) for text in named)]

  @functools.cached_property
  def special_tokens(self) -> dict[str, str]:
    """The texts of the folder's special tokens by name: `bos_token`, `eos_token`, ..."""
    config = read_json_object(self._file('special_tokens_map.json')) | read_json_object(self._file(_CONFIG))
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith('_token')}
    return {name: text for name, text in texts.items() if text is not None}

  @functools.cached_property
  def eos_id(self) -> int:
    if (eos_id := self._special_id('eos_token')) is not None:
      return eos_id
    for file in ('generation_config.json', 'config.json'):
      ids = read_json_object(self._file(file)).get('eos_token_id')
      first = ids[0] if isinstance(ids, list) and ids else ids
      if isinstance(first, int):
        return first
    raise UserError(f'{self.path} has no eos_token: set it in its {_CONFIG}.')

  @functools.cached_property
  def pad_id(self) -> int:
    return self._special_id('pad_token') or 0

  @functools.cached_property
  def prefix_ids(self) -> tuple[int, ...]:
    """The tokens that the post-processor puts before every text."""
    encoding = self._tokenizer.encode('a', add_special_tokens=True)
    num_added = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    return tuple(encoding.ids[:num_added])

  @property
  def bos_id(self) -> int | None:
    """The last of `prefix_ids`."""
    return self.prefix_ids[-1] if self.prefix_ids else None

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id + 1; not all smaller ids need be in use."""
    return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

  def encode_prompt(self, text: str) -> tuple[int, ...]:
    """Encodes like transformers' `tokenizer(text)`, but adds no second bos if `text` itself begins with one."""
    ids = tuple(self.encode(text))
    if self.prefix_ids and ids[: len(self.prefix_ids)] == self.prefix_ids:
      return ids
    return (*self.prefix_ids, *ids)

  def encode_whole(self, text: str, pair: str | None = None) -> tuple[int, ...]:
    """Encodes like transformers' `tokenizer(text, pair)`, with all tokens that the post-processor adds."""
    return tuple(self._tokenizer.encode(text, pair, add_special_tokens=True).ids)

  def fingerprint(self) -> str:
    path = self._file('tokenizer.json')
    tokens = [str(token) + repr(token) for token in self._tokens_of_configs(load_tokenizer_file(path))]
    return f'folder {digest_of(path)}' + (f' and {tokens}' if tokens else '')

  def _file(self, name: str) -> str:
    return os.path.join(local_folder(self.path), name)

  def _special_id(self, name: str) -> int | None:
    text = self.special_tokens.get(name)
    token_id = None if text is None else self._tokenizer.token_to_id(text)
    if text is not None and token_id is None:
      raise UserError(f'{self.path} has {name} {text!r}, which is not in its tokenizer.json: correct its {_CONFIG}.')
    return token_id


def load_tokenizer_file(path: str) -> Any:
  """Returns the `tokenizers.Tokenizer` of a tokenizer.json. Raises a UserError if it cannot be read."""
  require('huggingface', 'tokenizers', wants=path)
  import tokenizers

  try:
    return tokenizers.Tokenizer.from_buffer(read_bytes(path))
  except Exception as e:  # the library raises a bare Exception
    raise UserError(
      f'{path} cannot be read as a tokenizer.json ({e}): correct the path, or train a vocabulary with train_bpe.'
    ) from e


@functools.cache
def _byte_of_char() -> dict[str, int]:
  """Returns the byte of each character in the pieces of a byte-level vocabulary, as GPT-2 maps them."""
  printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def digest_of(path: str) -> str:
  """Returns a digest of a file's bytes."""
  return hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()


def train_bpe(texts: Iterable[str], path: str, vocab_size: int, min_frequency: int = 2) -> BpeTokenizer:
  """Trains a byte-level BPE vocabulary on `texts`, saves it at `path` and returns it.

  All 256 bytes are in the alphabet, so any text is encoded and decoded exactly. `<pad>`, `<bos>` and `<eos>` are ids 0,
  1 and 2. The result has fewer than `vocab_size` entries if the texts have too few pairs to merge.
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


def read_json_object(path: str) -> dict[str, Any]:
  """Returns the object in a JSON file; {} if there is no such file. Raises a UserError if it is not a JSON object."""
  try:
    value = json.loads(read_text(path))
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f'{path} cannot be read as JSON: {error}.') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} must be a JSON object, not a {type(value).__name__}.')
  return value


def _token_text(value: Any) -> str | None:
  """Returns the text of a special token, which is a string, or an object with the key `content`."""
  text = value.get('content') if isinstance(value, dict) else value
  return text if isinstance(text, str) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5ByteTokenizer(ByteTokenizer):
  """Bytes as in T5 and ByT5: ids 0, 1, 2 are pad, eos, unknown; byte b is id b + 3; `extra_ids` sentinels follow."""

  bos_id: None = dataclasses.field(default=None, init=False)  # type: ignore[assignment]
  eos_id: int = dataclasses.field(default=1, init=False)
  extra_ids: int = 0

  @property
  def vocab_size(self) -> int:
    return super().vocab_size + self.extra_ids

  def decode(self, ids: Sequence[int]) -> str:
    return super().decode([token for token in ids if token < super(T5ByteTokenizer, self).vocab_size])

  def fingerprint(self) -> str:
    return f'T5 bytes+3+{self.extra_ids}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(_ListTokenizer):
  """Reads a SentencePiece model file like T5: pad is id 0, and `extra_ids` sentinels follow the file's pieces.

  The sentinels `<extra_id_0>`, `<extra_id_1>`, ... count down from the last id.
  """

  path: str
  extra_ids: int = 0
  pad_id: int = dataclasses.field(default=0, init=False)

  @functools.cached_property
  def _processor(self) -> Any:
    require('t5x', 'sentencepiece', wants=self.path)
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as proto

    try:
      model = proto.ModelProto.FromString(read_bytes(self.path))  # type: ignore[attr-defined]
      for number in reversed(range(self.extra_ids)):
        model.pieces.add(piece=f'▁<extra_id_{number}>', score=0.0, type=model.SentencePiece.USER_DEFINED)
      return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    except Exception as e:  # an OSError, an error of protobuf, or a RuntimeError of the library
      raise UserError(f'{self.path} cannot be read as a SentencePiece model ({e}): correct the path.') from e

  @property
  def vocab_size(self) -> int:
    return self._processor.get_piece_size()

  @property
  def bos_id(self) -> int | None:
    return None if self._processor.bos_id() < 0 else self._processor.bos_id()

  @property
  def eos_id(self) -> int:
    return self._processor.eos_id()

  def encode(self, text: str) -> list[int]:
    return self._processor.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    return self._processor.decode([int(token) for token in ids if token != self.pad_id])

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    return [self._piece_bytes(int(token)) for token in ids]

  def _piece_bytes(self, token: int) -> bytes:
    processor, piece = self._processor, self._processor.id_to_piece(token)
    if processor.is_byte(token):
      return bytes([int(piece[3:5], 16)])
    if processor.is_control(token) or processor.is_unknown(token):
      return self.decode([token]).encode()
    return piece.replace('▁', ' ').encode()

  def fingerprint(self) -> str:
    return f'sentencepiece {self.extra_ids} {digest_of(self.path)}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdTokenizer(_ListTokenizer):
  """Ids written as numbers, '5 17 3', for models without a tokenizer.

  `decode` puts a space before each id, so that texts can be joined.
  """

  vocab_size: int
  eos_id: int
  pad_id: int = 0
  bos_id: int | None = None

  def encode(self, text: str) -> list[int]:
    """Raises a UserError unless the text consists of ids of the vocabulary."""
    words = text.split()
    for word in words:
      is_number = word.isascii() and word.isdigit() and len(word) < 20  # int() refuses thousands of digits
      if not is_number or int(word) >= self.vocab_size:
        raise UserError(
          f'{word[:40]!r} is not an id: this model has no tokenizer, so write ids below {self.vocab_size}, separated '
          'by spaces.'
        )
    return [int(word) for word in words]

  def decode(self, ids: Sequence[int]) -> str:
    return ''.join(f' {token}' for token in ids if token != self.eos_id)

  def fingerprint(self) -> str:
    return f'ids {self.vocab_size}'
