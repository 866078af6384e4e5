"""Files of records with random access: JSON lines, Parquet and Arrow. Each record is a block.

Shuffling permutes blocks, so single records are shuffled, and a position is a number of records. Opening therefore
reads JSON lines once to find where each record begins, reads Parquet into memory, and maps Arrow files. It also digests
all bytes, so a position is refused if a file has changed, even without changing its size.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any
import zlib

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.inputs import Block
from spmd_tasks.inputs.records import check_not_empty, check_size_unchanged, common_root, expand_globs, parse_json
from spmd_tasks.inputs.text import FixedSizeFile, OpenFiles, file_fingerprint

_JSON_LINES, _PARQUET, _ARROW = ('.jsonl', '.json', '.ndjson'), ('.parquet', '.pq'), ('.arrow', '.feather', '.ipc')
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Record:
  """A record, and its index among the records of all files."""

  index: int
  values: Mapping[str, Any]


class OpenRecordFiles(OpenFiles):
  """Opened files of records: the only document of block `i` is record `i`, a Record."""

  def __init__(self, pattern: str | Sequence[str], required: Sequence[str], optional: Sequence[str] | None = ()):
    """Opens the files that the glob patterns match.

    Args:
      pattern: one glob pattern, or several; the suffixes determine the formats.
      required, optional: the columns to read from Parquet and Arrow; with None as `optional`, all columns.

    Raises a UserError if a file cannot be read or lacks a required column, or if there are no records.
    """
    paths = expand_globs(pattern, 'record')
    self._files = [_open_file(path, required, optional) for path in paths]
    self._starts = np.cumsum([0, *map(len, self._files)])
    check_not_empty(self, f'the files of {pattern!r} have no records: correct the pattern, or add records.')
    digests = tuple(file.digest for file in self._files)
    super().__init__(
      paths, file_fingerprint(common_root(paths), paths, 'records', *required, *(optional or ()), digests)
    )

  def __len__(self) -> int:
    return int(self._starts[-1])

  def _locate(self, index: int) -> tuple[Any, int]:
    """Returns the file of record `index`, and the record's number in the file."""
    file = int(np.searchsorted(self._starts, index, side='right')) - 1
    return self._files[file], index - int(self._starts[file])

  def block_name(self, index: int) -> str:
    file, number = self._locate(index)
    return file.name(number)

  def __getitem__(self, index: int) -> Block:
    file, number = self._locate(index)
    return Block(file.name(number), [(Record(index, file.read(number)), True)])


def _open_file(path: str, required: Sequence[str], optional: Sequence[str] | None) -> Any:
  suffix = os.path.splitext(path)[1].lower()
  if suffix in _JSON_LINES:
    return _JsonLinesFile(path)
  if suffix in _PARQUET or suffix in _ARROW:
    return _TableFile(path, tuple(required), None if optional is None else tuple(optional))
  suffixes = ', '.join((*_JSON_LINES, *_PARQUET, *_ARROW))
  raise UserError(f'{path} must end in one of {suffixes}, which determines its format: rename or convert it.')


class _JsonLinesFile:
  """One JSON object per line; blank lines are skipped."""

  def __init__(self, path: str):
    self._path, self._size = path, os.path.getsize(path)
    starts, lines, position, digest = [], [], 0, 0
    with open(path, 'rb') as f:
      for number, line in enumerate(f, 1):
        if line.strip():
          starts.append(position)
          lines.append(number)
        position += len(line)
        digest = zlib.crc32(line, digest)
    self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)
    self.digest = digest

  def __len__(self) -> int:
    return len(self._starts)

  def name(self, number: int) -> str:
    return f'{self._path}:{self._lines[number]}'

  def read(self, number: int) -> Mapping[str, Any]:
    start = int(self._starts[number])
    with FixedSizeFile(self._path, self._size) as f:
      try:
        record = parse_json(f.read(start, self._size, to_line_end=True), 'the line')
      except UserError as error:
        if f.read(int(self._starts[0]), self._size, to_line_end=True).strip() != b'[':
          raise
        raise UserError('the file is an array on several lines: write each of its records on one line.') from error
    if not isinstance(record, dict):
      raise UserError(
        f'the line is a {type(record).__name__}: it must be a JSON object; write each record on its own line.'
      )
    return record


class _TableFile:
  """A Parquet file, which is read into memory, or an Arrow file (IPC file or stream), which is mapped."""

  def __init__(self, path: str, required: tuple[str, ...], optional: tuple[str, ...] | None):
    self._path, self._size = path, os.path.getsize(path)
    self._required, self._optional = required, optional
    digest = 0
    with open(path, 'rb') as f:
      while chunk := f.read(_CHUNK):
        digest = zlib.crc32(chunk, digest)
    self.digest = digest
    self._table: Any = None
    self._num_rows = self._opened().num_rows

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_table': None}

  def _opened(self) -> Any:
    if self._table is None:
      require('parquet', 'pyarrow', wants=self._path)
      import pyarrow

      try:
        table = _read_table(self._path)
      except (pyarrow.ArrowException, OSError) as e:
        raise UserError(f'{self._path} is not a readable Parquet or Arrow file ({e}): write or copy it again.') from e
      finally:
        check_size_unchanged(self._path, self._size)
      if missing := [name for name in self._required if name not in table.column_names]:
        raise UserError(f'{self._path} has no column {missing[0]!r}, only {table.column_names}: rename or add it.')
      names = table.column_names
      if self._optional is not None:
        names = [name for name in names if name in (*self._required, *self._optional)]
      if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f'{self._path} has several columns {duplicates[0]!r}: rename or remove all but one.')
      self._table = table.select(names)
    return self._table

  def __len__(self) -> int:
    return self._num_rows

  def name(self, number: int) -> str:
    return f'{self._path} row {number}'

  def read(self, number: int) -> Mapping[str, Any]:
    row = self._opened().slice(number, 1).to_pylist()[0]
    return {name: _without_missing(value) for name, value in row.items() if value is not None}


def _read_table(path: str) -> Any:
  import pyarrow
  import pyarrow.parquet

  if os.path.splitext(path)[1].lower() in _PARQUET:
    return pyarrow.parquet.ParquetFile(path).read()
  mapped = pyarrow.memory_map(path)
  try:
    return pyarrow.ipc.open_file(mapped).read_all()
  except pyarrow.ArrowInvalid:
    mapped.seek(0)
    return pyarrow.ipc.open_stream(mapped).read_all()


def _without_missing(value: Any) -> Any:
  """Removes null fields from the objects in a value, because the objects of a column have the fields of all rows."""
  if isinstance(value, dict):
    return {name: _without_missing(item) for name, item in value.items() if item is not None or name == 'content'}
  return [_without_missing(item) for item in value] if isinstance(value, list) else value
