"""ExitNotices: tells the other processes of a job why one process exits, through the coordination service."""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import os
import re
import socket
import time
import traceback
from typing import Any

from spmd_tasks import exit_codes
from spmd_tasks.errors import user_error_code

_CALL_LIMIT_S = 1.5  # for each call of the coordination service, which hangs if process 0 is stopped
_PREFIX, _PERIOD_S = 'spmd_tasks/exits/', 1.0

# How the errors of collectives and of the coordination service begin; libraries raise them as several types.
_LOST_CONNECTION = re.compile(
  '(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): '
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitNotice:
  """Why a process exits.

  Attributes:
    process_index: the index of the process.
    host: its host.
    pid: its id on the host.
    step: the step that it exits in.
    code: its exit code.
    reason: one line.
    is_cause: false if it exits only because another process has failed.
  """

  process_index: int
  host: str
  pid: int
  step: int
  code: int
  reason: str
  is_cause: bool


class ExitNotices:
  """Publishes the notice of this process, and ends the process on a notice of another. `EmergencyExit` creates it.

  Attributes:
    describe: `RankRecords.describe`, once there are records.
    is_over: true once the job has ended well, so that notices no longer matter.
  """

  def __init__(self, job: Any, *, leave: Callable[..., Any], within: Callable[[float, Callable[[], object]], None]):
    self._job, self._leave, self._within = job, leave, within
    self.describe: Callable[..., tuple[str, str]] | None = None
    self.is_over = False

  def watch(self) -> None:
    """Ends this process once another process has published a notice; returns when `is_over`."""
    while not self.is_over:
      try:
        notices = self._read()
      except Exception:  # the service has ended, which JAX itself reports
        return
      if notices and not self.is_over:
        first, describe = notices[0], self.describe
        code = first.code if first.code == exit_codes.USAGE and describe is None else exit_codes.PEER_FAILED
        reason, process = first.reason, f'process {first.process_index}'
        if describe is not None:
          reason = f'{process} (host {first.host}, pid {first.pid}) left at step {first.step}: {reason}'
        elif not reason.startswith('process '):
          reason = f'{process}: {reason}'
        self._leave(code, reason, has_stacks=describe is not None, is_cause=False)
      time.sleep(_PERIOD_S)

  def explains(self, error: BaseException) -> bool:
    """Returns whether an error of this process is a connection lost to a process that has published a notice."""
    is_published = self.describe is not None and any(notice.is_cause for notice in self._read_in_time())
    return is_published and is_lost_connection(error)

  def publish(self, position: Any, code: int, reason: str, *, is_cause: bool) -> str:
    """Publishes why this process exits, at a Position; returns a report on all processes, or ''."""
    others = self._read_in_time()
    table, culprits = '', ''
    if self.describe is not None:
      table, culprits = self.describe(position, others, is_waiting=code == exit_codes.STUCK)
    if code == exit_codes.STUCK and culprits:
      reason = f'{reason}; likely culprit: {culprits}'
    notice = ExitNotice(
      process_index=self._job.process_id,
      host=socket.gethostname(),
      pid=os.getpid(),
      step=position.step,
      code=code,
      reason=reason[:3000],
      # An error here often follows from another process's exit, as a lost connection. That process has said why.
      is_cause=is_cause and not any(other.is_cause for other in others),
    )
    key, text = f'{_PREFIX}{self._job.process_id}', json.dumps(dataclasses.asdict(notice))
    self._within(_CALL_LIMIT_S, lambda: self._job.client.key_value_set(key, text))
    return '\n'.join(f'*** {line}' for line in (table, culprits and f'likely culprit: {culprits}') if line)

  def wait_for_peers(self) -> None:
    """Waits on process 0 for the others' notices: its exit ends the service and so aborts the others."""
    if self._job.process_id == 0:
      while len(self._read()) < self._job.num_processes - 1:
        time.sleep(0.1)
      time.sleep(1.0)  # from a notice to the end of its process

  def _read(self) -> list[ExitNotice]:
    """Returns the notices of other processes, causes first."""
    notices = [ExitNotice(**json.loads(text)) for _, text in self._job.client.key_value_dir_get(_PREFIX)]
    others = [notice for notice in notices if notice.process_index != self._job.process_id]
    return sorted(others, key=lambda notice: (not notice.is_cause, notice.process_index))

  def _read_in_time(self) -> list[ExitNotice]:
    """Returns the notices of other processes; none if the service does not answer in time."""
    notices: list[ExitNotice] = []

    def read() -> None:
      with contextlib.suppress(Exception):  # the service has ended
        notices.extend(self._read())

    self._within(_CALL_LIMIT_S, read)
    return notices


def is_lost_connection(error: BaseException) -> bool:
  """Returns whether an error is, or was caused by, a collective that lost its connection to another process."""
  cause: BaseException | None = error
  while cause is not None:
    if _LOST_CONNECTION.match(str(cause)):
      return True
    cause = cause.__cause__ or cause.__context__
  return False


def leave_after(error: BaseException, leave: Callable[..., Any], notices: ExitNotices | None) -> None:
  """Leaves with the exit code and the report for an error; returns if all processes exit together."""
  if isinstance(error, SystemExit):
    if error.code not in (None, exit_codes.OK, exit_codes.PREEMPTED, exit_codes.INTERRUPTED):
      code = error.code if isinstance(error.code, int) else exit_codes.FAILED
      leave(code, f'exit with {error.code!r}')
    return
  if isinstance(error, KeyboardInterrupt):
    leave(exit_codes.INTERRUPTED, 'interrupted', has_stacks=False)
  if notices is not None and notices.explains(error):
    reason = f'another process has left ({type(error).__name__} here)'
    leave(exit_codes.PEER_FAILED, reason, details=str(error), has_stacks=False, is_cause=False)
  if (user_code := user_error_code(error)) is not None:
    leave(user_code, str(error), has_stacks=False)
  reason = ''.join(traceback.format_exception_only(error)).strip()
  leave(exit_codes.FAILED, reason, details=''.join(traceback.format_exception(error)), has_stacks=False)
