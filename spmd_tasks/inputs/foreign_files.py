r"""Sources in other programs' formats: WebDataset's tar files, and documents tokenized by Megatron-LM.

    TextInput(source=TarShards(pattern='data/web-*.tar', field='json', key='text'), tokenizer=..., ...)
    TextInput(source=MegatronTokens(prefix='data/web_text_document'), tokenizer=..., batch_size=32, seq_len=2048)

In a tar shard, consecutive files with the same name up to the first dot are one sample, and the rest of the name is the
field. Opening reads the header of every file in every shard, but no contents.

Megatron-LM's preprocess_data.py writes tokens to PREFIX.bin and an index to PREFIX.idx. The index is little-endian: the
9 bytes MMIDIDX\0\0, the version 1 (uint64), a code of the tokens' dtype (uint8), the number of sequences S and of
documents plus one, D + 1 (uint64 each); then the length of each sequence (int32 [S]), its first byte in .bin
(int64 [S]), and the first sequence of each document, followed by S (int64 [D + 1]). A mode of each sequence (int8 [S])
may follow, which is not read.
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
from spmd_tasks.inputs.records import (
  check_not_empty,
  check_size_unchanged,
  common_root,
  expand_globs,
  parse_json,
  text_field,
)
from spmd_tasks.inputs.text import Block, FixedSizeFile, OpenFiles, file_fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class TarShards:
  """Uncompressed tar files (a glob pattern or several). Samples without the field are left out.

  Fields:
    field: the file of a sample that has the text, by its name after the first dot, ignoring case: 'txt' or 'json'.
    key: the key of the text if the file is a JSON object; None if the file is the text itself.
    block_samples: how many neighboring samples are a block; blocks are shuffled.
  """

  pattern: str | tuple[str, ...]
  field: str = 'txt'
  key: str | None = None
  block_samples: int = 64

  def open(self) -> 'OpenTarShards':
    if self.block_samples < 1:
      raise UserError(f'block_samples {self.block_samples} must be at least 1.')
    source = OpenTarShards(expand_globs(self.pattern, 'tar'), self.field, self.key, self.block_samples)
    return check_not_empty(source, f'the samples of {self.pattern!r} have no file .{self.field}: correct `field`.')


class OpenTarShards(OpenFiles):
  """Opened tar shards, with the byte range of each sample's text."""

  def __init__(self, paths: Sequence[str], field: str, key: str | None, block_samples: int):
    super().__init__(paths, file_fingerprint(common_root(paths), paths, 'tar', field, key, block_samples))
    self._key = key
    self._ranges = [_byte_ranges(path, field) for path in paths]  # of each shard, [samples, 2]
    self._blocks = [
      (shard, first) for shard, ranges in enumerate(self._ranges) for first in range(0, len(ranges), block_samples)
    ]
    self._block_samples = block_samples

  def sizes(self) -> np.ndarray:
    sample_sizes = [np.diff(ranges, axis=1)[:, 0] for ranges in self._ranges]
    return np.array([sample_sizes[shard][first : first + self._block_samples].sum() for shard, first in self._blocks])

  def block_name(self, index: int) -> str:
    shard, first = self._blocks[index]
    end = min(first + self._block_samples, len(self._ranges[shard]))
    return f'{self._paths[shard]} samples {first}-{end}'

  def __getitem__(self, index: int) -> Block:
    shard, first = self._blocks[index]
    documents = []
    with FixedSizeFile(self._paths[shard], self._sizes[shard]) as file:
      for start, end in self._ranges[shard][first : first + self._block_samples].tolist():
        where, data = f'{self._paths[shard]} bytes {start}-{end}', file.read(start, end)
        try:
          text = (
            data.decode() if self._key is None else text_field(parse_json(data, where, self._key), self._key, where)
          )
        except UnicodeDecodeError as error:
          raise UserError(f'{where} is not UTF-8 text ({error.reason}): correct `field`, or convert it.') from error
        documents.append((text, True))
    return Block(self.block_name(index), documents)


def _byte_ranges(path: str, field: str) -> np.ndarray:
  """Returns the byte range [start, end) of each sample's file `field` in a tar file, int64 [samples, 2]."""
  ranges: list[tuple[int, int]] = []
  try:
    with tarfile.open(path, 'r:') as tar:
      for member in tar:
        if member.isfile() and os.path.basename(member.name).partition('.')[2].lower() == field.lower():
          ranges.append((member.offset_data, member.offset_data + member.size))
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all members in memory
  except tarfile.TarError as error:
    raise UserError(
      f'{path} is not an uncompressed tar file ({error}): decompress it, or correct the pattern.'
    ) from error
  return np.array(ranges, np.int64).reshape(-1, 2)


