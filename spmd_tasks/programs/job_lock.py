"""Locks a job_log_dir, so that one job at a time runs in it.

    lock = lock_directory(job_log_dir)   # a UserError names the holder
    lock.check()                         # before a checkpoint is published: a JobError if another job has the lock
    lock.release()

On a disk the lock is a kernel lock (`flock`) on `job.lock`, which also names the holder. The kernel releases it when
the process ends, kill -9 included, so nothing has to be cleaned up.

Object stores (`gs://...`) have no locks. There a holder writes a numbered object:

    job.lock.000001      host, pid, since, a heartbeat that the holder increments every 10 s, and whether it released
    job.lock.000002      the next holder; the highest number has the lock

A job acquires the lock by a conditional write of the next number, which succeeds for one of several jobs. It may do so
once the previous holder has released the lock, was a process of this machine that has ended, or has sent no heartbeat
for a minute. A holder that was only suspended sees the next number in `check`.
"""

import datetime
import errno
import fcntl
import io
import json
import os
import secrets
import socket
import threading
import time
from typing import Any, Protocol

from absl import logging
from etils import epath

from spmd_tasks.append_objects import flush
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import glob_below, is_remote, open_descriptor, write_durably
from spmd_tasks.stores import create, exists, read, write

LOCK_FILE = 'job.lock'
HEARTBEAT_PERIOD_S, HEARTBEAT_TIMEOUT_S = 10.0, 60.0
# The errors of flock on a file system without locks (Lustre without -o flock, some FUSE).
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class JobLock(Protocol):
  """A lock that this process holds.

  Attributes:
    is_exclusive: false on a file system without locks, where a second job is not noticed.
  """

  is_exclusive: bool

  def check(self) -> None:
    """Raises a JobError if another job has acquired the lock since."""

  def release(self) -> None:
    """Lets another job acquire the lock; the end of the process does the same."""


def lock_directory(job_log_dir: epath.Path) -> JobLock:
  """Locks a directory that exists. Raises a UserError if another running job holds the lock, or an OSError."""
  return _lock_store(job_log_dir) if is_remote(job_log_dir) else _lock_file(job_log_dir)


class _FileLock:
  """A kernel lock on an open file; None on a file system without locks."""

  def __init__(self, file: io.FileIO | None):
    self._file = file
    self.is_exclusive = file is not None

  def check(self) -> None:
    """Does nothing: the kernel gives no lock away."""

  def release(self) -> None:
    if self._file is not None:
      self._file.close()


def _lock_file(job_log_dir: epath.Path) -> _FileLock:
  path = job_log_dir / LOCK_FILE
  # Close-on-exec: a subprocess must not keep the lock after this process has died.
  file = io.FileIO(open_descriptor(path, os.O_RDWR | os.O_CREAT), 'r+')
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
      raise BlockingIOError  # a job that was refused has just removed the file, and another job has created it again
    if os.fstat(file.fileno()).st_nlink > 1:  # the directory was copied by hard links: the original's lock stays as is
      write_durably(path, b'')
      file.close()
      return _lock_file(job_log_dir)
    file.truncate(0)
    file.write(f'host {socket.gethostname()}, pid {os.getpid()}, since {_now()}\n'.encode())
  except (BlockingIOError, FileNotFoundError):
    holder = file.read(1000).decode(errors='replace').strip()
    is_shared = os.fstat(file.fileno()).st_nlink > 1
    file.close()
    copied = f', or, if it runs in a directory that this one is a copy of, remove {path}' if is_shared else ''
    raise _in_use(job_log_dir, holder or 'which has left no name', copied) from None
  except OSError as error:
    file.close()
    if error.errno not in _NO_LOCKS:
      raise
    logging.warning('%s is on a file system without locks: a second job in it will not be noticed.', job_log_dir)
    return _FileLock(None)
  return _FileLock(file)


