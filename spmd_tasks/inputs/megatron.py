"""MegatronTokens: documents that Megatron-LM's preprocess_data.py has tokenized, PREFIX.bin and PREFIX.idx.

    TextInput(source=MegatronTokens(prefix='data/web_text_document'), tokenizer=..., batch_size=32, seq_len=2048)

The .idx file, little-endian: the 9 bytes MMIDIDX and two zeros, version 1 (uint64), the code of the tokens' dtype
(uint8), the number of sequences S and of documents + 1 (uint64 each), then of each sequence its length (int32) and its
first byte in .bin (int64), and of each document its first sequence, with S at the end (int64). A sequence may be
followed by a mode (int8), which is not read.
"""

import dataclasses
import itertools
import os
import struct
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.records import expand_globs, not_empty, refuse_changed_size
from spmd_tasks.inputs.text import Block, file_fingerprint

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


class OpenMegatronTokens:
  """Opened files. The tokens of all documents follow one another in .bin, and blocks are cut by position."""

  def __init__(self, path: str, index_path: str, part: tuple[float, float], block_tokens: int):
    with open(index_path, 'rb') as file:
      header = file.read(_HEADER.size).ljust(_HEADER.size)
    magic, version, code, num_sequences, num_ends = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES or num_ends < 1:
      raise UserError(f'{index_path} is no index of Megatron-LM, of version 1 and with integers: name another prefix.')
    index = np.memmap(index_path, np.uint8, 'r')
    starts = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_ends])
    if len(index) < starts[-1]:
      raise UserError(f'{index_path} has {len(index)} bytes, but its header says {starts[-1]}: copy it anew.')
    lengths, places, firsts = (index[a:b] for a, b in itertools.pairwise(starts))
    ends = np.concatenate([[0], np.cumsum(lengths.view('<i4'), dtype=np.int64)])
    self._dtype = np.dtype(_DTYPES[code])
    self._path, self._size = path, os.path.getsize(path)
    if not np.array_equal(places.view('<i8'), ends[:-1] * self._dtype.itemsize):
      raise UserError(f'{index_path}: its sequences do not follow one another in {path}: write both anew.')
    if self._size < ends[-1] * self._dtype.itemsize:
      raise UserError(f'{path} has {self._size} bytes, but the tokens in its index are more: copy it anew.')
    limits = ends[firsts.view('<i8')]  # of the documents, in tokens
    first, last = (round(fraction * (num_ends - 1)) for fraction in part)
    self._limits = limits[first : last + 1]
    self._block_tokens = block_tokens
    self._fingerprint = file_fingerprint(
      os.path.dirname(path), [path, index_path], 'megatron', int(self._limits[0]), int(self._limits[-1]), block_tokens
    )

  def __len__(self) -> int:
    return -(-int(self._limits[-1] - self._limits[0]) // self._block_tokens)

  def _range(self, index: int) -> tuple[int, int]:
    start = int(self._limits[0]) + index * self._block_tokens
    return start, min(start + self._block_tokens, int(self._limits[-1]))

  def block_name(self, index: int) -> str:
    start, end = self._range(index)
    return f'{self._path} tokens {start}-{end}'

  def fingerprint(self) -> str:
    return self._fingerprint

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