_MAGIC, _HEADER = b'MMIDIDX\x00\x00', struct.Struct('<9sQBQQ')
_DTYPES = {1: '<u1', 2: '<i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronTokens:
  """Documents tokenized by Megatron-LM. The input needs the tokenizer that wrote them; a final eos is not doubled.

  Fields:
    prefix: the path of the two files without .bin and .idx.
    part: the fractions of the documents at which the part begins and ends, such as (0.0, 0.99) for training.
    block_tokens: how many tokens are a block; smaller blocks shuffle more finely.
  """

  prefix: str
  part: tuple[float, float] = (0.0, 1.0)
  block_tokens: int = 16384

  def open(self) -> 'OpenMegatronTokens':
    if not 0 <= self.part[0] < self.part[1] <= 1 or self.block_tokens < 1:
      raise UserError(
        f'part {self.part} must be two ascending fractions in [0, 1], and block_tokens {self.block_tokens} at least 1.'
      )
    paths = [path for kind in ('bin', 'idx') for path in expand_globs(f'{self.prefix}.{kind}', 'Megatron')]
    if len(paths) != 2:
      raise UserError(f'{self.prefix} matches {len(paths)} files: use one prefix, and a Mixture for several.')
    source = OpenMegatronTokens(paths[0], paths[1], self.part, self.block_tokens)
    return check_not_empty(source, f'{self.prefix} has no tokens in part {self.part}: use a larger part.')


class OpenMegatronTokens(OpenFiles):
  """Opened Megatron-LM files. The documents are consecutive in .bin, and a block is a range of tokens."""

  def __init__(self, path: str, index_path: str, part: tuple[float, float], block_tokens: int):
    with open(index_path, 'rb') as file:
      header = file.read(_HEADER.size).ljust(_HEADER.size)
    magic, version, code, num_sequences, num_ends = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES or num_ends < 1:
      raise UserError(f'{index_path} is not a Megatron-LM index of version 1 with integer tokens: use another prefix.')
    index = np.memmap(index_path, np.uint8, 'r')
    starts = [*itertools.accumulate((_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_ends))]
    if len(index) < starts[-1]:
      raise UserError(
        f'{index_path} has {len(index)} bytes, but needs {starts[-1]} according to its header: write or copy it again.'
      )
    arrays = (index[start:end] for start, end in itertools.pairwise(starts))
    dtypes = ('<i4', '<i8', '<i8')
    lengths, offsets, first_sequences = (array.view(dtype) for array, dtype in zip(arrays, dtypes, strict=True))
    self._dtype = np.dtype(_DTYPES[code])
    self._path, self._size = path, os.path.getsize(path)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_ascending = (np.diff(np.concatenate([[0], first_sequences, [num_sequences]])) >= 0).all()
    if (lengths < 0).any() or not is_ascending or not np.array_equal(offsets, ends[:-1] * self._dtype.itemsize):
      raise UserError(
        f'{index_path} is damaged: its sequences are not consecutive in {path}. Write or copy both files again.'
      )
    if self._size < ends[-1] * self._dtype.itemsize:
      raise UserError(
        f'{path} has {self._size} bytes, but needs {ends[-1] * self._dtype.itemsize} according to its index: write or '
        'copy it again.'
      )
    boundaries = ends[first_sequences]  # of the documents, in tokens
    first, last = (round(fraction * (num_ends - 1)) for fraction in part)
    self._boundaries = boundaries[first : last + 1]
    self._block_tokens = block_tokens
    settings = 'megatron', int(self._boundaries[0]), int(self._boundaries[-1]), block_tokens
    super().__init__([path, index_path], file_fingerprint(os.path.dirname(path), [path, index_path], *settings))

  def __len__(self) -> int:
    return -(-int(self._boundaries[-1] - self._boundaries[0]) // self._block_tokens)

  def _range(self, index: int) -> tuple[int, int]:
    """Returns the tokens [start, end) of a block."""
    start = int(self._boundaries[0]) + index * self._block_tokens
    return start, min(start + self._block_tokens, int(self._boundaries[-1]))

  def block_name(self, index: int) -> str:
    start, end = self._range(index)
    return f'{self._path} tokens {start}-{end}'

  def __getitem__(self, index: int) -> Block:
    check_size_unchanged(self._path, self._size)
    tokens = np.memmap(self._path, self._dtype, 'r')
    start, end = self._range(index)
    documents: list[tuple[Any, bool]] = []
    number = int(np.searchsorted(self._boundaries, start, 'right'))  # of the first boundary after `start`
    while start < end:
      stop = min(int(self._boundaries[number]), end)
      documents.append((tokens[start:stop].astype(np.int64), stop == self._boundaries[number]))
      start, number = stop, number + 1
    return Block(self.block_name(index), documents)
