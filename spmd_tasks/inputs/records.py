"""Sources of text in files: plain text, JSON lines, Parquet and ArrayRecord. text.py defines sources and blocks."""

import bisect
from collections.abc import Sequence, Sized
from concurrent import futures
import dataclasses
import glob
import itertools
import json
import os
from pathlib import Path
import re
from typing import Any, TypeVar

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import is_remote
from spmd_tasks.inputs.text import (
  DEFAULT_BLOCK_BYTES,
  Block,
  FixedSizeFile,
  OpenFiles,
  OpenTextFiles,
  byte_sizes,
  changed_file_error,
  cut_files,
  file_fingerprint,
  in_split,
)
from spmd_tasks.stores import local_copies

OpenSourceT = TypeVar('OpenSourceT', bound=Sized)

_MAX_LINE_BYTES, _PART_BYTES = 1 << 30, 1 << 20
_SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # half of a character beyond 16 bits
_NUM_OPENING_THREADS = 64  # how many ArrayRecord files are opened at a time


def expand_globs(patterns: str | Sequence[str], kind: str) -> list[str]:
  """Returns the files that glob patterns match, sorted. Raises a UserError if one matches no readable file."""
  patterns = [patterns] if isinstance(patterns, str) else list(patterns)
  if not patterns:
    raise UserError(f'the pattern of {kind} files is empty: set it to a path or a glob pattern.')
  files = set()
  for pattern in patterns:
    pattern = os.path.expanduser(pattern)
    # The name of an existing file may contain the characters of a pattern.
    paths = local_copies(pattern) if is_remote(pattern) else glob.glob(pattern, recursive=True) or [pattern]
    matches = [path for path in paths if os.path.isfile(path)]
    if not matches:
      folder = next(filter(os.path.isdir, map(str, Path(pattern).absolute().parents)))
      if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f'{folder} is not readable: change its permissions, or correct the path.')
      raise UserError(
        f'no {kind} file matches {pattern!r} (current directory {os.getcwd()}): correct it, or use DIRECTORY/* for the '
        'files of a directory.'
      )
    files.update(matches)
  if unreadable := [path for path in sorted(files) if not os.access(path, os.R_OK)]:
    raise UserError(f'{unreadable[0]} is not readable: change its permissions, or exclude it from the pattern.')
  return sorted(files)


def common_root(paths: Sequence[str]) -> str:
  """Returns the directory that contains all files."""
  return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])


def check_not_empty(source: OpenSourceT, message: str) -> OpenSourceT:
  """Returns an opened source. Raises a UserError if it has no block."""
  if len(source) == 0:
    raise UserError(message)
  return source


