"""StoreClaim: one running job at a time in a directory of an object store, which has no locks.

    job.lock.000001      the holder (host, pid, since), a counter that it raises every 10 s, and whether it has released
    job.lock.000002      the next holder; the highest number holds the directory

A claim is a conditional write of the next number: of several jobs one succeeds. A number follows another whose holder
has released it, is a dead process of this machine, or has not raised its counter for a minute. A holder that was only
kept from running finds the next number before it publishes a checkpoint, and ends: `check`.
"""

import datetime
import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks.append_objects import flush
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import glob_below
from spmd_tasks.stores import create, exists, read, write

BEAT_S, DEAD_AFTER_S = 10.0, 60.0


class StoreClaim:
  """A claimed directory; `claim_store` makes it. `close` releases it."""

  def __init__(self, job_log_dir: epath.Path, prefix: str, number: int):
    self._job_log_dir, self._prefix, self._number = job_log_dir, prefix, number
    self._content: dict[str, Any] = {
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'machine': _machine(),
      'since': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'token': secrets.token_hex(8),
      'beat': 0,
    }
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, name='store_claim', daemon=True)

  def take(self) -> bool:
    """Claims the directory; False if another job was first."""
    if not create(self._path(self._number), self._encoded()) or exists(self._path(self._number + 1)):
      return False
    self._thread.start()
    return True

  def check(self) -> None:
    """Raises a JobError if another job has taken the directory, as this one seemed to be dead."""
    if exists(self._path(self._number + 1)):
      raise JobError(
        f'{self._job_log_dir} was taken by another job, because this one had shown no sign of life for '
        f'{DEAD_AFTER_S:.0f} s: let the other job continue.'
      )

  def close(self) -> None:
    """Releases the claim; the next job need not wait."""
    if self._ended.is_set():
      return
    flush()
    self._ended.set()
    self._thread.join()
    self._content['released'] = True
    write(self._path(self._number), self._encoded())

  def _path(self, number: int) -> epath.Path:
    return self._job_log_dir / f'{self._prefix}.{number:06d}'

  def _encoded(self) -> bytes:
    return json.dumps(self._content).encode()

  def _beat(self) -> None:
    while not self._ended.wait(BEAT_S):
      self._content['beat'] += 1
      try:
        write(self._path(self._number), self._encoded())
      except OSError as error:  # the next one may succeed
        logging.warning('%s cannot be renewed: %s', self._path(self._number), error)


def claim_store(job_log_dir: epath.Path, prefix: str) -> StoreClaim:
  """Claims a directory in a store. Raises a UserError if another running job holds it."""
  held = sorted(glob_below(job_log_dir, f'{prefix}.*'))
  number = int(held[-1].name.rpartition('.')[2]) + 1 if held else 1
  if held and not _is_free(held[-1]):
    raise _in_use(job_log_dir, held[-1])
  claim = StoreClaim(job_log_dir, prefix, number)
  if not claim.take():
    raise _in_use(job_log_dir, claim._path(number))
  for path in held[:-1]:  # the last one stays, so that a slow claimant meets it
    path.unlink(missing_ok=True)
  return claim


def _is_free(path: epath.Path) -> bool:
  """Whether the holder of a claim is known not to run any more; waits if that can only be seen by its silence."""
  first = _read(path)
  if first.get('released'):
    return True
  if first.get('machine') == _machine() and not os.path.exists(f'/proc/{first.get("pid")}'):
    return True
  logging.warning('%s is held by %s: waiting for up to %.0f s for a sign of life.', path, _name(first), DEAD_AFTER_S)
  end = time.monotonic() + DEAD_AFTER_S
  while time.monotonic() < end:
    time.sleep(min(1.0, DEAD_AFTER_S / 10))
    now = _read(path)
    if now.get('released'):
      return True
    if now != first:
      return False
  return True


def _in_use(job_log_dir: epath.Path, path: epath.Path) -> UserError:
  return UserError(
    f'job_log_dir {os.fspath(job_log_dir)!r} is in use by another running job ({_name(_read(path))}): stop that job '
    'first, or choose another job_log_dir.'
  )


def _read(path: epath.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(read(path)))
  except (ValueError, TypeError):
    return {}


def _name(holder: dict[str, Any]) -> str:
  return f'host {holder.get("host")}, pid {holder.get("pid")}, since {holder.get("since")}'


def _machine() -> str:
  """Returns a name of this boot of this machine and container, within which a pid names one process."""
  try:
    with open('/proc/sys/kernel/random/boot_id') as file:
      return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return secrets.token_hex(8)
