"""EmergencyExit: ends a process that cannot go on, without waiting for the other processes.

    emergency = EmergencyExit()
    with emergency.on_failure():  # around everything from the start of jax.distributed on
      initialize(settings)
      emergency.watch_departures()

An exception that unwinds one of several processes would end in JAX's shutdown barrier and wait there for processes that
wait for it. Therefore the failing process reports the exception, tells the others (shutdown.py), and leaves by
`os._exit`.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import faulthandler
import logging as stdlib_logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

import jax

from spmd_tasks import exit_codes
from spmd_tasks.distributed.initialization import coordination
from spmd_tasks.streams import escape

if TYPE_CHECKING:
  from spmd_tasks.distributed.shutdown import Departures  # of several processes only

STDERR = 2  # The descriptor: sys.stderr may be replaced, buffered, or locked by the thread that is stuck.

# Seconds for each part of leaving; in all well below the 30 s within which every process must have ended.
_TELL_LIMIT_S = 5.0
_FLUSH_LIMIT_S = 5.0
_LINGER_LIMIT_S = 5.0
_CHILDREN_LIMIT_S = 1.0
_TOTAL_LIMIT_S = 18.0


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


class EmergencyExit:
  """Ends the process on a failure. Only the first failure is reported; later ones wait for the end of the process."""

  def __init__(self):
    self._departures: Departures | None = None  # while they are watched
    self._position: Callable[[], Position] = Position
    self._first_to_leave = threading.Lock()
    self._deadline_lock = threading.Lock()
    self._is_leaving = False

  def watch_departures(self):
    """Until `attach(None)`: tells the other processes when this one leaves, and ends this one when another leaves.

    Else they would wait until JAX aborts them at the heartbeat's limit.
    """
    from spmd_tasks.distributed.shutdown import Departures

    self._departures = Departures(coordination(), leave=self.leave, within=_within)
    threading.Thread(target=self._departures.watch, name='departures', daemon=True).start()

  def attach(self, describe: Callable[..., tuple[str, str]] | None):
    """Makes later reports include what RankRecords.describe says; departures are watched, if they were not before.

    With None the caller tells the others of the end.
    """
    if self._departures is None and describe is not None:  # somebody else has initialized jax.distributed
      self.watch_departures()
    if self._departures is not None:
      self._departures.describe, self._departures.is_over = describe, describe is None
    if describe is None:
      self._departures = None

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
    except BaseException as error:
      if jax.distributed.is_initialized():
        from spmd_tasks.distributed.shutdown import leave_after

        leave_after(error, self.leave, self._departures)
      raise

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
    position, job, departures = self._position(), coordination(), self._departures
    name = f'process with pid {os.getpid()}' if job is None else f'process {job.process_id} of {job.num_processes}'
    _report(
      f'*** {name}, in {position}: {reason}\n*** leaving with exit code {code} ({exit_codes.NAMES.get(code, "?")})'
    )
    if details:
      _report(details)
    if has_stacks:
      _report(f'*** all threads of {name}, the most recent call first:')
      faulthandler.dump_traceback(file=STDERR, all_threads=True)
    if departures is not None:
      _within(_TELL_LIMIT_S, lambda: _report(departures.tell(position, code, reason, is_own=is_own)))
    _within(_FLUSH_LIMIT_S, _flush)
    if departures is not None:
      _within(_LINGER_LIMIT_S, departures.wait_for_peers)
    _within(_CHILDREN_LIMIT_S, _end_children)
    os._exit(code)


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


def _report(text: str):
  # A closed or full stderr must not keep the process alive.
  if text:
    with contextlib.suppress(OSError):
      os.write(STDERR, (escape(text) + '\n').encode())


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
