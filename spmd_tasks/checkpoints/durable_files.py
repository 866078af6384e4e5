"""Writes small files atomically and durably.

A local file is written beside its final name, flushed to the disk and renamed over it; the rename is flushed with the
directory. Object stores (`gs://...`, through `etils.epath`) make a written object visible only as a whole.
"""

import os

from etils import epath


def is_remote(path: epath.Path) -> bool:
  """Whether `path` is in an object store rather than on a mounted file system (no locks, no fsync)."""
  return '://' in os.fspath(path)


def absolute_path(path: str) -> epath.Path:
  """Makes a path from the command line absolute; expands `~`."""
  expanded = epath.Path(path).expanduser()
  return expanded if is_remote(expanded) else expanded.absolute()


def sync_path(path: epath.Path) -> None:
  """Flushes a local file's content, or a local directory's names, to the disk; does nothing for a remote path."""
  if is_remote(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_durably(path: epath.Path, text: str) -> None:
  """Replaces `path` by a file with `text` (UTF-8), atomically; afterwards the file survives a power failure."""
  if is_remote(path):
    path.write_text(text)
    return
  partial = path.parent / f'.{path.name}.partial'
  try:
    with open(partial, 'wb') as file:
      file.write(text.encode())
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except OSError:
    partial.unlink(missing_ok=True)
    raise
  sync_path(path.parent)
