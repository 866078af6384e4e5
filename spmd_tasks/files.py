"""Reads and writes the small files of a job atomically and durably, and describes storage errors.

    write_durably(job_log_dir / 'config.json', text)     # replaced as a whole; survives a power failure
    with storage_errors(path):                           # a full disk raises a StorageError, exit code 1
      append(path, line)

A local file is written under a temporary name, flushed to the disk and renamed; then the directory is flushed. In
object stores (`gs://...`, see stores.py) a written object appears only as a whole. A FIFO or a device in place of a
file raises; a plain `open` would block forever.

A job's directory may come from another user, so nothing is written through a link in it: a file that is a link raises,
and so does a file below a directory that links out of the job's directory (`stay_inside`). A file with other hard
links, as `cp -al` creates them, is copied before it is changed.
"""

from collections.abc import Iterator
import contextlib
import errno
import glob
import os
import re
import stat
from typing import IO

from etils import epath

from spmd_tasks import append_objects, stores
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.storage_problems import describe_storage_error


class StorageError(JobError):
  """A file of a running job cannot be read or written; the message states the file, the reason and the remedy."""


def is_remote(path: epath.PathLike) -> bool:
  """Returns whether `path` is in an object store rather than on a mounted file system."""
  return '://' in os.fspath(path)


def absolute_path(path: epath.PathLike) -> epath.Path:
  """Returns a path from the command line as an absolute path, with `~` expanded. Raises a UserError for a bad URL."""
  if re.match(r'[A-Za-z][\w+.-]*://|(gs|s3):', os.fspath(path)):
    stores.check_store(path)
    return epath.Path(os.fspath(path).rstrip('/'))
  with storage_errors('the current directory'):
    expanded = os.path.expanduser(path)
    if expanded.startswith('~'):
      raise UserError(
        f'{expanded}: there is no such home directory: correct the name, set HOME, or write ./{expanded} for a '
        'directory of that name.'
      )
    return epath.Path(expanded).absolute()


def is_missing(path: epath.Path) -> bool:
  """Returns whether a file does not exist; False if that cannot be known, as in another user's private directory."""
  if is_remote(path):
    return not path.exists()
  try:
    os.stat(path)
    return False
  except OSError as error:
    return isinstance(error, FileNotFoundError | NotADirectoryError)


_job_directory: epath.Path | None = None  # set by `stay_inside`


def stay_inside(job_log_dir: epath.Path) -> None:
  """Makes later writes below a job's directory raise an OSError if a link in the path leads out of the directory.

  `job_log_dir` itself and its `checkpoints` may be links, such as to a larger disk.
  """
  global _job_directory
  _job_directory = None if is_remote(job_log_dir) else job_log_dir


def is_inside(path: epath.PathLike, directory: epath.PathLike) -> bool:
  """Returns whether a path is a directory or is below it, with links resolved."""
  real, root = os.path.realpath(path), os.path.realpath(directory)
  return os.path.commonpath((real, root)) == root


def make_directory(path: epath.Path) -> None:
  """Creates a directory and its parents; stores have no directories."""
  if not is_remote(path):
    _refuse_way_out(path)
    path.mkdir(parents=True, exist_ok=True)


def glob_below(directory: epath.Path, pattern: str) -> list[epath.Path]:
  """Returns the paths below a directory that match a pattern, sorted. `epath` would take the directory as a pattern."""
  if is_remote(directory):
    return [epath.Path(url) for url in stores.glob_below(directory, pattern)]
  return [directory / name for name in sorted(glob.glob(pattern, root_dir=directory))]


def sync_path(path: epath.PathLike) -> None:
  """Flushes a local file or directory to the disk; in a store, writes all appended data."""
  if is_remote(path):
    append_objects.flush()
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_durably(path: epath.Path, content: str | bytes, *, survives_power_failure: bool = True) -> None:
  """Replaces the content of a file atomically; text is encoded as UTF-8."""
  data = content.encode() if isinstance(content, str) else content
  if is_remote(path):
    stores.write(path, data)
    return
  _refuse_way_out(path.parent)
  partial = path.parent / f'.{path.name}.partial'
  if os.path.islink(partial) or os.path.isfile(partial):  # left by a killed job, or a stranger's link
    os.unlink(partial)
  with _open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
    try:
      _write_all(descriptor, data)
      if survives_power_failure:
        os.fsync(descriptor)
      os.replace(partial, path)
    except OSError:
      partial.unlink(missing_ok=True)
      raise
  if survives_power_failure:
    sync_path(path.parent)


