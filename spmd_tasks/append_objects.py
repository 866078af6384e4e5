"""Appends to files in an object store.

Objects cannot be appended to, so a file is kept as a list of parts, `metrics.jsonl.<time>_<number>`. Appending replaces
the newest part. A background thread does so at most once a second, which is Google's limit for one object. A kill loses
the lines of the last second; `flush` writes them, and is called before a checkpoint is published.
"""

from concurrent.futures import ThreadPoolExecutor
import errno
import glob
import os
import re
import threading
import time

from etils import epath

from spmd_tasks import stores

_PART_BYTES = 1 << 18
_PERIOD_S = 1.0


class _Part:
  """The newest part of a file; each process writes its own parts."""

  def __init__(self, name: str):
    self.prefix, self.number, self.written, self.pending = f'{name}.{time.time_ns():020d}', 0, b'', b''


class _Writer:
  """Writes the appended data of all files in the background."""

  def __init__(self) -> None:
    self._parts: dict[str, _Part] = {}
    self._lock, self._writing = threading.Lock(), threading.Lock()
    self._timer: threading.Timer | None = None
    self._error: Exception | None = None
    self._last_flush_s = 0.0

  def append(self, path: epath.PathLike, data: bytes) -> None:
    """Appends `data` to a file within about a second; raises the error of an earlier write."""
    with self._lock:
      self._parts.setdefault(name := os.fspath(path), _Part(name)).pending += data
      error, self._error = self._error, None
      if self._timer is None:
        delay_s = max(0.0, self._last_flush_s + _PERIOD_S - time.monotonic())
        self._timer = threading.Timer(delay_s, self._flush_in_background)
        self._timer.daemon = True
        self._timer.start()
    if error is not None:
      raise error

  def flush(self) -> None:
    """Writes all appended data. Raises OSError."""
    with self._writing:
      with self._lock:
        self._timer, self._last_flush_s = None, time.monotonic()
        pending = [(part, part.pending) for part in self._parts.values() if part.pending]
      for part, data in pending:
        if len(part.written) > _PART_BYTES:
          part.number, part.written = part.number + 1, b''
        stores.write(f'{part.prefix}_{part.number:06d}', part.written + data)
        with self._lock:
          part.written, part.pending = part.written + data, part.pending[len(data) :]

  def end_part(self, path: epath.PathLike) -> None:
    """Makes the next append start a new part."""
    self.flush()
    self._parts.pop(os.fspath(path), None)

  def _flush_in_background(self) -> None:
    try:
      self.flush()
    except Exception as error:
      self._error = error


_writer = _Writer()


append, flush = _writer.append, _writer.flush


def read(path: epath.PathLike) -> bytes:
  """Reads a whole file. Raises FileNotFoundError."""
  flush()
  if not (parts := _parts_of(path)):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
  with ThreadPoolExecutor(8) as pool:
    return b''.join(pool.map(stores.read, parts))


def replace(path: epath.PathLike, data: bytes) -> None:
  """Replaces the content of a file; `append` then adds to it."""
  _writer.end_part(path)
  old = _parts_of(path)
  append(path, data)
  flush()
  stores.remove(old)


def remove(path: epath.PathLike) -> None:
  """Removes a file."""
  _writer.end_part(path)
  stores.remove(_parts_of(path))


def _parts_of(path: epath.PathLike) -> list[str]:
  """Returns the parts of a file, oldest first."""
  directory, _, name = os.fspath(path).rpartition('/')
  pattern = re.compile(re.escape(name) + r'(\.\d{20}_\d{6})?')
  urls = stores.glob_below(directory, f'{glob.escape(name)}*')
  return [url for url in urls if pattern.fullmatch(url.rpartition('/')[2])]
