"""Reads and replaces appended files (append_objects.py), and copies folders, on a disk or in a store."""

import io
import os
import threading
import time

from absl import logging
from etils import epath

from spmd_tasks import append_objects, stores
from spmd_tasks.files import absolute_path, append, is_remote, read_bytes, write_durably

_MIRROR_PERIOD_S = 2.0


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


def mirror(url: epath.Path) -> epath.Path:
  """Copies a folder of a store to a directory of this disk, and uploads files that are added there later.

  Files are uploaded in the background, seconds after they stop growing, unless the process ends sooner.
  """
  known = {os.path.basename(path) for path in stores.local_copies(os.fspath(url))}
  directory = epath.Path(stores.local_path(os.fspath(url)))
  directory.mkdir(parents=True, exist_ok=True)
  threading.Thread(target=_add_new, args=(directory, url, known), name='mirror', daemon=True).start()
  return directory


def _add_new(directory: epath.Path, url: epath.Path, known: set[str]) -> None:
  sizes: dict[str, int] = {}
  while True:
    time.sleep(_MIRROR_PERIOD_S)
    try:
      before, sizes = sizes, {entry.name: entry.stat().st_size for entry in os.scandir(directory)}
      for name in sizes.keys() - known:
        if sizes[name] == before.get(name) and not name.endswith('.partial'):
          stores.create(url / name, (directory / name).read_bytes())
          known.add(name)
    except FileNotFoundError:  # another process has just renamed its partial copy
      pass
    except OSError as error:
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
