"""Sources in files that a user names: text, JSON lines, Parquet and ArrayRecord. text.py defines sources and blocks."""

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
  ListedFile,
  OpenFiles,
  OpenTextFiles,
  byte_sizes,
  changed_file,
  cut_files,
  file_fingerprint,
  in_split,
)

OpenSourceT = TypeVar('OpenSourceT', bound=Sized)

_MAX_LINE_BYTES, _PART_BYTES = 1 << 30, 1 << 20
_SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # a half of a character beyond 16 bits
_NUM_OPENING_THREADS = 64  # as many ArrayRecord files are opened at a time


def expand_globs(patterns: str | Sequence[str], kind: str) -> list[str]:
  """The files that glob patterns match, sorted. Raises a UserError: one matches nothing, or what may not be read."""
  patterns = [patterns] if isinstance(patterns, str) else list(patterns)
  if not patterns:
    raise UserError(f'no {kind} files are named: give a path or a glob pattern.')
  files = set()
  for pattern in patterns:
    pattern = os.path.expanduser(pattern)
    if is_remote(pattern):
      from spmd_tasks.stores import local_copies

      found = local_copies(pattern)
    else:
      # A file whose own name has the characters of a pattern is meant itself.
      found = [path for path in (glob.glob(pattern, recursive=True) or [pattern]) if os.path.isfile(path)]
    if not found:
      folder = next(filter(os.path.isdir, map(str, Path(pattern).absolute().parents)))
      if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f'{folder} may not be entered by this user: give the right (chmod), or correct the path.')
      for path in glob.glob(pattern, recursive=True) or [pattern]:
        if os.path.lexists(path):
          is_what = 'a directory' if os.path.isdir(path) else 'a link to nothing' if os.path.islink(path) else 'no file'
          raise UserError(f'{path!r} is {is_what}: name the {kind} files themselves, or a pattern such as DIRECTORY/*.')
      raise UserError(
        f'no {kind} file matches {pattern!r} (current directory {os.getcwd()}): correct the path or the pattern.'
      )
    files.update(found)
  if denied := [path for path in sorted(files) if not os.access(path, os.R_OK)]:
    raise UserError(
      f'{denied[0]} may not be read by this user: give the right (chmod), or leave it out of the pattern.'
    )
  return sorted(files)


def common_root(paths: Sequence[str]) -> str:
  """The directory that all files lie in."""
  return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])


def not_empty(source: OpenSourceT, why: str) -> OpenSourceT:
  """Returns an opened source. Raises a UserError, `why`, if it has no block."""
  if len(source) == 0:
    raise UserError(why)
  return source


