"""EngineThread: the one thread that calls the engine, and the door through which all others reach it.

    thread = EngineThread(scheduler, warm_up=engine.warm_up, post=post, max_queued=64)
    thread.start()
    thread.submit(sequences)      # QueueFullError at once, never a wait
    thread.cancel(sequences)
    thread.stop()

`post` is called on the engine's thread, once per step, with all that the step brought; a server hands it on to its
event loop.
"""

from collections.abc import Callable
from concurrent.futures import Future
import threading
import time
from typing import Any

from absl import logging

from spmd_tasks.decoding import Delta, GeneratedSequence, Scheduler

# Failures without a step or a text that succeeds in between, after which the engine is given up.
_MAX_FAILURES = 3


class QueueFullError(Exception):
  """There is no room for more sequences now."""


class EngineEndedError(Exception):
  """The engine was stopped, or has failed for good."""


class EngineThread:
  """Runs a scheduler.

  Attributes:
    scheduler: what it counts may be read from any thread.
    is_ready: whether it is warm, and alive.
    error: what ended it, None while it is well.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    *,
    warm_up: Callable[[], None],
    post: Callable[[list[Delta]], None],
    max_queued: int,
    on_change: Callable[[], None] = lambda: None,
  ):
    """Starts nothing yet.

    Args:
      scheduler: nobody else's.
      warm_up: called on the thread before its first step.
      post: where deltas go.
      max_queued: how many sequences may wait for a slot.
      on_change: called on the thread, when it is warm and when it ends, asked or not.
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
    self._replacements: list[tuple[Callable[[], Any], Future[Any]]] = []
    self._is_stopping = False
    self._begun: float | None = None  # when the step began that is running
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Begins to warm up."""
    self._thread.start()

  def submit(self, sequences: list[GeneratedSequence]) -> None:
    """Puts all of the sequences into the queue.

    Raises:
      QueueFullError: they would be more than `max_queued`; none of them is in the queue.
      EngineEndedError: it takes nothing any more.
    """
    with self._changed:
      if self._is_stopping:
        raise EngineEndedError
      if self.num_queued + len(sequences) > self._max_queued:
        raise QueueFullError
      self._submitted += sequences
      self._changed.notify()

  def cancel(self, sequences: list[GeneratedSequence]) -> None:
    """Ends those of the sequences that go on still."""
    with self._changed:
      self._cancelled += sequences
      self._changed.notify()

  def between_sequences(self, action: Callable[[], Any]) -> Future[Any]:
    """What the engine's thread gets from `action`, called when no slot is in use; until then the queue waits.

    An exception of `action` ends the engine.

    Raises:
      EngineEndedError: it does nothing any more.
    """
    done: Future[Any] = Future()
    with self._changed:
      if self._is_stopping:
        raise EngineEndedError
      self._replacements.append((action, done))
      self._changed.notify()
    return done

  @property
  def num_queued(self) -> int:
    """Sequences that wait for a slot."""
    return len(self._submitted) + self.scheduler.num_queued

  @property
  def is_idle(self) -> bool:
    """Whether no sequence is waiting or running."""
    return not self._submitted and not self.scheduler.has_work

  @property
  def is_alive(self) -> bool:
    """Whether the thread has begun and not ended."""
    return self._thread.is_alive()

  @property
  def stuck_s(self) -> float:
    """For how many seconds the step that is running now has been; 0 between steps and while it warms up."""
    begun = self._begun
    return 0.0 if begun is None else time.monotonic() - begun

  def stop(self, limit_s: float = 10.0) -> None:
    """Ends all sequences as `cut`, and the thread; waits for it as long as that."""
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
      while self._take_orders():
        self._begun = time.monotonic()
        try:
          deltas = self.scheduler.advance(admit=not self._replacements)
          # A step is read after the launch of the next: two since the failure, or an end, show that all is well.
          if self.scheduler.num_steps > failed_at + 1 or any(d.finish_reason in ('stop', 'length') for d in deltas):
            num_failures = 0
        except Exception:
          num_failures += 1
          failed_at = self.scheduler.num_steps
          if num_failures >= _MAX_FAILURES:
            raise
          logging.exception('a step failed: its sequences end, those of the queue go on')
          deltas = self.scheduler.recover()
        self._begun = None
        if deltas:
          self._post(deltas)
        if not self.scheduler.num_active:
          self._replace()
    except BaseException as error:
      logging.exception('the engine ended')
      self.error = error
    finally:
      self.is_ready = False
      self._begun = None
      with self._changed:
        self._is_stopping = True
        self.scheduler.submit(self._submitted)
        self._submitted = []
        for _, done in self._replacements:
          done.set_exception(EngineEndedError())
      self._post(self.scheduler.end_all('cut' if self.error is None else 'error'))
      self._on_change()

  def _replace(self) -> None:
    with self._changed:
      replacements, self._replacements = self._replacements, []
    for action, done in replacements:
      try:
        done.set_result(action())
      except BaseException as error:
        done.set_exception(error)
        raise

  def _take_orders(self) -> bool:
    """Waits until there is something to do, and gives it to the scheduler; false: stop."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_stopping or self._submitted or self._cancelled or self._replacements or self.scheduler.has_work
      )
      self.scheduler.submit(self._submitted)
      cancelled = self._cancelled
      self._submitted, self._cancelled = [], []
      is_stopping = self._is_stopping
    self.scheduler.end(cancelled, 'cancelled')
    return not is_stopping
