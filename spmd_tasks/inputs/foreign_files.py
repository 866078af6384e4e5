"""Sources in the formats of other programs: WebDataset's tar files, and documents that Megatron-LM has tokenized.

    TextInput(source=TarShards(pattern='data/web-*.tar', field='json', key='text'), tokenizer=..., ...)
    TextInput(source=MegatronTokens(prefix='data/web_text_document'), tokenizer=..., batch_size=32, seq_len=2048)

Neighbouring files of a tar shard that have the same name up to the first dot are one sample, and the rest of the name
says what each of them is. Opening reads the header of every file in every shard, not the contents.

Megatron-LM's preprocess_data.py writes PREFIX.bin and PREFIX.idx, little-endian: the 9 bytes MMIDIDX and two zeros,
version 1 (uint64), the code of the tokens' dtype (uint8), the number of sequences S and of documents + 1 (uint64 each),
then of each sequence its length (int32) and its first byte in .bin (int64), and of each document its first sequence,
with S at the end (int64). A sequence may be followed by a mode (int8), which is not read.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import os
import struct
import tarfile
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.records import common_root, expand_globs, not_empty, parse_json, refuse_changed_size, text_field
from spmd_tasks.inputs.text import Block, ListedFile, OpenFiles, file_fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class TarShards:
  """Uncompressed tar files (a glob pattern or several). A sample without the field is left out.

  Fields:
    field: which file of a sample has the text, by its name after the first dot, in any case: 'txt' or 'json'.
    key: of the JSON object in that file, whose value is the text; None: the file is the text.
    block_samples: as many neighbouring samples are a block; blocks are shuffled.
  """

  pattern: str | tuple[str, ...]
  field: str = 'txt'
  key: str | None = None
  block_samples: int = 64

  def open(self) -> 'OpenTarShards':
    if self.block_samples < 1:
      raise UserError(f'block_samples {self.block_samples} must be at least 1.')
    source = OpenTarShards(expand_globs(self.pattern, 'tar'), self.field, self.key, self.block_samples)
    return not_empty(source, f'the samples of {self.pattern!r} have no file .{self.field}: correct `field`.')


class OpenTarShards(OpenFiles):
  """Opened shards: where the text of each sample lies."""

  def __init__(self, paths: Sequence[str], field: str, key: str | None, block_samples: int):
    super().__init__(paths, file_fingerprint(common_root(paths), paths, 'tar', field, key, block_samples))
    self._key = key
    self._places = [_places(path, field) for path in paths]  # of each shard: [samples, 2], first and last byte
    self._blocks = [
      (shard, first) for shard, places in enumerate(self._places) for first in range(0, len(places), block_samples)
    ]
    self._block_samples = block_samples

  def sizes(self) -> np.ndarray:
    of_samples = [np.diff(places, axis=1)[:, 0] for places in self._places]
    return np.array([of_samples[shard][first : first + self._block_samples].sum() for shard, first in self._blocks])

  def block_name(self, index: int) -> str:
    shard, first = self._blocks[index]
    last = min(first + self._block_samples, len(self._places[shard]))
    return f'{self._paths[shard]} samples {first}-{last}'

  def __getitem__(self, index: int) -> Block:
    shard, first = self._blocks[index]
    documents = []
    with ListedFile(self._paths[shard], self._sizes[shard]) as file:
      for start, end in self._places[shard][first : first + self._block_samples].tolist():
        where, data = f'{self._paths[shard]} bytes {start}-{end}', file.read(start, end)
        try:
          text = (
            data.decode() if self._key is None else text_field(parse_json(data, where, self._key), self._key, where)
          )
        except UnicodeDecodeError as error:
          raise UserError(f'{where} is not UTF-8 text ({error.reason}): correct `field`, or convert it.') from error
        documents.append((text, True))
    return Block(self.block_name(index), documents)


def _places(path: str, field: str) -> np.ndarray:
  """Returns the first and last byte of each sample's file `field`, int64 [samples, 2]."""
  places: list[tuple[int, int]] = []
  try:
    with tarfile.open(path, 'r:') as tar:
      for member in tar:
        if member.isfile() and os.path.basename(member.name).partition('.')[2].lower() == field.lower():
          places.append((member.offset_data, member.offset_data + member.size))
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
  except tarfile.TarError as error:
    raise UserError(
      f'{path} is no uncompressed tar file ({error}): unpack it (gunzip), or correct the pattern.'
    ) from error
  return np.array(places, np.int64).reshape(-1, 2)


