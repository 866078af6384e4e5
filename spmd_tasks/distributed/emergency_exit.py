"""EmergencyExit: ends a process that cannot continue, without waiting for the other processes.

    emergency = EmergencyExit()
    with emergency.on_failure():  # around everything from the start of jax.distributed on
      initialize(settings)
      emergency.watch_peers()

If an exception simply unwound one of several processes, that process would end in JAX's shutdown barrier and wait there
for the others, which wait for it. So the failing process reports the exception, tells the others (shutdown.py), and
leaves by `os._exit`.
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
from spmd_tasks.distributed.shutdown import ExitNotices, leave_after
from spmd_tasks.streams import escape

if TYPE_CHECKING:
  from spmd_tasks.distributed.shutdown import ExitNotices  # of several processes only

STDERR = 2  # the descriptor: sys.stderr may be replaced, buffered, or locked by the stuck thread

# Seconds for each part of leaving; together well below the 30 s within which every process must have ended.
_PUBLISH_LIMIT_S = 5.0
_FLUSH_LIMIT_S = 5.0
_PEERS_LIMIT_S = 5.0
_CHILDREN_LIMIT_S = 1.0
_TOTAL_LIMIT_S = 18.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
  """A process's position: its step, and the number of watchdog beats in that step.

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
    self._notices: ExitNotices | None = None  # while peers are watched
    self._position: Callable[[], Position] = Position
    self._first_to_leave = threading.Lock()
    self._deadline_lock = threading.Lock()
    self._is_leaving = False

  def watch_peers(self):
    """Tells the other processes when this one leaves, and ends this one when another leaves, until `attach(None)`.

    Otherwise they would wait until JAX aborts them after its heartbeat timeout.
    """
    self._notices = ExitNotices(coordination(), leave=self.leave, within=_within)
    threading.Thread(target=self._notices.watch, name='exit-notices', daemon=True).start()

  def attach(self, describe: Callable[..., tuple[str, str]] | None):
    """Adds what RankRecords.describe returns to later reports, and watches the peers if they are not watched yet.

    None stops the watch: the caller itself tells the other processes that the job ends.
    """
    if self._notices is None and describe is not None:  # the caller's own code has initialized jax.distributed
      self.watch_peers()
    if self._notices is not None:
      self._notices.describe, self._notices.is_over = describe, describe is None
    if describe is None:
      self._notices = None

  def set_position_source(self, position: Callable[[], Position]):
    """Sets the function that returns this process's position for reports, usually the watchdog's."""
    self._position = position

  def set_deadline(self, limit_s: float | None):
    """Ends the process `limit_s` seconds from now, with stacks, even if no Python thread can run; None cancels.

    A later call replaces the deadline, unless the process is already leaving.
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

    `sys.exit(PREEMPTED)` and `sys.exit(INTERRUPTED)` pass, as all processes exit with them at the same step.
    """
    # Prints stacks also when JAX aborts, such as after a lost heartbeat.
    faulthandler.enable(file=STDERR, all_threads=True)
    try:
      yield
    except BaseException as error:
      if jax.distributed.is_initialized():
        leave_after(error, self.leave, self._notices)
      raise

  def leave(
    self, code: int, reason: str, *, details: str = '', has_stacks: bool = True, is_cause: bool = True
  ) -> NoReturn:
    """Reports, tells the others, flushes, and ends the process with `code`, within 18 s. Never returns.

    Also ends the processes that `multiprocessing` has started here.

    Args:
      code: one of exit_codes.
      reason: one line for the report, and for the other processes' reports.
      details: such as a traceback, for this process's report only.
      has_stacks: whether to report the stacks of all threads.
      is_cause: false if this process leaves because another process has failed.
    """
    if not self._first_to_leave.acquire(blocking=False):
      time.sleep(_TOTAL_LIMIT_S * 2)  # another thread is ending the process
      os._exit(code)  # it is stuck, and so is its deadline
    # The deadline runs in a native thread: leaving must not depend on who holds the interpreter lock.
    with self._deadline_lock:
      self._is_leaving = True
      faulthandler.dump_traceback_later(_TOTAL_LIMIT_S, exit=True, file=STDERR)
    position, job, notices = self._position(), coordination(), self._notices
    name = f'process with pid {os.getpid()}' if job is None else f'process {job.process_id} of {job.num_processes}'
    _report(
      f'*** {name}, in {position}: {reason}\n*** leaving with exit code {code} ({exit_codes.NAMES.get(code, "?")})'
    )
    if details:
      _report(details)
    if has_stacks:
      _report(f'*** all threads of {name}, the most recent call first:')
      faulthandler.dump_traceback(file=STDERR, all_threads=True)
    if notices is not None:
      _within(_PUBLISH_LIMIT_S, lambda: _report(notices.publish(position, code, reason, is_cause=is_cause)))
    _within(_FLUSH_LIMIT_S, _flush)
    if notices is not None:
      _within(_PEERS_LIMIT_S, notices.wait_for_peers)
    _within(_CHILDREN_LIMIT_S, _end_children)
    os._exit(code)


def _flush():
  for stream in (*stdlib_logging.getLogger().handlers, sys.stdout, sys.stderr):
    try:
      stream.flush()
    except Exception:
      _report(f'*** while flushing: {traceback.format_exc()}')


def _end_children():
  """Kills the children of this process; os._exit would leave even daemons running."""
  for child in multiprocessing.active_children():
    child.kill()  # SIGTERM would not end a stopped child


def _report(text: str):
  if text:
    with contextlib.suppress(OSError):  # a closed or full stderr must not keep the process alive
      os.write(STDERR, (escape(text) + '\n').encode())


def _within(limit_s: float, action: Callable[[], object]):
  """Runs `action` in a thread and waits at most `limit_s` seconds, as the file system may hang."""

  def run():
    try:
      action()
    except Exception:
      _report(f'*** while leaving: {traceback.format_exc()}')

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(limit_s)
