"""PreemptionGuard: turns SIGTERM into one point of the program at which every process stops.

Usage:

    with PreemptionGuard() as guard:
      for step in range(first_step, num_steps):
        state = train_step(state, batch)
        if guard.should_stop():
          save(state)
          sys.exit(exit_codes.PREEMPTED)

A single process keeps a flag. Several processes share JAX's preemption service: the process that gets the signal
reports it there, and the service chooses a call of `should_stop` that no process has made yet.
"""

import signal
import threading
import types

from absl import logging
import jax
from jax.experimental import multihost_utils

from spmd_tasks.errors import UserError


class PreemptionGuard:
  """Tells whether the job should save and leave. A second SIGTERM changes nothing.

  Under jax.distributed, the handler that `jax.distributed.initialize` has installed receives the signal; so initialize
  first. In a single process, the guard installs its own handler and restores the previous one on leaving the context.
  A program that has nothing to save at first calls `start` later instead, and `stop` at its end.
  """

  def __init__(self):
    self._is_shared = jax.distributed.is_initialized()
    self._is_requested = False
    self._num_asked = 0
    self._is_started = False
    self._previous: object = None
    self._wakeup_fd = -1

  def __enter__(self) -> 'PreemptionGuard':
    self.start()
    return self

  def __exit__(self, *exc_info):
    self.stop()

  def start(self) -> None:
    """Keeps SIGTERM for `should_stop` from now on. The second time this does nothing."""
    if not self._is_shared and not self._is_started:
      if threading.current_thread() is not threading.main_thread():
        raise UserError(
          'a PreemptionGuard handles SIGTERM, which Python allows on the main thread only: enter it there.'
        )
      # Else the thread of sigterm.py, if it wakes after `stop`, would end the process for a signal that came here.
      self._wakeup_fd = signal.set_wakeup_fd(-1)
      self._previous = signal.signal(signal.SIGTERM, self._on_signal)
      self._is_started = True

  def stop(self) -> None:
    """Restores what SIGTERM did before `start`, if that was called."""
    if self._is_started:
      self._is_started = False
      # None: a handler that was not set from Python, and cannot be put back from it.
      signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)  # type: ignore[arg-type]
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
    self._is_requested = True