def append(path: epath.Path, data: bytes) -> None:
  """Appends to a file, which is created if it does not exist. The data survive a kill, but not a power failure.

  In a store the file is kept in parts, which are written about a second later (append_objects.py).
  """
  if is_remote(path):
    append_objects.append(path, data)
    return
  with _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
    is_shared = os.fstat(descriptor).st_nlink > 1
    if not is_shared:
      _write_all(descriptor, data)
  if is_shared:
    write_durably(path, read_bytes(path) + data)


@contextlib.contextmanager
def open_bytes(path: epath.PathLike) -> Iterator[IO[bytes]]:
  """Opens a file for reading. Raises an OSError, also if `path` is a FIFO, a device or a directory."""
  if is_remote(path):
    with epath.Path(path).open('rb') as file:
      yield file
  else:
    with _open(path, os.O_RDONLY) as descriptor, open(descriptor, 'rb', closefd=False) as file:
      yield file


def read_bytes(path: epath.PathLike) -> bytes:
  """Reads a whole file. Raises an OSError, as `open_bytes`."""
  if is_remote(path):
    return stores.read(path)
  with open_bytes(path) as file:
    return file.read()


def read_text(path: epath.PathLike) -> str:
  """Reads a whole UTF-8 file. Raises an OSError, as `open_bytes`, or a UnicodeDecodeError (a ValueError)."""
  return read_bytes(path).decode()


@contextlib.contextmanager
def storage_errors(path: epath.PathLike) -> Iterator[None]:
  """Turns a storage error into a StorageError that names `path`, the reason and the remedy."""
  try:
    yield
  except JobError:
    raise
  except Exception as error:
    problem = describe_storage_error(error, path)
    if problem is None:
      raise
    reason, remedy = problem
    raise StorageError(
      f'{os.fspath(path)} cannot be used: {reason}. Earlier files, every complete checkpoint included, are intact: '
      f'{remedy}, and start the same command again.'
    ) from error


@contextlib.contextmanager
def _open(path: epath.PathLike, flags: int) -> Iterator[int]:
  descriptor = open_descriptor(path, flags)
  try:
    yield descriptor
  finally:
    os.close(descriptor)


def open_descriptor(path: epath.PathLike, flags: int) -> int:
  """Opens a regular file as `os.open` does. Raises an OSError, also if a write would follow a link out of the job."""
  if flags & (os.O_WRONLY | os.O_RDWR):
    _refuse_way_out(os.path.dirname(path))
    if os.path.islink(path):
      raise OSError(errno.ELOOP, 'it is a symbolic link, and jobs do not write through links', os.fspath(path))
    flags |= os.O_NOFOLLOW
  # Without O_NONBLOCK this would block on a FIFO.
  descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
  mode = os.fstat(descriptor).st_mode
  if stat.S_ISREG(mode):
    return descriptor
  os.close(descriptor)
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
  raise OSError(errno.EINVAL, 'Not a regular file', os.fspath(path))


def _refuse_way_out(directory: epath.PathLike) -> None:
  """Raises an OSError if a directory is named below the job's directory, but a link leads out of it."""
  path, root = epath.Path(directory), _job_directory
  if root is None or not path.is_relative_to(root):
    return
  if path.is_relative_to(root / 'checkpoints'):
    root /= 'checkpoints'
  if not is_inside(path, root):
    raise OSError(errno.ELOOP, f'a symbolic link leads out of {root}', os.fspath(directory))


def _write_all(descriptor: int, data: bytes) -> None:
  while data:
    data = data[os.write(descriptor, data) :]
