"""Files in a store that grow.

An object cannot be appended to: in a store a file is kept in parts, `metrics.jsonl.<time>_<number>`, of which the
newest is replaced. A thread does so at most once a second, as Google's stores refuse more for one object, and a step
that is logged waits for nothing. A kill takes the lines of the last second; `flush` writes them, and a checkpoint is
published only after it.
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
  """The newest part of a growing file, which is this process's own."""

  def __init__(self, name: str):
    self.begun, self.number, self.written, self.waiting = f'{name}.{time.time_ns():020d}', 0, b'', b''


class _Writer:
  """Writes what was appended to the growing files of this process."""

  def __init__(self) -> None:
    self._parts: dict[str, _Part] = {}
    self._lock, self._writing = threading.Lock(), threading.Lock()
    self._timer: threading.Timer | None = None
    self._error: Exception | None = None
    self._begun_s = 0.0

  def append(self, path: epath.PathLike, data: bytes) -> None:
    """Adds `data` to a growing file, to be written within a second or so; raises the error of an earlier write."""
    with self._lock:
      self._parts.setdefault(name := os.fspath(path), _Part(name)).waiting += data
      error, self._error = self._error, None
      if self._timer is None:
        self._timer = threading.Timer(max(0.0, self._begun_s + _PERIOD_S - time.monotonic()), self._write_later)
        self._timer.daemon = True
        self._timer.start()
    if error is not None:
      raise error

  def flush(self) -> None:
    """Returns when all that was appended is there. Raises OSError."""
    with self._writing:
      with self._lock:
        self._timer, self._begun_s = None, time.monotonic()
        waiting = [(part, part.waiting) for part in self._parts.values() if part.waiting]
      for part, data in waiting:
        if len(part.written) > _PART_BYTES:
          part.number, part.written = part.number + 1, b''
        stores.write(f'{part.begun}_{part.number:06d}', part.written + data)
        with self._lock:
          part.written, part.waiting = part.written + data, part.waiting[len(data) :]

  def forget(self, path: epath.PathLike) -> None:
    """What is appended next begins another part."""
    self.flush()
    self._parts.pop(os.fspath(path), None)

  def _write_later(self) -> None:
    try:
      self.flush()
    except Exception as error:
      self._error = error


_writer = _Writer()


append, flush = _writer.append, _writer.flush


def read(path: epath.PathLike) -> bytes:
  """Reads a growing file. Raises FileNotFoundError."""
  flush()
  if not (found := _parts_of(path)):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
  with ThreadPoolExecutor(8) as pool:
    return b''.join(pool.map(stores.read, found))


def replace(path: epath.PathLike, data: bytes) -> None:
  """Gives a growing file another content, which `append` goes on from."""
  _writer.forget(path)
  old = _parts_of(path)
  append(path, data)
  flush()
  stores.remove(old)


def remove(path: epath.PathLike) -> None:
  """Removes a growing file."""
  _writer.forget(path)
  stores.remove(_parts_of(path))


def _parts_of(path: epath.PathLike) -> list[str]:
  """Returns the objects of a growing file, oldest first."""
  directory, _, name = os.fspath(path).rpartition('/')
  pattern = re.compile(re.escape(name) + r'(\.\d{20}_\d{6})?')
  found = stores.glob_below(directory, f'{glob.escape(name)}*')
  return [each for each in found if pattern.fullmatch(each.rpartition('/')[2])]
