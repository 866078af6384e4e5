"""RankRecords: small files that tell the processes of a job about each other's progress.

    <job_log_dir>/ranks/start.txt           a random token of this start: a process that reads it shares the directory
    <job_log_dir>/ranks/progress/<i>.json   the position of process i, written every few seconds

All processes of a job share the job_log_dir, because they checkpoint there. Records only explain a failure; they never
end a process, because a network file system may show a file a minute late. Exit notices (shutdown.py) say why a
process left.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import socket
import time

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from spmd_tasks.distributed.emergency_exit import Position
from spmd_tasks.distributed.shutdown import ExitNotice
from spmd_tasks.errors import UserError
from spmd_tasks.files import make_directory, read_text, storage_errors, write_durably

# How long a directory may take to show process 0's file. NFS caches a directory for up to a minute.
_VISIBLE_LIMIT_S = 90.0
_VISIBLE_PERIOD_S = 0.5

_GONE = 'is gone from this host'
_MAX_DESCRIBED = 16  # a longer list would hide the process that matters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """A process's position, `since` when it is there, and when that was `written`; times in seconds since the epoch."""

  process_index: int
  host: str
  pid: int
  step: int
  beat: int
  activity: str
  since: float
  written: float

  @property
  def position(self) -> Position:
    return Position(step=self.step, beat=self.beat, activity=self.activity)


class RankRecords:
  """Writes the record of one process, and reads the records of the others."""

  def __init__(self, job_log_dir: epath.PathLike, *, process_index: int, num_processes: int):
    """Removes the record that this process left in an earlier run.

    Other processes may not have removed theirs yet; `open_rank_records` waits until they have.
    """
    self.process_index = process_index
    self.num_processes = num_processes
    self._host = socket.gethostname()
    self._progress_dir = epath.Path(job_log_dir) / 'ranks' / 'progress'
    with storage_errors(self._progress_dir):
      make_directory(self._progress_dir)
      (self._progress_dir / f'{process_index}.json').unlink(missing_ok=True)

  def write_progress(self, position: Position, *, since: float):
    """Records this process's position, and since when it is there (seconds since the epoch)."""
    record = {'process_index': self.process_index, 'host': self._host, 'pid': os.getpid()}
    record |= dataclasses.asdict(position) | {'since': since, 'written': time.time()}
    write_durably(self._progress_dir / f'{self.process_index}.json', json.dumps(record), survives_power_failure=False)

  def describe(self, position: Position, notices: Sequence[ExitNotice] = (), *, is_waiting: bool) -> tuple[str, str]:
    """Returns a description of the processes, one per line, and the likely culprits ('' if none is apparent).

    Args:
      position: the position of this process.
      notices: the exit notices of other processes.
      is_waiting: whether this process has waited for longer than the records' period, so that positions compare.
    """
    now = time.time()
    lines, suspects = [f'processes, by their last records under {self._progress_dir.parent}:'], []
    exited, silent = {notice.process_index for notice in notices}, []
    for index in range(self.num_processes):
      progress = _read(self._progress_dir / f'{index}.json')
      is_self = index == self.process_index
      if progress is None:
        remark = '' if is_self else 'has left no record'
        where = f'process {index}'
      else:
        remark = '' if is_self else self._condition(progress)
        if not remark and not is_self and is_waiting and progress.position.is_behind(position):
          remark = f'is behind: {progress.position}'
        where = (
          f'process {index} (host {progress.host}, pid {progress.pid}): {progress.position} since '
          f'{now - progress.since:.1f} s, record {now - progress.written:.1f} s old'
        )
      if remark:
        suspects.append(f'process {index} {remark}')
        if remark == _GONE and index not in exited:
          silent.append(suspects[-1])
      if is_self or remark or self.num_processes <= _MAX_DESCRIBED:
        lines.append(f'  {where}' + (f'  <- {"this process" if is_self else remark}' if is_self or remark else ''))
    lines += [f'  process {notice.process_index} reported at step {notice.step}: {notice.reason}' for notice in notices]
    # The reason may be a lost connection to a process that was killed without a notice: name that process, too.
    reasons = [f'process {notice.process_index}: {notice.reason}' for notice in notices if notice.is_cause]
    suspects = [*reasons, *silent] if reasons else suspects
    return '\n'.join(lines), ', '.join(suspects[:_MAX_DESCRIBED])

  def _condition(self, progress: Progress) -> str:
    """Returns the state of a process of this host; '' if it runs normally, or on another host."""
    if progress.host != self._host or not os.path.isdir('/proc/self'):
      return ''
    try:
      with open(f'/proc/{progress.pid}/stat') as file:
        state = file.read().rpartition(')')[2].split()[0]
    except OSError:
      return _GONE
    return {'T': 'is stopped by a signal', 't': 'is stopped by a debugger', 'Z': 'is dead'}.get(state, '')


def open_rank_records(job_log_dir: epath.PathLike) -> RankRecords:
  """Opens the records of every process. A collective call, which returns once all earlier records are removed.

  No process touches the directory before process 0 calls this. Process 0 has locked the directory by then, so the
  records of another running job are safe.

  Raises a UserError: one of the processes does not see the file that process 0 writes; raised on all of them.
  """
  process_index, num_processes = jax.process_index(), jax.process_count()
  if num_processes == 1:
    return RankRecords(job_log_dir, process_index=0, num_processes=1)
  start_path = epath.Path(job_log_dir) / 'ranks' / 'start.txt'
  token = os.urandom(8)
  if process_index == 0:
    with storage_errors(start_path):
      make_directory(start_path.parent)
      write_durably(start_path, token.hex())
  token = multihost_utils.broadcast_one_to_all(np.frombuffer(token, np.uint8)).tobytes()
  is_visible = _becomes_visible(start_path, token.hex())
  records = RankRecords(job_log_dir, process_index=process_index, num_processes=num_processes) if is_visible else None
  all_visible = multihost_utils.process_allgather(np.array(is_visible)).reshape(-1)
  if not all_visible.all():
    others = ', '.join(str(index) for index in np.flatnonzero(~all_visible)[:_MAX_DESCRIBED])
    raise UserError(
      f'job_log_dir {os.fspath(job_log_dir)} is not shared: process {others} (of {num_processes}) does not see the '
      'file that process 0 wrote there. Choose a directory on a file system or in a bucket that all processes share.'
    )
  assert records is not None
  return records


def _becomes_visible(path: epath.Path, text: str) -> bool:
  """Waits until `path` holds `text`; returns False after the time limit."""
  limit = time.monotonic() + _VISIBLE_LIMIT_S
  while time.monotonic() <= limit:
    with contextlib.suppress(OSError, ValueError):  # not visible yet, or not text
      if read_text(path) == text:
        return True
    time.sleep(_VISIBLE_PERIOD_S)
  return False


def _read(path: epath.Path) -> Progress | None:
  """Returns a record, or None if there is no valid one; never raises, as records only explain."""
  try:
    values = json.loads(read_text(path))
    fields = {field.name: field.type for field in dataclasses.fields(Progress)}
    if set(values) != set(fields) or any(type(values[name]) is not fields[name] for name in fields):
      return None
    return Progress(**values)
  except (OSError, ValueError, TypeError, RecursionError):
    return None