_MAGIC, _HEADER = b'MMIDIDX\x00\x00', struct.Struct('<9sQBQQ')
_DTYPES = {1: '<u1', 2: '<i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronTokens:
  """Tokenized documents of Megatron-LM. The input's tokenizer must be that of the ids; a last eos is not doubled.

  Fields:
    prefix: of the two files, without .bin and .idx.
    part: (from, to) fractions of the documents, so that (0.0, 0.99) trains and (0.99, 1.0) validates.
    block_tokens: blocks of as many tokens are shuffled; a smaller value shuffles more finely.
  """

  prefix: str
  part: tuple[float, float] = (0.0, 1.0)
  block_tokens: int = 16384

  def open(self) -> 'OpenMegatronTokens':
    if not 0 <= self.part[0] < self.part[1] <= 1 or self.block_tokens < 1:
      raise UserError(
        f'part {self.part} must be two rising fractions of the documents, block_tokens {self.block_tokens} positive.'
      )
    paths = [path for kind in ('bin', 'idx') for path in expand_globs(f'{self.prefix}.{kind}', 'Megatron')]
    if len(paths) != 2:
      raise UserError(f'{self.prefix} matches {len(paths)} files: name one prefix; a Mixture has several.')
    source = OpenMegatronTokens(paths[0], paths[1], self.part, self.block_tokens)
    return not_empty(source, f'{self.prefix} has no tokens in part {self.part}: name other files, or a larger part.')


class OpenMegatronTokens(OpenFiles):
  """Opened files. The tokens of all documents follow one another in .bin, and blocks are cut by position."""

  def __init__(self, path: str, index_path: str, part: tuple[float, float], block_tokens: int):
    with open(index_path, 'rb') as file:
      header = file.read(_HEADER.size).ljust(_HEADER.size)
    magic, version, code, num_sequences, num_ends = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES or num_ends < 1:
      raise UserError(f'{index_path} is no index of Megatron-LM, of version 1 and with integers: name another prefix.')
    index = np.memmap(index_path, np.uint8, 'r')
    starts = [*itertools.accumulate((_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_ends))]
    if len(index) < starts[-1]:
      raise UserError(f'{index_path} has {len(index)} bytes, but its header says {starts[-1]}: copy it anew.')
    parts = (index[a:b] for a, b in itertools.pairwise(starts))
    lengths, places, firsts = (part.view(kind) for part, kind in zip(parts, ('<i4', '<i8', '<i8'), strict=True))
    rising = np.concatenate([[0], firsts, [num_sequences]])
    if (lengths < 0).any() or (np.diff(rising) < 0).any():
      raise UserError(
        f'{index_path} has a sequence of negative length, or documents that do not begin one after the other among '
        f'its {num_sequences} sequences: write it anew.'
      )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    self._dtype = np.dtype(_DTYPES[code])
    self._path, self._size = path, os.path.getsize(path)
    if not np.array_equal(places, ends[:-1] * self._dtype.itemsize):
      raise UserError(f'{index_path}: its sequences do not follow one another in {path}: write both anew.')
    if self._size < ends[-1] * self._dtype.itemsize:
      raise UserError(f'{path} has {self._size} bytes, but the tokens in its index are more: copy it anew.')
    limits = ends[firsts]  # of the documents, in tokens
    first, last = (round(fraction * (num_ends - 1)) for fraction in part)
    self._limits = limits[first : last + 1]
    self._block_tokens = block_tokens
    settings = 'megatron', int(self._limits[0]), int(self._limits[-1]), block_tokens
    super().__init__([path, index_path], file_fingerprint(os.path.dirname(path), [path, index_path], *settings))

  def __len__(self) -> int:
    return -(-int(self._limits[-1] - self._limits[0]) // self._block_tokens)

  def _range(self, index: int) -> tuple[int, int]:
    start = int(self._limits[0]) + index * self._block_tokens
    return start, min(start + self._block_tokens, int(self._limits[-1]))

  def block_name(self, index: int) -> str:
    start, end = self._range(index)
    return f'{self._path} tokens {start}-{end}'

  def __getitem__(self, index: int) -> Block:
    refuse_changed_size(self._path, self._size)
    tokens = np.memmap(self._path, self._dtype, 'r')
    start, end = self._range(index)
    documents: list[tuple[Any, bool]] = []
    number = int(np.searchsorted(self._limits, start, 'right'))  # of the limit behind `start`
    while start < end:
      stop = min(int(self._limits[number]), end)
      documents.append((tokens[start:stop].astype(np.int64), stop == self._limits[number]))
      start, number = stop, number + 1
    return Block(self.block_name(index), documents)
