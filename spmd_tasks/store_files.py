"""Files on a disk or in a store: those that files.py's `append` has written (growing_objects.py), and whole folders."""

import io
import os

from etils import epath

from spmd_tasks import growing_objects, stores
from spmd_tasks.files import absolute_path, append, is_remote, read_bytes, write_durably


def read_growing(path: epath.Path) -> bytes:
  """Reads a whole file. Raises OSError as `read_bytes`."""
  return growing_objects.read(path) if is_remote(path) else read_bytes(path)


def replace_growing(path: epath.Path, data: bytes) -> None:
  """Gives a file another content, which `append` goes on from."""
  if is_remote(path):
    growing_objects.replace(path, data)
  else:
    write_durably(path, data)


def local_folder(path: epath.PathLike) -> epath.Path:
  """Returns `absolute_path` of a folder or file, or, of a URL, that of a copy on this disk."""
  return epath.Path(stores.local_folder(os.fspath(path))) if is_remote(path) else absolute_path(path)


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
      growing_objects.flush()
    super().close()
