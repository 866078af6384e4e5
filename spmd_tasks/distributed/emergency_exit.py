"""EmergencyExit: ends a process that cannot go on, without waiting for the other processes.

Usage, around everything from the start of jax.distributed on:

    emergency = EmergencyExit()
    with emergency.on_failure():
      initialize(settings)
      emergency.watch_departures()
      emergency.attach(open_rank_records(job_log_dir).describe)
      ...

An exception that unwinds one of several processes would end in JAX's shutdown barrier and wait there for processes that
wait for it. Therefore the failing process reports the exception, tells the others through the coordination service, and
leaves by `os._exit`.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import faulthandler
import functools
import json
import logging as stdlib_logging
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import jax

from spmd_tasks import exit_codes
from spmd_tasks.distributed.initialization import coordination
from spmd_tasks.errors import user_error_code

STDERR = 2  # The descriptor: sys.stderr may be replaced, buffered, or locked by the thread that is stuck.

# Seconds for each part of leaving; in all well below the 30 s within which every process must have ended.
_TELL_LIMIT_S = 5.0
_SERVICE_LIMIT_S = 1.5  # of that for each call of the coordination service, which hangs where process 0 is stopped
_FLUSH_LIMIT_S = 5.0
_LINGER_LIMIT_S = 5.0
_CHILDREN_LIMIT_S = 1.0
_TOTAL_LIMIT_S = 18.0
_DEPARTURES, _DEPARTURES_PERIOD_S = 'spmd_tasks/left/', 1.0

# How the errors of collectives and of the coordination service begin; libraries raise them as several types.
_LOST_CONNECTION = re.compile(
  '(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): '
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
  """A process's position: its step, and the number of watchdog beats that it has made in that step.

  All processes run the same loop, so the others wait for the process with the smallest (step, beat).
  """

  step: int = -1
  beat: int = 0
  activity: str = 'start'

  def is_behind(self, other: 'Position') -> bool:
    return (self.step, self.beat) < (other.step, other.beat)

  def __str__(self) -> str:
    return f'{self.activity!r} of step {self.step}' if self.step >= 0 else repr(self.activity)


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


class EmergencyExit:
  """Ends the process on a failure. Only the first failure is reported; later ones wait for the end of the process."""

  def __init__(self):
    self._describe: Callable[..., tuple[str, str]] | None = None
    self._job: Any = None  # while departures are watched
    self._position: Callable[[], Position] = Position
    self._first_to_leave = threading.Lock()
    self._deadline_lock = threading.Lock()
    self._is_leaving = False

  def watch_departures(self):
    """Until `attach(None)`: tells the other processes when this one leaves, and ends this one when another leaves.

    Else they would wait until JAX aborts them at the heartbeat's limit.
    """
    self._job = coordination()
    threading.Thread(target=self._watch_departures, name='departures', daemon=True).start()

  def attach(self, describe: Callable[..., tuple[str, str]] | None):
    """Makes later reports include what RankRecords.describe says; departures are watched, if they were not before.

    With None the caller tells the others of the end.
    """
    self._describe = describe
    if describe is None:
      self._job = None
    elif self._job is None:  # somebody else has initialized jax.distributed
      self.watch_departures()

  def set_position_source(self, position: Callable[[], Position]):
    """Sets the function that gives this process's position for reports (the watchdog's)."""
    self._position = position

  def set_deadline(self, limit_s: float | None):
    """Ends the process `limit_s` seconds from now, with stacks, even if no Python thread can run; None cancels.

    A process has one such deadline. A process that is already leaving keeps the deadline of leaving.
    """
    with self._deadline_lock:
      if self._is_leaving:
        return
      if limit_s is None:
        faulthandler.cancel_dump_traceback_later()
      else:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)

  @contextlib.contextmanager
  def on_failure(self) -> Iterator[None]:
    """Leaves at once if the body raises or exits nonzero while jax.distributed runs; a single process just raises.

    `sys.exit(PREEMPTED)`, or INTERRUPTED, passes: all processes exit so at the same step.
    """
    # For aborts of JAX, too, such as after a lost heartbeat.
    faulthandler.enable(file=STDERR, all_threads=True)
    try:
      yield
    except SystemExit as error:
      is_in_order = error.code in (None, exit_codes.OK, exit_codes.PREEMPTED, exit_codes.INTERRUPTED)
      if jax.distributed.is_initialized() and not is_in_order:
        code = error.code if isinstance(error.code, int) else exit_codes.FAILED
        self.leave(code, f'exit with {error.code!r}')
      raise
    except KeyboardInterrupt:
      if jax.distributed.is_initialized():
        self.leave(exit_codes.INTERRUPTED, 'interrupted', has_stacks=False)
      raise
    except BaseException as error:
      if jax.distributed.is_initialized():
        if self._is_seen_from_here(error):
          reason = f'another process has left ({type(error).__name__} here)'
          self.leave(exit_codes.PEER_FAILED, reason, details=str(error), has_stacks=False, is_own=False)
        if (user_code := user_error_code(error)) is not None:
          self.leave(user_code, str(error), has_stacks=False)
        reason = ''.join(traceback.format_exception_only(error)).strip()
        self.leave(exit_codes.FAILED, reason, details=''.join(traceback.format_exception(error)), has_stacks=False)
      raise

  def _watch_departures(self):
    while (job := self._job) is not None:
      try:
        departures = _departures(job)
      except Exception:  # the service has ended, of which JAX itself tells
        return
      if departures and self._job is not None:
        first = departures[0]
        code = first.code if first.code == exit_codes.USAGE and self._describe is None else exit_codes.PEER_FAILED
        reason, who = first.reason, f'process {first.process_index}'
        if self._describe is not None:
          reason = f'{who} (host {first.host}, pid {first.pid}) left at step {first.step}: {reason}'
        elif not reason.startswith('process '):
          reason = f'{who}: {reason}'
        self.leave(code, reason, has_stacks=self._describe is not None, is_own=False)
      time.sleep(_DEPARTURES_PERIOD_S)

  def _is_seen_from_here(self, error: BaseException) -> bool:
    """Whether another process has told why it leaves, and the error is how its end looks from here."""
    if self._describe is None or not any(departure.is_own for departure in _departures_if_known(self._job)):
      return False
    cause: BaseException | None = error
    while cause is not None:
      if _LOST_CONNECTION.match(str(cause)):
        return True
      cause = cause.__cause__ or cause.__context__
    return False

  def leave(
    self, code: int, reason: str, *, details: str = '', has_stacks: bool = True, is_own: bool = True
  ) -> NoReturn:
    """Reports, tells the others, flushes, and ends the process with `code`, within 18 s. Never returns.

    Also ends the processes that `multiprocessing` has started here.

    Args:
      code: one of exit_codes.
      reason: one line for the report, and for the other processes' reports.
      details: such as a traceback, for this process's report only.
      has_stacks: whether to report what every thread is doing.
      is_own: false if this process leaves because another process has recorded a failure.
    """
    if not self._first_to_leave.acquire(blocking=False):
      time.sleep(_TOTAL_LIMIT_S * 2)  # Another thread is leaving, and takes this one with it.
      os._exit(code)  # It has not, nor has its deadline.
    # From a thread that needs no interpreter lock: leaving must not depend on who holds it.
    with self._deadline_lock:
      self._is_leaving = True
      faulthandler.dump_traceback_later(_TOTAL_LIMIT_S, exit=True, file=STDERR)
    position = self._position()
    job = coordination()
    name = f'process with pid {os.getpid()}' if job is None else f'process {job.process_id} of {job.num_processes}'
    _report(
      f'*** {name}, in {position}: {reason}\n*** leaving with exit code {code} ({exit_codes.NAMES.get(code, "?")})'
    )
    if details:
      _report(details)
    if has_stacks:
      _report(f'*** all threads of {name}, the most recent call first:')
      faulthandler.dump_traceback(file=STDERR, all_threads=True)
    if (job := self._job) is not None:
      tell = functools.partial(self._tell, job, position, code, reason, is_own=is_own)
      _within(_TELL_LIMIT_S, tell)
    _within(_FLUSH_LIMIT_S, _flush)
    if job is not None and job.process_id == 0:
      _within(_LINGER_LIMIT_S, lambda: _wait_for_peers(job))
    _within(_CHILDREN_LIMIT_S, _end_children)
    os._exit(code)

  def _tell(self, job: Any, position: Position, code: int, reason: str, *, is_own: bool):
    others = _departures_if_known(job)
    table, culprits = '', ''
    if self._describe is not None:
      table, culprits = self._describe(position, others, is_waiting=code == exit_codes.STUCK)
    if code == exit_codes.STUCK and culprits:
      reason = f'{reason}; likely culprit: {culprits}'
    departure = Departure(
      process_index=job.process_id,
      host=socket.gethostname(),
      pid=os.getpid(),
      step=position.step,
      code=code,
      reason=reason[:3000],
      # An error here is often the end of another process, seen as a broken connection; that one has told the reason.
      is_own=is_own and not any(each.is_own for each in others),
    )
    said = json.dumps(dataclasses.asdict(departure))
    _within(_SERVICE_LIMIT_S, lambda: job.client.key_value_set(f'{_DEPARTURES}{job.process_id}', said))
    if table:
      _report(f'*** {table}')
    if culprits:
      _report(f'*** likely culprit: {culprits}')


def _flush():
  for stream in (*stdlib_logging.getLogger().handlers, sys.stdout, sys.stderr):
    try:
      stream.flush()
    except Exception:
      _report(f'*** while flushing: {traceback.format_exc()}')


def _end_children():
  """Ends the children of this process: os._exit leaves them running, although they are daemons."""
  for child in multiprocessing.active_children():
    child.kill()  # SIGTERM would not end one that is stopped


def _departures(job: Any) -> list[Departure]:
  """The departures of other processes; those that caused others come first."""
  found = [Departure(**json.loads(text)) for _, text in job.client.key_value_dir_get(_DEPARTURES)]
  others = [departure for departure in found if departure.process_index != job.process_id]
  return sorted(others, key=lambda departure: (not departure.is_own, departure.process_index))


def _departures_if_known(job: Any) -> list[Departure]:
  found: list[Departure] = []

  def look():
    with contextlib.suppress(Exception):  # the service has ended
      found.extend(_departures(job))

  if job is not None:
    _within(_SERVICE_LIMIT_S, look)
  return found


def _wait_for_peers(job: Any):
  """Waits, as the end of process 0 ends the coordination service and aborts the others before they can report."""
  while len(_departures(job)) < job.num_processes - 1:
    time.sleep(0.1)
  time.sleep(1.0)  # from a process's word to its end


def _report(text: str):
  # A closed or full stderr must not keep the process alive.
  with contextlib.suppress(OSError):
    os.write(STDERR, (text + '\n').encode())


def _within(limit_s: float, action: Callable[[], object]):
  """Runs `action` in a thread for at most `limit_s` seconds, as it may hang with the file system."""

  def run():
    try:
      action()
    except Exception:
      _report(f'*** while leaving: {traceback.format_exc()}')

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(limit_s)
