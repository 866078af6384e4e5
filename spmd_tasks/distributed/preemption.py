"""PreemptionGuard: turns SIGTERM, Ctrl-C and SIGHUP into one point of the program at which every process stops.

    with PreemptionGuard() as guard:
      if guard.should_stop():  # after each step
        save(state)
        sys.exit(guard.exit_code)

A single process keeps a flag. Several processes share JAX's preemption service: the process that gets the signal
reports it there, and the service chooses a call of `should_stop` that no process has made yet.

Ctrl-C (SIGINT) a second time ends the process at once. SIGHUP, by which a terminal says that it closes, is as SIGTERM,
unless it is ignored (nohup).
"""

import os
import signal
import threading
import types

from absl import logging
import jax
from jax.experimental import multihost_utils

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.sigterm import say

_FIRST = b'\nspmd-tasks: Ctrl-C: stopping after this step, and what is done is kept; again: leaving at once.\n'
_SECOND = (
  b'\nspmd-tasks: interrupted twice: left at once; the same command goes on from the newest checkpoint, if any.\n'
)


class PreemptedError(Exception):
  """Ends a program after SIGTERM, from the point where the program noticed the signal."""


class PreemptionGuard:
  """Tells whether the job should save and leave. A second SIGTERM or SIGHUP changes nothing.

  Under jax.distributed, the handler that `jax.distributed.initialize` has installed receives the signal; so initialize
  first. In a single process, the guard installs its own handler and restores the previous one on leaving the context.
  A program that has nothing to save at first calls `start` later instead, and `stop` at its end.
  """

  def __init__(self):
    self._is_shared = jax.distributed.is_initialized()
    self._is_requested = self._is_interrupted = False
    self._num_asked = 0
    self._previous: dict[signal.Signals, object] = {}
    self._wakeup_fd = -1

  def __enter__(self) -> 'PreemptionGuard':
    self.start()
    return self

  def __exit__(self, *exc_info):
    self.stop()

  @property
  def exit_code(self) -> int:
    """The code of a process that has stopped: INTERRUPTED after its own Ctrl-C, else PREEMPTED."""
    return exit_codes.INTERRUPTED if self._is_interrupted else exit_codes.PREEMPTED

  @property
  def cause(self) -> str:
    """The first word of a message about it."""
    return 'Interrupted' if self._is_interrupted else 'Preempted'

  def start(self) -> None:
    """Keeps the signals for `should_stop` from now on. The second time this does nothing."""
    if self._previous:
      return
    if threading.current_thread() is not threading.main_thread():
      if self._is_shared:
        return
      raise UserError('a PreemptionGuard handles SIGTERM, which Python allows on the main thread only: enter it there.')
    # Else the thread of sigterm.py, if it wakes after `stop`, would end the process for a signal that came here.
    self._wakeup_fd = signal.set_wakeup_fd(-1)
    handlers = {signal.SIGINT: self._on_sigint, signal.SIGHUP: self._on_signal}
    if not self._is_shared:
      handlers[signal.SIGTERM] = self._on_signal
    for signum, handler in handlers.items():
      if signal.getsignal(signum) is not signal.SIG_IGN:
        self._previous[signum] = signal.signal(signum, handler)

  def stop(self) -> None:
    """Restores what the signals did before `start`, if that was called."""
    if self._previous:
      for signum, previous in self._previous.items():
        # None: a handler that was not set from Python, and cannot be put back from it.
        signal.signal(signum, signal.SIG_DFL if previous is None else previous)  # type: ignore[arg-type]
      self._previous = {}
      signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)

  def should_stop(self) -> bool:
    """Whether to save and leave now; true in every process from the same call on.

    Every process must call this at the same points of the program, such as after each step and each batch of an eval,
    because calls are counted. A call costs 27 us with jax.distributed, nothing without.
    """
    if self._is_shared and not self._is_requested:
      self._num_asked += 1
      self._is_requested = multihost_utils.reached_preemption_sync_point(self._num_asked)
      if self._is_requested:
        logging.warning('preemption: all processes stop here.')
    return self._is_requested

  def _on_signal(self, signum: int, frame: types.FrameType | None):
    # Nothing but the flag: a handler runs between any two bytecodes, and logging may hold its lock just there.
    del signum, frame
    if self._is_shared:
      os.kill(os.getpid(), signal.SIGTERM)  # which JAX's handler reports to the other processes
    else:
      self._is_requested = True

  def _on_sigint(self, signum: int, frame: types.FrameType | None):
    if self._is_interrupted:
      say(_SECOND)
      os._exit(exit_codes.INTERRUPTED)
    self._is_interrupted = True
    say(_FIRST)
    self._on_signal(signum, frame)
