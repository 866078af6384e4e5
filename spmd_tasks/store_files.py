"""Files on a disk or in a store: those that files.py's `append` has written (append_objects.py), and whole folders."""

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
  """Reads a whole file. Raises OSError as `read_bytes`."""
  return append_objects.read(path) if is_remote(path) else read_bytes(path)


def replace_appended(path: epath.Path, data: bytes) -> None:
  """Gives a file another content, which `append` goes on from."""
  if is_remote(path):
    append_objects.replace(path, data)
  else:
    write_durably(path, data)


def local_folder(path: epath.PathLike) -> epath.Path:
  """Returns `absolute_path` of a folder or file, or, of a URL, that of a copy on this disk."""
  return epath.Path(stores.local_folder(os.fspath(path))) if is_remote(path) else absolute_path(path)


def place_to_read(path: epath.PathLike) -> epath.Path:
  """Returns `absolute_path`, or, of what is on the hub, `local_folder`."""
  return local_folder(path) if os.fspath(path).startswith('hf://') else absolute_path(path)


def mirror(url: epath.Path) -> epath.Path:
  """Returns a directory of this disk with all files of a folder in a store, to which new ones there are added.

  That is done in the background, seconds after a file has stopped growing; a process that ends sooner adds nothing.
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
    except FileNotFoundError:  # a copy that another process makes has just got its name
      pass
    except OSError as error:
      warning = 'new files of %s are not added to %s, which is tried again: %s'
      logging.log_first_n(logging.WARNING, warning, 1, directory, url, error)


class GrowingFile(io.BytesIO):
  """A file in a store: `flush` appends what was written since the last one."""

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
