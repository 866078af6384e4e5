"""The thread that runs the engine; other threads only submit and cancel sequences.

    thread = EngineThread(scheduler, warm_up=engine.warm_up, post=post, max_queued=64)
    thread.start()
    thread.submit(sequences)      # never blocks; raises a RequestError if the queue is full
    thread.cancel(sequences)
    thread.stop()

After each step the thread calls `post` with the step's deltas; a server passes them to its event loop.
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
from spmd_tasks.serving.scoring import ScoringEngine

# The thread ends after this many failures without a successful step in between.
_MAX_FAILURES = 3
_STOP_LIMIT_S = 10.0


class EngineThread:
  """Runs a scheduler on a thread of its own.

  Attributes:
    scheduler: the scheduler; any thread may read its counters.
    is_ready: whether the engine is warm and running.
    error: the error that ended the thread, or None.
  """

  def __init__(
    self,
    scheduler: Scheduler | ScoringEngine,
    *,
    warm_up: Callable[[], None],
    post: Callable[[list[Delta]], None],
    max_queued: int,
    on_change: Callable[[], None] = lambda: None,
  ):
    """Initializes the thread; `start` starts it.

    Args:
      scheduler: the scheduler, which only this thread may call.
      warm_up: called on the thread before the first step.
      post: called on the thread with the deltas of each step.
      max_queued: maximum number of sequences waiting for a slot.
      on_change: called on the thread when the engine is warm, and when the thread ends.
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
    self._actions: list[tuple[Callable[[], Any], Future[Any]]] = []  # to run while no slot is in use
    self._is_stopping = False
    self._step_start: float | None = None  # time.monotonic() at the start of the running step
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Starts the thread, which first warms up the engine."""
    self._thread.start()

  def submit(self, sequences: list[GeneratedSequence]) -> None:
    """Queues the sequences; raises a RequestError if the queue is full or the engine has stopped."""
    with self._changed:
      self._check_running()
      if self.num_queued + len(sequences) > self._max_queued:
        message = f'the queue is full ({self.num_queued} sequences are waiting): try again later.'
        raise RequestError(message, status=429, code='queue_full', retry_after_s=1)
      self._submitted += sequences
      self._changed.notify()

  def cancel(self, sequences: list[GeneratedSequence]) -> None:
    """Ends the sequences that have not ended yet, with finish_reason `cancelled`."""
    with self._changed:
      self._cancelled += sequences
      self._changed.notify()

  def between_sequences(self, action: Callable[[], Any]) -> Future[Any]:
    """Calls `action` on the engine's thread once no slot is in use; until then, no queued sequence gets a slot.

    Returns a future of the result; it raises a RequestError if the engine has stopped. An exception in `action` ends
    the engine.
    """
    done: Future[Any] = Future()
    with self._changed:
      self._check_running()
      self._actions.append((action, done))
      self._changed.notify()
    return done

  def _check_running(self) -> None:
    if self._is_stopping:
      raise _shutting_down()

  @property
  def num_queued(self) -> int:
    """Number of sequences waiting for a slot."""
    return len(self._submitted) + self.scheduler.num_queued

  @property
  def is_idle(self) -> bool:
    """Whether no sequence is waiting or running."""
    return not self._submitted and not self.scheduler.has_work

  @property
  def is_alive(self) -> bool:
    """Whether the thread is running."""
    return self._thread.is_alive()

  @property
  def stuck_s(self) -> float:
    """Duration of the running step in seconds; 0 between steps and during the warm-up."""
    start = self._step_start
    return 0.0 if start is None else time.monotonic() - start

  def stop(self) -> None:
    """Ends all sequences with finish_reason `cut`, and stops the thread; waits for this at most 10 seconds."""
    with self._changed:
      self._is_stopping = True
      self._changed.notify()
    if self._thread.ident is not None:
      self._thread.join(_STOP_LIMIT_S)

  def _run(self) -> None:
    try:
      self._warm_up()
      self.is_ready = True
      self._on_change()
      num_failures = failed_at = 0
      while self._take_submitted():
        self._step_start = time.monotonic()
        try:
          deltas = self.scheduler.advance(admit=not self._actions)
          # The error of a step may surface one step later, so only two steps since the failure, or a finished sequence,
          # prove success.
          if self.scheduler.num_steps > failed_at + 1 or any(d.finish_reason in ('stop', 'length') for d in deltas):
            num_failures = 0
        except JobError:  # another process is lost, so no step can succeed
          raise
        except Exception:
          num_failures += 1
          failed_at = self.scheduler.num_steps
          if num_failures >= _MAX_FAILURES:
            raise
          logging.exception('a step failed: all sequences in slots end; queued sequences continue')
          deltas = self.scheduler.recover()
        self._step_start = None
        if deltas:
          self._post(deltas)
        if not self.scheduler.num_active:
          self._run_actions()
    except BaseException as error:
      logging.error('the engine failed: %s', error, exc_info=None if isinstance(error, JobError) else error)
      self.error = error
    finally:
      self.is_ready = False
      self._step_start = None
      with self._changed:
        self._is_stopping = True
        self.scheduler.submit(self._submitted)
        self._submitted = []
        for _, done in self._actions:
          done.set_exception(_shutting_down())
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
    """Waits for work and passes submitted and cancelled sequences to the scheduler; returns False to stop."""
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


def _shutting_down() -> RequestError:
  return RequestError('the server is shutting down.', status=503, code='not_ready', retry_after_s=5)
