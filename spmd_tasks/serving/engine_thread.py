"""EngineThread: owns the engine. Other threads talk to it only through submit, cancel, between_sequences and stop.

    thread = EngineThread(scheduler, warm_up=engine.warm_up, post=post, max_queued=64)
    thread.start()
    thread.submit(sequences)      # never waits; raises a RequestError instead
    thread.cancel(sequences)
    thread.stop()

After each step the engine's thread calls `post` with all deltas of the step; a server passes them to its event loop.
"""

from collections.abc import Callable
from concurrent.futures import Future
import threading
import time
from typing import Any

from absl import logging

from spmd_tasks.decoding.generated_sequence import Delta, GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.errors import JobError
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.scoring import TextScoring

# The engine ends after this many failures with no successful step in between.
_MAX_FAILURES = 3


class EngineThread:
  """Runs a scheduler.

  Attributes:
    scheduler: any thread may read its counters.
    is_ready: whether the engine is warm and alive.
    error: the error that ended the engine, or None.
  """

  def __init__(
    self,
    scheduler: Scheduler | TextScoring,
    *,
    warm_up: Callable[[], None],
    post: Callable[[list[Delta]], None],
    max_queued: int,
    on_change: Callable[[], None] = lambda: None,
  ):
    """Prepares the thread; `start` starts it.

    Args:
      scheduler: used by this thread only.
      warm_up: called on the thread before the first step.
      post: called on the thread with the deltas of each step.
      max_queued: how many sequences may wait for a slot.
      on_change: called on the thread when the engine is warm, and when it ends for any reason.
    """
    self.scheduler = scheduler
    self.is_ready = False
    self.error: BaseException | None = None
    self._warm_up = warm_up
    self._post = post
    self._on_change = on_change
    self._max_queued = max_queued
    self._changed = threading.Condition()
    # Guarded by _changed:
    self._submitted: list[GeneratedSequence] = []
    self._cancelled: list[GeneratedSequence] = []
    self._actions: list[tuple[Callable[[], Any], Future[Any]]] = []  # to run between sequences
    self._is_stopping = False
    self._begun: float | None = None  # when the running step began
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Starts the thread, which first warms the engine up."""
    self._thread.start()

  def submit(self, sequences: list[GeneratedSequence]) -> None:
    """Queues all of the sequences; raises a RequestError where too many wait, or the engine has ended."""
    with self._changed:
      self._check_running()
      if self.num_queued + len(sequences) > self._max_queued:
        message = f'{self.num_queued} texts are waiting already: try again later.'
        raise RequestError(message, status=429, code='queue_full', retry_after_s=1)
      self._submitted += sequences
      self._changed.notify()

  def cancel(self, sequences: list[GeneratedSequence]) -> None:
    """Ends the sequences that have not ended yet, as `cancelled`."""
    with self._changed:
      self._cancelled += sequences
      self._changed.notify()

  def between_sequences(self, action: Callable[[], Any]) -> Future[Any]:
    """Has the engine's thread call `action` when no slot is in use; until then no queued sequence gets a slot.

    The future has its result, or a RequestError if the engine has ended. An exception of `action` ends the engine.
    """
    done: Future[Any] = Future()
    with self._changed:
      self._check_running()
      self._actions.append((action, done))
      self._changed.notify()
    return done

  def _check_running(self) -> None:
    if self._is_stopping:
      raise _going_down()

  @property
  def num_queued(self) -> int:
    """Number of sequences that wait for a slot."""
    return len(self._submitted) + self.scheduler.num_queued

  @property
  def is_idle(self) -> bool:
    """Whether no sequence waits or runs."""
    return not self._submitted and not self.scheduler.has_work

  @property
  def is_alive(self) -> bool:
    """Whether the thread has started and not ended."""
    return self._thread.is_alive()

  @property
  def stuck_s(self) -> float:
    """Seconds since the running step began; 0 between steps and during the warm-up."""
    begun = self._begun
    return 0.0 if begun is None else time.monotonic() - begun

  def stop(self, limit_s: float = 10.0) -> None:
    """Ends all sequences as `cut`, and the thread; waits at most `limit_s` seconds for its end."""
    with self._changed:
      self._is_stopping = True
      self._changed.notify()
    if self._thread.ident is not None:
      self._thread.join(limit_s)

  def _run(self) -> None:
    try:
      self._warm_up()
      self.is_ready = True
      self._on_change()
      num_failures = failed_at = 0
      while self._take_submitted():
        self._begun = time.monotonic()
        try:
          deltas = self.scheduler.advance(admit=not self._actions)
          # A step's error shows one step later: two steps since the failure, or a finished text, prove a success.
          if self.scheduler.num_steps > failed_at + 1 or any(d.finish_reason in ('stop', 'length') for d in deltas):
            num_failures = 0
        except JobError:  # another process is lost: no step can succeed
          raise
        except Exception:
          num_failures += 1
          failed_at = self.scheduler.num_steps
          if num_failures >= _MAX_FAILURES:
            raise
          logging.exception('a step failed: the sequences in slots end, the queue goes on')
          deltas = self.scheduler.recover()
        self._begun = None
        if deltas:
          self._post(deltas)
        if not self.scheduler.num_active:
          self._run_actions()
    except BaseException as error:
      logging.error('the engine ended: %s', error, exc_info=None if isinstance(error, JobError) else error)
      self.error = error
    finally:
      self.is_ready = False
      self._begun = None
      with self._changed:
        self._is_stopping = True
        self.scheduler.submit(self._submitted)
        self._submitted = []
        for _, done in self._actions:
          done.set_exception(_going_down())
      self._post(self.scheduler.end_all('cut' if self.error is None else 'error'))
      self._on_change()

  def _run_actions(self) -> None:
    with self._changed:
      actions, self._actions = self._actions, []
    for action, done in actions:
      try:
        done.set_result(action())
      except BaseException as error:
        done.set_exception(error)
        raise

  def _take_submitted(self) -> bool:
    """Waits for work, and gives submitted and cancelled sequences to the scheduler; returns False to stop."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_stopping or self._submitted or self._cancelled or self._actions or self.scheduler.has_work
      )
      self.scheduler.submit(self._submitted)
      cancelled = self._cancelled
      self._submitted, self._cancelled = [], []
      is_stopping = self._is_stopping
    self.scheduler.end(cancelled, 'cancelled')
    return not is_stopping


def _going_down() -> RequestError:
  return RequestError('the server is going down.', status=503, code='not_ready', retry_after_s=5)
