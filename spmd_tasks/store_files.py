"""Reads and replaces appended files (append_objects.py), and copies folders, on a disk or in a store."""

from collections.abc import Iterator
import contextlib
import io
import os
from pathlib import Path
import threading
import time

from absl import logging
from etils import epath

from spmd_tasks import append_objects, stores
from spmd_tasks.files import absolute_path, append, is_remote, read_bytes, write_durably

_MIRROR_PERIOD_S, _LAST_UPLOAD_S = 2.0, 30.0


def read_appended(path: epath.Path) -> bytes:
  """Reads a whole file that `append` of files.py has written. Raises OSError as `read_bytes`."""
  return append_objects.read(path) if is_remote(path) else read_bytes(path)


def replace_appended(path: epath.Path, data: bytes) -> None:
  """Replaces the content of a file; `append` then adds to it."""
  if is_remote(path):
    append_objects.replace(path, data)
  else:
    write_durably(path, data)


def local_folder(path: epath.PathLike) -> epath.Path:
  """Returns the absolute path of a folder or file, for a URL the path of a copy on this disk."""
  return epath.Path(stores.local_folder(os.fspath(path))) if is_remote(path) else absolute_path(path)


def place_to_read(path: epath.PathLike) -> epath.Path:
  """Returns the absolute path of a folder or file, for a hub URL the path of a copy on this disk."""
  return local_folder(path) if os.fspath(path).startswith('hf://') else absolute_path(path)


@contextlib.contextmanager
def mirror(url: epath.Path, *, uploads: bool) -> Iterator[epath.Path]:
  """Copies a folder of a store to a directory of this disk; with `uploads`, uploads the files that only the disk has.

  Files that are added later are uploaded in the background, seconds after they stop growing, and at the end. Without
  `uploads`, files that the store does not have are deleted. A store that cannot be read or written is a warning.
  """
  directory = Path(stores.local_path(os.fspath(url)))
  directory.mkdir(parents=True, exist_ok=True)
  known: set[str] = set()
  try:
    known |= {os.path.basename(path) for path in stores.local_copies(os.fspath(url))}
    if not uploads:
      for path in directory.iterdir():
        if path.is_file() and path.name not in known and not path.name.endswith('.partial'):
          path.unlink(missing_ok=True)
  except Exception as error:  # of the store's client
    logging.warning('%s cannot be read, only its copy in %s: %s', url, directory, error)
  if not uploads:
    yield epath.Path(directory)
    return
  _upload_new(directory, url, known, settled_s=_MIRROR_PERIOD_S)
  is_over = threading.Event()

  def upload() -> None:
    while not is_over.wait(_MIRROR_PERIOD_S):
      _upload_new(directory, url, known, settled_s=_MIRROR_PERIOD_S)
    _upload_new(directory, url, known, settled_s=0.0)

  thread = threading.Thread(target=upload, name='mirror', daemon=True)
  thread.start()
  try:
    yield epath.Path(directory)
  finally:
    is_over.set()
    thread.join(_LAST_UPLOAD_S)


def _upload_new(directory: Path, url: epath.Path, known: set[str], *, settled_s: float) -> None:
  """Uploads files that have not changed for `settled_s` seconds, and adds their names to `known`."""
  try:
    for path in directory.iterdir():
      is_new = path.is_file() and path.name not in known and not path.name.endswith('.partial')
      if not is_new or time.time() - path.stat().st_mtime < settled_s:
        continue
      stores.create(url / path.name, path.read_bytes())
      known.add(path.name)
  except FileNotFoundError:  # another process has just renamed its partial copy
    pass
  except Exception as error:
    warning = 'new files in %s cannot be uploaded to %s yet: %s'
    logging.log_first_n(logging.WARNING, warning, 1, directory, url, error)


class GrowingFile(io.BytesIO):
  """A file in a store: `flush` appends the data written since the last flush."""

  def __init__(self, path: epath.Path):
    super().__init__()
    self._path = path

  def flush(self) -> None:
    if data := self.getvalue():
      append(self._path, data)
      self.seek(0)
      self.truncate()

  def close(self) -> None:
    if not self.closed:
      self.flush()
      append_objects.flush()
    super().close()