class _StoreLock:
  """A numbered object, which a thread renews."""

  is_exclusive = True

  def __init__(self, job_log_dir: epath.Path, number: int):
    self._job_log_dir, self._number = job_log_dir, number
    self._content: dict[str, Any] = {
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'machine': _machine(),
      'since': _now(),
      'token': secrets.token_hex(8),
      'heartbeat': 0,
    }
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._send_heartbeats, name='job_lock', daemon=True)

  def acquire(self) -> None:
    """Writes the object. Raises a UserError if another job was faster."""
    path = self._path(self._number)
    if not create(path, self._encoded()) or exists(self._path(self._number + 1)):
      raise _in_use(self._job_log_dir, _name(_read(path)))
    self._thread.start()

  def check(self) -> None:
    if exists(self._path(self._number + 1)):
      raise JobError(
        f'{self._job_log_dir} was taken over by another job, because this one had sent no heartbeat for '
        f'{HEARTBEAT_TIMEOUT_S:.0f} s: let the other job continue.'
      )

  def release(self) -> None:
    if self._stopped.is_set():
      return
    flush()
    self._stopped.set()
    self._thread.join()
    self._content['released'] = True
    write(self._path(self._number), self._encoded())

  def _path(self, number: int) -> epath.Path:
    return self._job_log_dir / f'{LOCK_FILE}.{number:06d}'

  def _encoded(self) -> bytes:
    return json.dumps(self._content).encode()

  def _send_heartbeats(self) -> None:
    while not self._stopped.wait(HEARTBEAT_PERIOD_S):
      self._content['heartbeat'] += 1
      try:
        write(self._path(self._number), self._encoded())
      except OSError as error:  # the next one may succeed
        logging.warning('%s cannot be renewed: %s', self._path(self._number), error)


def _lock_store(job_log_dir: epath.Path) -> _StoreLock:
  paths = sorted(glob_below(job_log_dir, f'{LOCK_FILE}.*'))
  number = int(paths[-1].name.rpartition('.')[2]) + 1 if paths else 1
  if paths and not _wait_until_free(paths[-1]):
    raise _in_use(job_log_dir, _name(_read(paths[-1])))
  lock = _StoreLock(job_log_dir, number)
  lock.acquire()
  for path in paths[:-1]:  # the last one stays, so that a slow job that wants the same number finds it
    path.unlink(missing_ok=True)
  return lock


def _wait_until_free(path: epath.Path) -> bool:
  """Returns whether the holder is gone; waits for its heartbeats if nothing else tells."""
  first = _read(path)
  if first.get('released'):
    return True
  if first.get('machine') == _machine() and not os.path.exists(f'/proc/{first.get("pid")}'):
    return True
  logging.warning('%s is held by %s: waiting up to %.0f s for a heartbeat.', path, _name(first), HEARTBEAT_TIMEOUT_S)
  end = time.monotonic() + HEARTBEAT_TIMEOUT_S
  while time.monotonic() < end:
    time.sleep(min(1.0, HEARTBEAT_TIMEOUT_S / 10))
    now = _read(path)
    if now.get('released'):
      return True
    if now != first:
      return False
  return True


def _in_use(job_log_dir: epath.Path, holder: str, alternative: str = '') -> UserError:
  return UserError(
    f'job_log_dir {os.fspath(job_log_dir)!r} is in use by another running job ({holder}): stop that job '
    f'first{alternative}, or choose another job_log_dir.'
  )


def _read(path: epath.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(read(path)))
  except (ValueError, TypeError):
    return {}


def _name(holder: dict[str, Any]) -> str:
  return f'host {holder.get("host")}, pid {holder.get("pid")}, since {holder.get("since")}'


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')


def _machine() -> str:
  """Returns an id of this machine's boot and pid namespace, within which a pid is unique."""
  try:
    with open('/proc/sys/kernel/random/boot_id') as file:
      return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return secrets.token_hex(8)
