"""Sources of documents with random access, such as the source code of the Python standard library.

A TextSource is a frozen dataclass; its `open()` lists the files and reads none of them. An opened source is a sequence
of *blocks*: neighbouring documents, or a piece of one long document. Shuffling permutes blocks and restoring a position
reads one block again, so blocks are small. They are cut by byte position, so that no file is scanned before the start.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import os
import platform
import sysconfig
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from spmd_tasks.errors import JobError, UserError

DEFAULT_BLOCK_BYTES = 1 << 16
_MIN_BLOCK_BYTES = 16  # longer than any one character

# A long text is cut at the first line end within this many bytes after the nominal place, or else between characters.
_CUT_WINDOW = 4096

# Directories of the standard library whose content differs between builds of one Python version, or is not its source.
_STDLIB_SKIPPED = frozenset(
  {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'ensurepip'}
)


@dataclasses.dataclass(frozen=True)
class Block:
  """One block: (text, is_end) pairs, where is_end is False if the text continues in another block.

  In place of a text may be what the input's encoder reads: a record (tuning/record_files.py).
  """

  name: str
  documents: Sequence[tuple[Any, bool]]


@runtime_checkable
class OpenSource(Protocol):
  """A sequence of blocks. Picklable, because worker processes read it too."""

  def __len__(self) -> int: ...
  def __getitem__(self, index: int) -> Block: ...
  def block_name(self, index: int) -> str:
    """The place of block `index`, for messages; reads nothing."""

  def fingerprint(self) -> str:
    """A digest that changes when the blocks change."""

  # A method `sizes()`, if any, returns numbers [len(self)] to which the tokens of the blocks are about in proportion.
  # Without it, or where it returns None, they count as equal.


@runtime_checkable
class TextSource(Protocol):
  """A source of texts: frozen fields, from which it is opened."""

  def open(self) -> OpenSource: ...


def file_fingerprint(root: str, paths: Sequence[str], *settings: object) -> str:
  """Digests relative paths, sizes and `settings`. Does not read contents; the root may move."""
  digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
  for path in paths:
    digest.update(f'{os.path.relpath(path, root)}\0{os.path.getsize(path)}\0'.encode(errors='surrogateescape'))
  return digest.hexdigest()


def cut_files(sizes: Sequence[int], block_bytes: int) -> list[tuple[int, int, int]]:
  """(file, start, end) nominal byte ranges of at most `block_bytes`; an empty file has none."""
  if block_bytes < _MIN_BLOCK_BYTES:
    raise UserError(f'block_bytes {block_bytes} must be at least {_MIN_BLOCK_BYTES}; default {DEFAULT_BLOCK_BYTES}.')
  return [
    (i, start, min(start + block_bytes, size)) for i, size in enumerate(sizes) for start in range(0, size, block_bytes)
  ]


def byte_sizes(blocks: Sequence[tuple[int, int, int]]) -> np.ndarray:
  """The sizes of (file, start, end) ranges, int64 [len(blocks)]."""
  return np.array([end - start for _, start, end in blocks], np.int64)


class ListedFile:
  """A file of which as many bytes are read as it had when its source was opened: a context manager.

  Every method raises a JobError that names the file if it has become shorter: its blocks would hold other text.
  """

  def __init__(self, path: str, size: int):
    self._path = path
    self._size = size

  def __enter__(self) -> 'ListedFile':
    self._file: BinaryIO = open(self._path, 'rb')
    if (now := os.fstat(self._file.fileno()).st_size) < self._size:
      self._file.close()
      raise self._is_shorter(now, self._size)
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._file.close()

  def read(self, start: int, end: int, *, to_line_end: bool = False) -> bytes:
    """The bytes [start, end), up to the file's size; or only those of the line that goes on at `start`."""
    end = min(end, self._size)
    self._file.seek(start)
    data = (self._file.readline if to_line_end else self._file.read)(max(end - start, 0))
    if start + len(data) < end and not (to_line_end and data.endswith(b'\n')):
      raise self._is_shorter(start + len(data), end)
    return data

  def _is_shorter(self, found: int, needed: int) -> JobError:
    return changed_file(self._path, self._size, f'ends at byte {found}, before byte {needed}')


def changed_file(path: str, size: int, now: str) -> JobError:
  """Returns the error of a file that is not what it was when its source was opened, of `size` bytes."""
  return JobError(
    f'{path} {now}, but it had {size} bytes when the job opened it: it was cut or replaced while the job reads it. Put '
    'the same file back, and start the same command again.'
  )