def refuse_changed_size(path: str, size: int) -> None:
  """Raises a JobError if a file does not have the `size` that it had when its source was opened."""
  if (now := os.path.getsize(path)) != size:
    raise changed_file(path, size, f'has {now} bytes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
  """UTF-8 text files, one document each: a glob pattern (`**` for any directories), or several.

  `split` 'train' and 'valid' divide the files by a hash of their path below the common directory: about
  `valid_fraction` of them are 'valid'.
  """

  pattern: str | tuple[str, ...]
  split: str = 'all'
  valid_fraction: float = 0.05
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> OpenTextFiles:
    paths = expand_globs(self.pattern, 'text')
    root = common_root(paths)
    chosen = [p for p in paths if in_split(os.path.relpath(p, root), self.split, self.valid_fraction)]
    source = OpenTextFiles(chosen, self.block_bytes, file_fingerprint(root, chosen, 'text', self.block_bytes))
    why = (
      f'the {len(paths)} files of {self.pattern!r} have no text in split {self.split!r} (valid_fraction '
      f'{self.valid_fraction}): name more files, or set valid_fraction nearer to 0.5, or split to "all".'
    )
    return not_empty(source, why)


def text_field(record: Any, field: str, where: str) -> str:
  """The text in one field of a record. Raises a UserError that begins with `where` if the field has no text."""
  if not isinstance(record, dict):
    raise UserError(f'{where} is of type {type(record).__name__}: it must be a JSON object with a field {field!r}.')
  if field not in record:
    raise UserError(f'{where} has no field {field!r}, only {sorted(record)[:20]}: correct `field`.')
  if not isinstance(record[field], str):
    kind = type(record[field]).__name__
    raise UserError(f'{where} has a field {field!r} of type {kind}: it must be text; correct `field` or the record.')
  return record[field]


def parse_json(data: bytes, where: str, field: str | None = None) -> Any:
  """Parses one JSON record, of which `field`, or else all, is read; an error names its place, `where`."""
  try:
    record = json.loads(data.decode('utf-8-sig'))
    if _SURROGATE.search(data):
      read = record if field is None or not isinstance(record, dict) else record.get(field)
      json.dumps(read, ensure_ascii=False).encode()  # raises where a half of a character stands alone
    return record
  except json.JSONDecodeError as e:
    raise UserError(f'{where} is not JSON: {e.msg} at character {e.pos + 1}. Repair or remove the record.') from e
  except (ValueError, RecursionError) as e:  # bad UTF-8, or a value nested too deeply
    raise UserError(
      f'{where} is not JSON in UTF-8: {e}. Repair or remove the record, or convert the file if it is of another kind '
      '(compressed, UTF-16, ...).'
    ) from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines:
  """JSON lines files (a glob pattern or several): one object per line, its text in `field`. Blank lines are skipped.

  Blocks of about `block_bytes` are shuffled; a smaller value shuffles more finely.
  """

  pattern: str | tuple[str, ...]
  field: str = 'text'
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> 'OpenJsonLines':
    source = OpenJsonLines(expand_globs(self.pattern, 'JSON lines'), self.field, self.block_bytes)
    return not_empty(source, f'the files of {self.pattern!r} are empty.')


class OpenJsonLines(OpenFiles):
  """Opened JSON lines files: a block holds the lines whose first byte lies in its byte range."""

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
    with ListedFile(path, size) as f:
      # The line that began in the block before; where it goes on behind this block, its rest is not read here.
      position = start and start - 1 + len(f.read(start - 1, end, to_line_end=True))
      while position < end:
        line = f.read(position, position + _MAX_LINE_BYTES, to_line_end=True)
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b'\n'):
          raise UserError(f'{path}: the line at byte {position} has more than {_MAX_LINE_BYTES:,} bytes: divide it.')
        if line.strip():
          try:
            documents.append((text_field(parse_json(line, 'it', self._field), self._field, 'it'), True))
          except ValueError as e:
            # Counting lines means reading the file from its start: only for the message.
            parts = (f.read(at, min(at + _PART_BYTES, position)) for at in range(0, position, _PART_BYTES))
            number = 1 + sum(part.count(b'\n') for part in parts)
            raise UserError(f'{path}:{number}: {e}') from e
        position += len(line)
    return Block(self.block_name(index), documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet:
  """Parquet files (a glob pattern or several) with the text in column `field`; `block_rows` rows are a block."""

  pattern: str | tuple[str, ...]
  field: str = 'text'
  block_rows: int = 256

  def open(self) -> 'OpenParquet':
    require('parquet', 'pyarrow', wants=f'the input {self.pattern!r}')
    source = OpenParquet(expand_globs(self.pattern, 'Parquet'), self.field, self.block_rows)
    return not_empty(source, f'the files of {self.pattern!r} have no rows.')


class OpenParquet(OpenFiles):
  """Opened Parquet files. Opening reads the footers; reading a block decodes its row group and keeps the last one."""

  def __init__(self, paths: Sequence[str], field: str, block_rows: int):
    if block_rows < 1:
      raise UserError(f'block_rows {block_rows} must be at least 1.')
    super().__init__(paths, file_fingerprint(common_root(paths), paths, 'parquet', field, block_rows))
    self._field = field  # and blocks are (file, row group, first row in it, rows)
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
      raise UserError(f'{path} is not a readable Parquet file ({e}): write or copy it anew.') from e
    if (number := file.schema_arrow.names.count(self._field)) != 1:
      had = f'{number} columns {self._field!r}' if number else f'no column {self._field!r}'
      raise UserError(f'{path} has {had} (it has {file.schema_arrow.names}): correct `field`, or the file.')
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
        raise UserError(f'{self.block_name(index)} cannot be read ({e}): write or copy the file anew.') from e
      finally:  # also if nothing was raised: another file may have a row group of this number
        refuse_changed_size(path, self._sizes[file])
      self._last_group = ((file, group), column)
    try:
      texts = self._last_group[1].slice(row, num_rows).to_pylist()
    except UnicodeDecodeError as e:
      raise UserError(f'{self.block_name(index)}: column {self._field!r} is not UTF-8: {e}. Convert the file.') from e
    for i, text in enumerate(texts):
      if not isinstance(text, str):
        where = f'{self._paths[file]} row group {group} row {row + i}'
        kind = type(text).__name__
        raise UserError(f'{where}: column {self._field!r} is {kind}, not text: correct `field`, or remove such rows.')
    return Block(self.block_name(index), [(text, True) for text in texts])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
  """ArrayRecord files (a glob pattern or several); a record is UTF-8 text, or a JSON object with its text in `field`.

  A record is a block, so shuffling is by record.
  """

  pattern: str | tuple[str, ...]
  field: str | None = None

  def open(self) -> 'OpenArrayRecord':
    source = OpenArrayRecord(expand_globs(self.pattern, 'ArrayRecord'), self.field)
    return not_empty(source, f'the files of {self.pattern!r} have no records.')


class OpenArrayRecord(OpenFiles):
  """Opened ArrayRecord files. Opening reads the footers."""

  def __init__(self, paths: Sequence[str], field: str | None):
    super().__init__(paths, '')
    self._field = field
    self._readers: list[Any] | None = None
    self._ends = list(itertools.accumulate(map(len, self._open_readers())))  # of each file's records
    # The format pads files to whole blocks: their sizes say little.
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

  def _place(self, index: int) -> tuple[int, int]:
    """The file of record `index`, and the record's number in it."""
    file = bisect.bisect_right(self._ends, index)
    return file, index - (self._ends[file - 1] if file else 0)

  def block_name(self, index: int) -> str:
    file, number = self._place(index)
    return f'record {number} of {self._paths[file]}'

  def __getitem__(self, index: int) -> Block:
    name = self.block_name(index)
    file, number = self._place(index)
    try:
      record = self._open_readers()[file][number]
    finally:  # also if nothing was raised: behind the end of a file that was cut, records read as empty
      refuse_changed_size(self._paths[file], self._sizes[file])
    if self._field is not None:
      return Block(name, [(text_field(parse_json(record, name, self._field), self._field, name), True)])
    try:
      return Block(name, [(record.decode('utf-8'), True)])
    except UnicodeDecodeError as e:
      raise UserError(f'{name} is not UTF-8 text ({e}). If it is JSON, name the `field` that holds the text.') from e


def _open_array_record(path: str, size: int) -> Any:
  from array_record.python import array_record_data_source  # grain brings it

  refuse_changed_size(path, size)
  try:
    return array_record_data_source.ArrayRecordDataSource([path])
  except Exception as e:  # it raises bare RuntimeErrors and ValueErrors
    raise UserError(f'{path} cannot be opened as an ArrayRecord file: {e}') from e
