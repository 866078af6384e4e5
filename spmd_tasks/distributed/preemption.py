"""PreemptionGuard: turns SIGTERM, Ctrl-C and SIGHUP into a stop of every process at the same step.

    with PreemptionGuard() as guard:
      if guard.should_stop():  # after each step
        save(state)
        sys.exit(guard.exit_code)

A single process sets a flag. Several processes share JAX's preemption service: the process that receives the signal
reports it there, and the service chooses a call of `should_stop` that no process has reached yet.

A second Ctrl-C (SIGINT) ends the process at once. SIGHUP, which a closing terminal sends, acts as SIGTERM unless it is
ignored (nohup).
"""

import os
import signal
import threading
import types

from absl import logging
import jax
from jax.experimental import multihost_utils

from spmd_tasks import exit_codes
from spmd_tasks.sigterm import say

_FIRST = b'\nspmd-tasks: Ctrl-C: stopping after this step; finished work is kept. Press again to leave at once.\n'
_SECOND = (
  b'\nspmd-tasks: interrupted twice: left at once. The same command resumes from the newest checkpoint, if any.\n'
)


class PreemptedError(Exception):
  """Raised where a program notices SIGTERM and stops."""


class PreemptionGuard:
  """Tells whether the job should save and exit. A second SIGTERM or SIGHUP changes nothing.

  Under jax.distributed, the handler that `jax.distributed.initialize` installs receives the signal, so initialize
  first. In a single process, the guard installs its own handlers and restores the previous ones on exit. A program that
  has nothing to save at first calls `start` later instead, and `stop` at its end.
  """

  def __init__(self):
    self._is_shared = jax.distributed.is_initialized()
    self._is_requested = self._is_interrupted = False
    self._num_calls = 0
    self._previous: dict[signal.Signals, object] = {}
    self._wakeup_fd = -1

  def __enter__(self) -> 'PreemptionGuard':
    self.start()
    return self

  def __exit__(self, *exc_info):
    self.stop()

  @property
  def exit_code(self) -> int:
    """The exit code of a stopped process: INTERRUPTED after its own Ctrl-C, else PREEMPTED."""
    return exit_codes.INTERRUPTED if self._is_interrupted else exit_codes.PREEMPTED

  @property
  def cause(self) -> str:
    """The first word of a message about the stop."""
    return 'Interrupted' if self._is_interrupted else 'Preempted'

  def start(self) -> None:
    """Handles the signals from now on; does nothing if it was called before."""
    if self._previous:
      return
    if self._is_shared and threading.current_thread() is not threading.main_thread():
      return  # JAX's handler receives SIGTERM
    # Otherwise the thread of sigterm.py, if it wakes after `stop`, would end the process for a signal handled here.
    self._wakeup_fd = signal.set_wakeup_fd(-1)
    handlers = {signal.SIGINT: self._on_sigint, signal.SIGHUP: self._on_signal}
    if not self._is_shared:
      handlers[signal.SIGTERM] = self._on_signal
    for signum, handler in handlers.items():
      if signal.getsignal(signum) is not signal.SIG_IGN:
        self._previous[signum] = signal.signal(signum, handler)

  def stop(self) -> None:
    """Restores the handlers from before `start`, if that was called."""
    if self._previous:
      for signum, previous in self._previous.items():
        # None is a handler that was not installed from Python, and cannot be restored from Python.
        signal.signal(signum, signal.SIG_DFL if previous is None else previous)  # type: ignore[arg-type]
      self._previous = {}
      signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)

  def should_stop(self) -> bool:
    """Returns whether to save and exit now; true in every process from the same call on.

    Every process must call this at the same points of the program, such as after each step and each batch of an eval,
    because calls are counted. A call costs 27 us with jax.distributed, nothing without.
    """
    if self._is_shared and not self._is_requested:
      self._num_calls += 1
      self._is_requested = multihost_utils.reached_preemption_sync_point(self._num_calls)
      if self._is_requested:
        logging.warning('preemption: all processes stop here.')
    return self._is_requested

  def _on_signal(self, signum: int, frame: types.FrameType | None):
    # Does not log: a handler runs between any two bytecodes, and the interrupted code may hold logging's lock.
    del signum, frame
    if self._is_shared:
      os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler reports it to the other processes
    else:
      self._is_requested = True

  def _on_sigint(self, signum: int, frame: types.FrameType | None):
    if self._is_interrupted:
      say(_SECOND)
      os._exit(exit_codes.INTERRUPTED)
    self._is_interrupted = True
    say(_FIRST)
    self._on_signal(signum, frame)