def check_size_unchanged(path: str, size: int) -> None:
  """Raises a JobError unless a file still has the size that it had when its source was opened."""
  if (now := os.path.getsize(path)) != size:
    raise changed_file_error(path, size, f'has {now} bytes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
  """UTF-8 text files that match a glob pattern (`**` matches any directories) or several; each file is a document.

  The splits 'train' and 'valid' divide the files by a hash of their path relative to the common directory; about
  `valid_fraction` of the files are in 'valid'.
  """

  pattern: str | tuple[str, ...]
  split: str = 'all'
  valid_fraction: float = 0.05
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> OpenTextFiles:
    paths = expand_globs(self.pattern, 'text')
    root = common_root(paths)
    in_this_split = [path for path in paths if in_split(os.path.relpath(path, root), self.split, self.valid_fraction)]
    fingerprint = file_fingerprint(root, in_this_split, 'text', self.block_bytes)
    source = OpenTextFiles(in_this_split, self.block_bytes, fingerprint)
    message = (
      f'the {len(paths)} files of {self.pattern!r} have no text in split {self.split!r} (valid_fraction '
      f'{self.valid_fraction}): add files, move valid_fraction towards 0.5, or set split to "all".'
    )
    return check_not_empty(source, message)


def text_field(record: Any, field: str, where: str) -> str:
  """Returns the text in a field of a record. Raises a UserError, which begins with `where`, if there is none."""
  if not isinstance(record, dict):
    raise UserError(f'{where} is a {type(record).__name__}: it must be a JSON object with a field {field!r}.')
  if field not in record:
    raise UserError(f'{where} has no field {field!r}, only {sorted(record)[:20]}: correct `field`.')
  if not isinstance(record[field], str):
    kind = type(record[field]).__name__
    raise UserError(f'{where} has field {field!r} of type {kind}, not text: correct `field` or the record.')
  return record[field]


def parse_json(data: bytes, where: str, field: str | None = None) -> Any:
  """Parses a JSON record. Raises a UserError, which begins with `where`, if it is invalid.

  Only `field`, or the whole record if None, must be valid Unicode.
  """
  try:
    record = json.loads(data.decode('utf-8-sig'))
    if _SURROGATE.search(data):
      value = record if field is None or not isinstance(record, dict) else record.get(field)
      json.dumps(value, ensure_ascii=False).encode()  # raises if half of a character is missing
    return record
  except json.JSONDecodeError as e:
    raise UserError(f'{where} is not JSON: {e.msg} at character {e.pos + 1}. Repair or remove the record.') from e
  except (ValueError, RecursionError) as e:  # invalid UTF-8, or nested too deeply
    raise UserError(
      f'{where} is not JSON in UTF-8: {e}. Repair or remove the record, or convert the file if it is compressed or in '
      'another encoding.'
    ) from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines:
  """JSON lines files (a glob pattern or several): one object per line, with its text in `field`.

  Blank lines are skipped. Blocks of about `block_bytes` are shuffled; smaller blocks shuffle more finely.
  """

  pattern: str | tuple[str, ...]
  field: str = 'text'
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> 'OpenJsonLines':
    source = OpenJsonLines(expand_globs(self.pattern, 'JSON lines'), self.field, self.block_bytes)
    return check_not_empty(source, f'the files of {self.pattern!r} are empty: correct the pattern.')


class OpenJsonLines(OpenFiles):
  """Opened JSON lines files. A block has the lines whose first byte is in its byte range."""

  def __init__(self, paths: Sequence[str], field: str, block_bytes: int):
    super().__init__(paths, file_fingerprint(common_root(paths), paths, 'jsonl', field, block_bytes))
    self._blocks = cut_files(self._sizes, block_bytes)
    self._field = field

  def sizes(self) -> np.ndarray:
    return byte_sizes(self._blocks)

  def __getitem__(self, index: int) -> Block:
    file, start, end = self._blocks[index]
    path, size = self._paths[file], self._sizes[file]
    documents = []
    with FixedSizeFile(path, size) as f:
      # Skips the line that begins in the block before, at most to the end of this block.
      position = start and start - 1 + len(f.read(start - 1, end, to_line_end=True))
      while position < end:
        line = f.read(position, position + _MAX_LINE_BYTES, to_line_end=True)
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b'\n'):
          raise UserError(f'{path}: the line at byte {position} is longer than {_MAX_LINE_BYTES:,} bytes: split it.')
        if line.strip():
          try:
            record = parse_json(line, 'the line', self._field)
            documents.append((text_field(record, self._field, 'the line'), True))
          except ValueError as e:
            # The line number is only counted for the message, because that reads the file from its start.
            parts = (f.read(at, min(at + _PART_BYTES, position)) for at in range(0, position, _PART_BYTES))
            number = 1 + sum(part.count(b'\n') for part in parts)
            raise UserError(f'{path}:{number}: {e}') from e
        position += len(line)
    return Block(self.block_name(index), documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet:
  """Parquet files (a glob pattern or several) with the text in column `field`. A block has `block_rows` rows."""

  pattern: str | tuple[str, ...]
  field: str = 'text'
  block_rows: int = 256

  def open(self) -> 'OpenParquet':
    require('parquet', 'pyarrow', wants=f'the input {self.pattern!r}')
    source = OpenParquet(expand_globs(self.pattern, 'Parquet'), self.field, self.block_rows)
    return check_not_empty(source, f'the files of {self.pattern!r} have no rows: correct the pattern.')


class OpenParquet(OpenFiles):
  """Opened Parquet files. Opening reads the footers. Reading a block decodes its row group, and caches the last one."""

  def __init__(self, paths: Sequence[str], field: str, block_rows: int):
    if block_rows < 1:
      raise UserError(f'block_rows {block_rows} must be at least 1.')
    super().__init__(paths, file_fingerprint(common_root(paths), paths, 'parquet', field, block_rows))
    self._field = field
    # Blocks are (file, row group, first row in the group, number of rows).
    for file, path in enumerate(self._paths):
      metadata = self._open_file(path).metadata
      for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        self._blocks += [(file, group, row, min(block_rows, num_rows - row)) for row in range(0, num_rows, block_rows)]
    self._last_group: tuple[tuple[int, int], Any] | None = None

  def sizes(self) -> np.ndarray:
    return np.array([num_rows for *_, num_rows in self._blocks], np.int64)

  def _open_file(self, path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
      file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as e:
      raise UserError(f'{path} is not a readable Parquet file ({e}): write or copy it again.') from e
    if file.schema_arrow.names.count(self._field) != 1:
      raise UserError(
        f'{path} must have one column {self._field!r}, but has {file.schema_arrow.names}: correct `field`, or the file.'
      )
    return file

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_last_group': None}

  def block_name(self, index: int) -> str:
    file, group, row, num_rows = self._blocks[index]
    return f'{self._paths[file]} row group {group} rows {row}-{row + num_rows}'

  def __getitem__(self, index: int) -> Block:
    file, group, row, num_rows = self._blocks[index]
    if self._last_group is None or self._last_group[0] != (file, group):
      import pyarrow

      path = self._paths[file]
      try:
        with self._open_file(path) as opened:
          column = opened.read_row_group(group, columns=[self._field]).column(0)
      except (pyarrow.ArrowException, OSError) as e:
        raise UserError(f'{self.block_name(index)} cannot be read ({e}): write or copy the file again.') from e
      finally:  # even if nothing was raised: a file that replaced this one may have the row group, too
        check_size_unchanged(path, self._sizes[file])
      self._last_group = ((file, group), column)
    try:
      texts = self._last_group[1].slice(row, num_rows).to_pylist()
    except UnicodeDecodeError as e:
      raise UserError(f'{self.block_name(index)}: column {self._field!r} is not UTF-8: {e}. Convert the file.') from e
    for i, text in enumerate(texts):
      if not isinstance(text, str):
        where = f'{self._paths[file]} row group {group} row {row + i}'
        kind = type(text).__name__
        raise UserError(f'{where}: column {self._field!r} is {kind}, not text: correct `field`, or remove the row.')
    return Block(self.block_name(index), [(text, True) for text in texts])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
  """ArrayRecord files (a glob pattern or several). A record is UTF-8 text, or a JSON object with its text in `field`.

  Each record is a block, so single records are shuffled.
  """

  pattern: str | tuple[str, ...]
  field: str | None = None

  def open(self) -> 'OpenArrayRecord':
    source = OpenArrayRecord(expand_globs(self.pattern, 'ArrayRecord'), self.field)
    return check_not_empty(source, f'the files of {self.pattern!r} have no records: correct the pattern.')


class OpenArrayRecord(OpenFiles):
  """Opened ArrayRecord files. Opening reads the footers."""

  def __init__(self, paths: Sequence[str], field: str | None):
    super().__init__(paths, '')
    self._field = field
    self._readers: list[Any] | None = None
    self._ends = list(itertools.accumulate(map(len, self._open_readers())))  # the end of each file, in records
    # Includes the number of records, because the format pads files to the same sizes.
    self._fingerprint = file_fingerprint(common_root(paths), paths, 'array_record', field, len(self))

  def _open_readers(self) -> list[Any]:
    if self._readers is None:
      with futures.ThreadPoolExecutor(_NUM_OPENING_THREADS) as pool:
        self._readers = list(pool.map(_open_array_record, self._paths, self._sizes))
    return self._readers

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_readers': None}

  def __len__(self) -> int:
    return self._ends[-1]

  def _locate(self, index: int) -> tuple[int, int]:
    """Returns the file of record `index`, and the record's number in the file."""
    file = bisect.bisect_right(self._ends, index)
    return file, index - (self._ends[file - 1] if file else 0)

  def block_name(self, index: int) -> str:
    file, number = self._locate(index)
    return f'record {number} of {self._paths[file]}'

  def __getitem__(self, index: int) -> Block:
    name = self.block_name(index)
    file, number = self._locate(index)
    try:
      record = self._open_readers()[file][number]
    finally:  # even if nothing was raised: records after the end of a truncated file are read as empty
      check_size_unchanged(self._paths[file], self._sizes[file])
    if self._field is not None:
      return Block(name, [(text_field(parse_json(record, name, self._field), self._field, name), True)])
    try:
      return Block(name, [(record.decode('utf-8'), True)])
    except UnicodeDecodeError as e:
      raise UserError(f'{name} is not UTF-8 text ({e}): convert it, or set `field` if the records are JSON.') from e


def _open_array_record(path: str, size: int) -> Any:
  from array_record.python import array_record_data_source  # installed with Grain, except on Windows

  check_size_unchanged(path, size)
  try:
    return array_record_data_source.ArrayRecordDataSource([path])
  except Exception as e:  # it raises bare RuntimeErrors and ValueErrors
    raise UserError(f'{path} cannot be opened as an ArrayRecord file ({e}): write or copy it again.') from e
