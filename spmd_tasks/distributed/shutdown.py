"""Departures: how the processes of a job tell each other, through the coordination service, that and why they leave."""

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

_SERVICE_LIMIT_S = 1.5  # for each call of the coordination service, which hangs where process 0 is stopped
_PREFIX, _PERIOD_S = 'spmd_tasks/left/', 1.0

# How the errors of collectives and of the coordination service begin; libraries raise them as several types.
_LOST_CONNECTION = re.compile(
  '(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): '
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Departure:
  """The reason why a process leaves. `is_own` is false if it leaves only because another process has failed."""

  process_index: int
  host: str
  pid: int
  step: int
  code: int
  reason: str
  is_own: bool


class Departures:
  """Tells the other processes of a job that this one leaves, and hears of theirs; `EmergencyExit` makes it.

  Attributes:
    describe: `RankRecords.describe`, once there are records.
  """

  def __init__(self, job: Any, *, leave: Callable[..., Any], within: Callable[[float, Callable[[], object]], None]):
    self._job, self._leave, self._within = job, leave, within
    self.describe: Callable[..., tuple[str, str]] | None = None
    self.is_over = False

  def watch(self) -> None:
    """Ends this process when another one leaves; returns when `is_over`."""
    while not self.is_over:
      try:
        departures = self._all()
      except Exception:  # the service has ended, of which JAX itself tells
        return
      if departures and not self.is_over:
        first, describe = departures[0], self.describe
        code = first.code if first.code == exit_codes.USAGE and describe is None else exit_codes.PEER_FAILED
        reason, who = first.reason, f'process {first.process_index}'
        if describe is not None:
          reason = f'{who} (host {first.host}, pid {first.pid}) left at step {first.step}: {reason}'
        elif not reason.startswith('process '):
          reason = f'{who}: {reason}'
        self._leave(code, reason, has_stacks=describe is not None, is_own=False)
      time.sleep(_PERIOD_S)

  def explain(self, error: BaseException) -> bool:
    """Whether another process has told why it leaves, and the error is how its end looks from here."""
    has_told = self.describe is not None and any(departure.is_own for departure in self._known())
    return has_told and is_lost_connection(error)

  def tell(self, position: Any, code: int, reason: str, *, is_own: bool) -> str:
    """Tells the others why this process leaves, at a Position; returns a report on all of them, or ''."""
    others = self._known()
    table, culprits = '', ''
    if self.describe is not None:
      table, culprits = self.describe(position, others, is_waiting=code == exit_codes.STUCK)
    if code == exit_codes.STUCK and culprits:
      reason = f'{reason}; likely culprit: {culprits}'
    departure = Departure(
      process_index=self._job.process_id,
      host=socket.gethostname(),
      pid=os.getpid(),
      step=position.step,
      code=code,
      reason=reason[:3000],
      # An error here is often the end of another process, seen as a broken connection; that one has told the reason.
      is_own=is_own and not any(each.is_own for each in others),
    )
    said, key = json.dumps(dataclasses.asdict(departure)), f'{_PREFIX}{self._job.process_id}'
    self._within(_SERVICE_LIMIT_S, lambda: self._job.client.key_value_set(key, said))
    return '\n'.join(f'*** {line}' for line in (table, culprits and f'likely culprit: {culprits}') if line)

  def wait_for_peers(self) -> None:
    """Has process 0 wait, as its end ends the coordination service and aborts the others before they can report."""
    if self._job.process_id == 0:
      while len(self._all()) < self._job.num_processes - 1:
        time.sleep(0.1)
      time.sleep(1.0)  # from a process's word to its end

  def _all(self) -> list[Departure]:
    """The departures of other processes; those that caused others come first."""
    found = [Departure(**json.loads(text)) for _, text in self._job.client.key_value_dir_get(_PREFIX)]
    others = [departure for departure in found if departure.process_index != self._job.process_id]
    return sorted(others, key=lambda departure: (not departure.is_own, departure.process_index))

  def _known(self) -> list[Departure]:
    found: list[Departure] = []

    def look() -> None:
      with contextlib.suppress(Exception):  # the service has ended
        found.extend(self._all())

    self._within(_SERVICE_LIMIT_S, look)
    return found


def is_lost_connection(error: BaseException) -> bool:
  """Whether an error is, or follows from, a collective whose connection to another process broke off."""
  cause: BaseException | None = error
  while cause is not None:
    if _LOST_CONNECTION.match(str(cause)):
      return True
    cause = cause.__cause__ or cause.__context__
  return False


def leave_after(error: BaseException, leave: Callable[..., Any], departures: Departures | None) -> None:
  """Leaves with the exit code and the report of an error; returns for an exit of all processes."""
  if isinstance(error, SystemExit):
    if error.code not in (None, exit_codes.OK, exit_codes.PREEMPTED, exit_codes.INTERRUPTED):
      code = error.code if isinstance(error.code, int) else exit_codes.FAILED
      leave(code, f'exit with {error.code!r}')
    return
  if isinstance(error, KeyboardInterrupt):
    leave(exit_codes.INTERRUPTED, 'interrupted', has_stacks=False)
  if departures is not None and departures.explain(error):
    reason = f'another process has left ({type(error).__name__} here)'
    leave(exit_codes.PEER_FAILED, reason, details=str(error), has_stacks=False, is_own=False)
  if (user_code := user_error_code(error)) is not None:
    leave(user_code, str(error), has_stacks=False)
  reason = ''.join(traceback.format_exception_only(error)).strip()
  leave(exit_codes.FAILED, reason, details=''.join(traceback.format_exception(error)), has_stacks=False)
