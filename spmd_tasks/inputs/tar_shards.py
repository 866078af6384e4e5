"""TarShards: texts in the tar files of WebDataset.

    TextInput(source=TarShards(pattern='data/web-*.tar', field='json', key='text'), tokenizer=..., ...)

Neighbouring files of a shard that have the same name up to the first dot are one sample, and the rest of the name says
what each of them is. Opening reads the header of every file in every shard, not the contents.
"""

from collections.abc import Sequence
import dataclasses
import os
import tarfile

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.records import common_root, expand_globs, not_empty, parse_json, text_field
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
