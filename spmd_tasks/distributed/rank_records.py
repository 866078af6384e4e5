"""RankRecords: small files that tell the processes of a job about each other's progress.

    <job_log_dir>/ranks/start.txt           a random token of this start: a process that reads it shares the directory
    <job_log_dir>/ranks/progress/<i>.json   where process i is, written every few seconds

All processes of a job share the job_log_dir, because they checkpoint there. Records explain; they never end a process,
as a network file system may show a file a minute late. Why a process leaves is told by emergency_exit.py.
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
from spmd_tasks.distributed.shutdown import Departure
from spmd_tasks.errors import UserError
from spmd_tasks.files import make_directory, read_text, storage_errors, write_durably

# How long a directory may take to show process 0's file. NFS keeps what it has seen of a directory for up to a minute.
_VISIBLE_LIMIT_S = 90.0
_VISIBLE_PERIOD_S = 0.5

_GONE = 'is gone from this host'
_MAX_DESCRIBED = 16  # A longer list would hide the process that matters.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """The position of process `process_index` at time `written`, reached at time `since`; in seconds since the epoch."""

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
  """Writes the records of one process, and reads those of the others."""

  def __init__(self, job_log_dir: epath.PathLike, *, process_index: int, num_processes: int):
    """Opens the records and removes those that this process left in an earlier run.

    Records of other processes may still be from that earlier run; `open_rank_records` waits until they are removed.
    """
    self.process_index = process_index
    self.num_processes = num_processes
    self._host = socket.gethostname()
    self._progress_dir = epath.Path(job_log_dir) / 'ranks' / 'progress'
    with storage_errors(self._progress_dir):
      make_directory(self._progress_dir)
      (self._progress_dir / f'{process_index}.json').unlink(missing_ok=True)

  def write_progress(self, position: Position, *, since: float):
    """Records where this process is, and since when (seconds since the epoch)."""
    about = {'process_index': self.process_index, 'host': self._host, 'pid': os.getpid()}
    about |= dataclasses.asdict(position) | {'since': since, 'written': time.time()}
    write_durably(self._progress_dir / f'{self.process_index}.json', json.dumps(about), survives_power_failure=False)

  def describe(self, position: Position, departures: Sequence[Departure] = (), *, is_waiting: bool) -> tuple[str, str]:
    """Describes the processes, one per line, and names the likely culprits ('' if there is no sign of one).

    Args:
      position: the position of this process.
      departures: of other processes.
      is_waiting: this process has been there for longer than the records' period, so positions can be compared.
    """
    now = time.time()
    lines, suspects = [f'processes, by their last records under {self._progress_dir.parent}:'], []
    told, silent = {each.process_index for each in departures}, []
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
        if remark == _GONE and index not in told:
          silent.append(suspects[-1])
      if is_self or remark or self.num_processes <= _MAX_DESCRIBED:
        lines.append(f'  {where}' + (f'  <- {"this process" if is_self else remark}' if is_self or remark else ''))
    lines += [f'  process {each.process_index} reported at step {each.step}: {each.reason}' for each in departures]
    # A reason may be the end of a process that could tell nothing, as a broken connection: so that one is named, too.
    reasons = [f'process {each.process_index}: {each.reason}' for each in departures if each.is_own]
    suspects = [*reasons, *silent] if reasons else suspects
    return '\n'.join(lines), ', '.join(suspects[:_MAX_DESCRIBED])

  def _condition(self, progress: Progress) -> str:
    """The state of a process of this host in the process table; '' if it runs normally or on another host."""
    if progress.host != self._host or not os.path.isdir('/proc/self'):
      return ''
    try:
      with open(f'/proc/{progress.pid}/stat') as file:
        state = file.read().rpartition(')')[2].split()[0]
    except OSError:
      return _GONE
    return {'T': 'is stopped by a signal', 't': 'is stopped by a debugger', 'Z': 'is dead'}.get(state, '')


def open_rank_records(job_log_dir: epath.PathLike) -> RankRecords:
  """Opens the records of every process; a collective call that returns when no record of an earlier run is left.

  No process touches the directory before process 0 has made the call: if a running job owns the directory, process 0
  has been refused before, and the running job keeps its records.

  Raises a UserError: on all processes, if one of them does not see the file that process 0 writes there.
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
    blind = ', '.join(str(index) for index in np.flatnonzero(~all_visible)[:_MAX_DESCRIBED])
    raise UserError(
      f'{os.fspath(job_log_dir)} is not shared by the processes of the job: what process 0 wrote there is not seen by '
      f'process {blind} (of {num_processes}); choose a directory on a file system or in a bucket that they all share.'
    )
  assert records is not None
  return records


def _becomes_visible(path: epath.Path, text: str) -> bool:
  """Waits until `path` holds `text`; returns False after the time limit."""
  limit = time.monotonic() + _VISIBLE_LIMIT_S
  while time.monotonic() <= limit:
    with contextlib.suppress(OSError, ValueError):  # Not there yet; or another file, of which nothing is known.
      if read_text(path) == text:
        return True
    time.sleep(_VISIBLE_PERIOD_S)
  return False


def _read(path: epath.Path) -> Progress | None:
  """Reads a record; returns None if there is none or it cannot be read. Records only explain, so this never raises."""
  try:
    values = json.loads(read_text(path))
    fields = {field.name: field.type for field in dataclasses.fields(Progress)}
    if set(values) != set(fields) or any(type(values[name]) is not fields[name] for name in fields):
      return None
    return Progress(**values)
  except (OSError, ValueError, TypeError, RecursionError):
    return None
