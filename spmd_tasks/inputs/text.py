"""Sources of documents with random access, such as the source code of the Python standard library.

A TextSource is a frozen dataclass whose `open()` lists files without reading them. An opened source is a sequence of
*blocks*: neighboring documents, or a piece of one long document. Shuffling permutes blocks, and a restore reads one
block again, so blocks are small. Files are divided by byte position, so that none is scanned before the start.
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
_MIN_BLOCK_BYTES = 16  # longer than any character

# A long text is cut at the first line end within this many bytes after the nominal offset, or else between characters.
_CUT_WINDOW = 4096

# Directories whose content differs between builds of one Python version, or is not source of the standard library.
_STDLIB_SKIPPED = frozenset(
  {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'ensurepip'}
)


@dataclasses.dataclass(frozen=True)
class Block:
  """(text, is_end) pairs of neighboring documents; `is_end` is False if the text continues in another block.

  Sources for other encoders than TextEncoder yield other documents than text, such as records.
  """

  name: str
  documents: Sequence[tuple[Any, bool]]


@runtime_checkable
class OpenSource(Protocol):
  """A sequence of blocks. Picklable, because worker processes read it too."""

  def __len__(self) -> int: ...
  def __getitem__(self, index: int) -> Block: ...
  def block_name(self, index: int) -> str:
    """Returns the file and range of a block, for messages; reads nothing."""

  def fingerprint(self) -> str:
    """Returns a digest that changes when the blocks change."""

  # An optional method `sizes()` returns numbers [len(self)] that are roughly proportional to the tokens of each block.
  # Without it, or if it returns None, all blocks count as equal.


@runtime_checkable
class TextSource(Protocol):
  """A frozen dataclass that opens a source of texts."""

  def open(self) -> OpenSource: ...


def file_fingerprint(root: str, paths: Sequence[str], *settings: object) -> str:
  """Returns a digest of relative paths, sizes and `settings`, without reading contents; the root may move."""
  digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
  for path in paths:
    digest.update(f'{os.path.relpath(path, root)}\0{os.path.getsize(path)}\0'.encode(errors='surrogateescape'))
  return digest.hexdigest()


def cut_files(sizes: Sequence[int], block_bytes: int) -> list[tuple[int, int, int]]:
  """Returns (file, start, end) nominal byte ranges of at most `block_bytes`; an empty file has none."""
  if block_bytes < _MIN_BLOCK_BYTES:
    raise UserError(f'block_bytes {block_bytes} must be at least {_MIN_BLOCK_BYTES}.')
  return [
    (i, start, min(start + block_bytes, size)) for i, size in enumerate(sizes) for start in range(0, size, block_bytes)
  ]


def byte_sizes(blocks: Sequence[tuple[int, int, int]]) -> np.ndarray:
  """Returns the sizes of (file, start, end) ranges, int64 [len(blocks)]."""
  return np.array([end - start for _, start, end in blocks], np.int64)


class FixedSizeFile:
  """Opens a file for reading its first `size` bytes, as many as it had when its source was opened.

  Every method raises a JobError that names the file if it has become shorter, because its blocks would then differ.
  """

  def __init__(self, path: str, size: int):
    self._path = path
    self._size = size

  def __enter__(self) -> 'FixedSizeFile':
    self._file: BinaryIO = open(self._path, 'rb')
    if (now := os.fstat(self._file.fileno()).st_size) < self._size:
      self._file.close()
      raise self._truncated_error(now, self._size)
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._file.close()

  def read(self, start: int, end: int, *, to_line_end: bool = False) -> bytes:
    """Returns the bytes [start, end), up to the file's size; with `to_line_end`, only to the end of the line."""
    end = min(end, self._size)
    self._file.seek(start)
    data = (self._file.readline if to_line_end else self._file.read)(max(end - start, 0))
    if start + len(data) < end and not (to_line_end and data.endswith(b'\n')):
      raise self._truncated_error(start + len(data), end)
    return data

  def _truncated_error(self, end: int, needed: int) -> JobError:
    return changed_file_error(self._path, self._size, f'ends at byte {end}, before byte {needed}')


def changed_file_error(path: str, size: int, now: str) -> JobError:
  """Returns the error for a file that had `size` bytes when its source was opened; `now` says what it has now."""
  return JobError(
    f'{path} {now}, but had {size} bytes when the job opened it: put the same file back, and run the command again.'
  )


def in_split(name: str, split: str, valid_fraction: float) -> bool:
  """Whether a file belongs to `split` ('all', 'train' or 'valid'), by a hash of its name, equal on all machines."""
  if split not in ('all', 'train', 'valid') or not 0 < valid_fraction < 1:
    raise UserError(
      f"split {split!r} must be 'all', 'train' or 'valid', and valid_fraction {valid_fraction} must be in (0, 1)."
    )
  if split == 'all':
    return True
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  return (int.from_bytes(digest, 'big') / 2**64 < valid_fraction) == (split == 'valid')


class OpenFiles:
  """Base class of opened files. A block is (index of the file, start byte, end byte), or defined by the subclass."""

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
    """Returns the sizes of the blocks, int64 [len(self)]; None if all count as equal."""
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
    with FixedSizeFile(path, size) as f:
      begin, stop = self._cut(f, start, size), self._cut(f, end, size)
      data = f.read(begin, stop)
    try:
      text = data.decode('utf-8', errors=self._errors)
    except UnicodeDecodeError as e:
      raise UserError(
        f'{path} is not UTF-8 text: byte {begin + e.start} is {data[e.start : e.start + 1]!r} ({e.reason}). Convert '
        'the file, or exclude it from the pattern.'
      ) from e
    return Block(self.block_name(index), [(text, stop == size)] if text else [])

  def _cut(self, f: FixedSizeFile, nominal: int, size: int) -> int:
    """Returns the byte at which the text is cut; it depends only on the file and `nominal`, so both neighbors agree."""
    if nominal == 0 or nominal >= size:
      return nominal
    window = f.read(nominal - 1, nominal - 1 + self._window)
    if (line_end := window.find(b'\n')) >= 0:
      return nominal + line_end
    continued = 0  # how many bytes from `nominal` on belong to a character that begins before
    while continued + 1 < len(window) and window[continued + 1] & 0xC0 == 0x80:
      continued += 1
    return nominal + continued


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibText:
  """The source code of Python's own standard library: 12 MB of text on every machine, without a download.

  A hash of a module's path assigns the module to 'train' or 'valid', the same on every host. The text depends on the
  Python version, so a position that another version saved is refused.
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
      raise UserError(f'the standard library of this Python, {root}, has no .py files: use TextFiles.')
    fingerprint = file_fingerprint(root, paths, 'stdlib', platform.python_version(), self.block_bytes)
    return OpenTextFiles(paths, self.block_bytes, fingerprint, errors='replace')