def in_split(name: str, split: str, valid_fraction: float) -> bool:
  """Whether a file belongs to `split` ('all', 'train' or 'valid'), by a hash of its name: equal on every machine.

  Raises a UserError: `split` is unknown, or valid_fraction is not in (0, 1).
  """
  if split not in ('all', 'train', 'valid') or not 0 < valid_fraction < 1:
    raise UserError(
      f"split {split!r} must be 'all', 'train' or 'valid', and valid_fraction {valid_fraction} must be in (0, 1)."
    )
  if split == 'all':
    return True
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  return (int.from_bytes(digest, 'big') / 2**64 < valid_fraction) == (split == 'valid')


class OpenFiles:
  """Base of opened files. A block is (number of the file, first byte, end), or what else its class makes of it."""

  def __init__(self, paths: Sequence[str], fingerprint: str):
    self._paths = list(paths)
    self._sizes = [os.path.getsize(path) for path in self._paths]
    self._blocks: list[Any] = []
    self._fingerprint = fingerprint

  def __len__(self) -> int:
    return len(self._blocks)

  def block_name(self, index: int) -> str:
    file, start, end = self._blocks[index]
    return f'{self._paths[file]} bytes {start}-{end}'

  def fingerprint(self) -> str:
    return self._fingerprint

  def sizes(self) -> np.ndarray | None:
    """The sizes of the blocks, int64 [len(self)]; here None, equal ones."""
    return None


class OpenTextFiles(OpenFiles):
  """Opened text files: each file is one document, in one or more blocks."""

  def __init__(self, paths: Sequence[str], block_bytes: int, fingerprint: str, errors: str = 'strict'):
    super().__init__(paths, fingerprint)
    self._blocks = cut_files(self._sizes, block_bytes)
    self._window = min(_CUT_WINDOW, block_bytes)
    self._errors = errors

  def sizes(self) -> np.ndarray:
    return byte_sizes(self._blocks)

  def __getitem__(self, index: int) -> Block:
    file, start, end = self._blocks[index]
    path, size = self._paths[file], self._sizes[file]
    with ListedFile(path, size) as f:
      begin, stop = self._cut(f, start, size), self._cut(f, end, size)
      data = f.read(begin, stop)
    try:
      text = data.decode('utf-8', errors=self._errors)
    except UnicodeDecodeError as e:
      raise UserError(
        f'{path} is not UTF-8 text: byte {begin + e.start} is {data[e.start : e.start + 1]!r} ({e.reason}). Convert '
        'the file, or leave it out of the pattern.'
      ) from e
    return Block(self.block_name(index), [(text, stop == size)] if text else [])

  def _cut(self, f: ListedFile, nominal: int, size: int) -> int:
    """The byte where the text is cut: a function of the file and `nominal` alone, so that both neighbours agree."""
    if nominal == 0 or nominal >= size:
      return nominal
    window = f.read(nominal - 1, nominal - 1 + self._window)
    if (line_end := window.find(b'\n')) >= 0:
      return nominal + line_end
    continued = 0  # of the bytes from `nominal` on, how many belong to a character that began before
    while continued + 1 < len(window) and window[continued + 1] & 0xC0 == 0x80:
      continued += 1
    return nominal + continued


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibText:
  """The source code of the running Python's standard library: 12 MB of text on every machine, without a download.

  A hash of a module's path assigns the module to 'train' or 'valid', equally in every run and on every host. Another
  Python version has other modules, so a saved position of another version is refused.
  """

  split: str = 'train'
  valid_fraction: float = 0.05
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> OpenTextFiles:
    root = sysconfig.get_path('stdlib')
    names = []
    for directory, inner, files in os.walk(root):
      inner[:] = [name for name in inner if name not in _STDLIB_SKIPPED and not name.startswith('config-')]
      # Files such as _sysconfigdata_*.py record how this Python was built.
      own = [name for name in files if name.endswith('.py') and not name.startswith('_sysconfigdata')]
      names += [os.path.relpath(os.path.join(directory, name), root) for name in own]
    paths = [os.path.join(root, name) for name in sorted(names) if in_split(name, self.split, self.valid_fraction)]
    if not paths:
      raise UserError(
        f'the standard library of this Python, {root}, has no .py files (it may be a zip archive): use TextFiles.'
      )
    fingerprint = file_fingerprint(root, paths, 'stdlib', platform.python_version(), self.block_bytes)
    return OpenTextFiles(paths, self.block_bytes, fingerprint, errors='replace')
