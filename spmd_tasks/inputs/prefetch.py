"""Prefetcher: reads batches ahead in a thread, and pairs each batch with the input's position after it."""

from collections.abc import Callable, Iterator
import contextlib
import math
import queue
import sys
import threading
import time
import traceback
from typing import Any, Generic, TypeVar

from spmd_tasks.errors import JobError
from spmd_tasks.inputs import base

T = TypeVar('T')

_JOIN_TIMEOUT_S = 5.0  # how long close() waits for a stuck thread; it is a daemon thread, so the process can still exit
_POLL_PERIOD_S = 0.005


class Prefetcher(Generic[T]):
  """Iterates over (transform(batch), state) pairs; `state` is the input's position after exactly this batch.

  If the input or `transform` raises an error, `next` first returns the batches before it and then raises the error. The
  Prefetcher owns the iterator and closes it.

  Args:
    iterator: an input iterator at the position from which to continue.
    transform: called in the thread on each batch, for example to place it on devices.
    depth: how many batches to read ahead.
    timeout_s: how many seconds to wait for a batch before a JobError that shows where the thread is stuck; None waits
      forever.
    is_idle: whether the device has finished its work.

  Attributes:
    seconds_waited: how long `next` has waited in total while `is_idle()`: how long the device waited for the input.
  """

  def __init__(
    self,
    iterator: base.InputIterator,
    transform: Callable[[base.Batch], T] | None = None,
    depth: int = 2,
    timeout_s: float | None = None,
    is_idle: Callable[[], bool] = lambda: True,
  ):
    self._input, self._transform = iterator, transform
    self._timeout_s, self._is_idle = timeout_s, is_idle
    self._queue: queue.Queue[tuple[Any, base.State | None, BaseException | None]] = queue.Queue(depth)
    self._stop = threading.Event()
    self._ended: BaseException | None = None
    self._closed = False
    self.seconds_waited = 0.0
    self._thread = threading.Thread(target=self._run, name='input-prefetch', daemon=True)
    self._thread.start()

  def _run(self) -> None:
    while not self._stop.is_set():
      try:
        batch = next(self._input)
        state = self._input.get_state()
        item = (batch if self._transform is None else self._transform(batch), state, None)
      except BaseException as e:
        self._put((None, None, e))
        return
      self._put(item)
      del batch, item  # frees the batch's memory while the next one is read

  def _put(self, item: tuple[Any, base.State | None, BaseException | None]) -> None:
    while not self._stop.is_set():
      with contextlib.suppress(queue.Full):
        self._queue.put(item, timeout=0.1)
        return

  def __iter__(self) -> Iterator[tuple[T, base.State]]:
    return self

  def __next__(self) -> tuple[T, base.State]:
    """Returns the next (transformed batch, state). Raises a JobError after `timeout_s`, or the input's error."""
    assert not self._closed, 'the Prefetcher is closed'
    if self._ended is not None:
      raise self._ended
    try:
      value, state, error = self._get()
    except queue.Empty:
      self._ended = JobError(
        f'the input has produced no batch for {self._timeout_s:g} s. If it is only slow, raise the timeout or add '
        f'workers. Its thread is at:\n{self._stack()}'
      )
      raise self._ended from None
    if error is not None:
      self._ended = error
      raise error
    assert state is not None
    return value, state

  def _get(self) -> tuple[Any, base.State | None, BaseException | None]:
    """Returns the next item; raises queue.Empty after `timeout_s`. Times the wait once the device is idle."""
    end = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s
    with contextlib.suppress(queue.Empty):
      return self._queue.get_nowait()
    while not self._is_idle() and time.monotonic() < end:
      with contextlib.suppress(queue.Empty):
        return self._queue.get(timeout=_POLL_PERIOD_S)
    start = time.monotonic()
    try:
      return self._queue.get(timeout=None if self._timeout_s is None else max(0.0, end - start))
    finally:
      self.seconds_waited += time.monotonic() - start

  def _stack(self) -> str:
    frame = sys._current_frames().get(self._thread.ident or 0)
    return 'no thread' if frame is None else ''.join(traceback.format_stack(frame))

  def close(self) -> None:
    """Stops the thread and closes the input, within bounded time even if the input hangs. May be called twice."""
    if self._closed:
      return
    self._closed = True
    self._stop.set()
    with contextlib.suppress(queue.Empty):  # so that a thread that waits for room in the queue notices the stop
      while True:
        self._queue.get_nowait()
    self._thread.join(_JOIN_TIMEOUT_S)
    self._input.close()

  def __enter__(self) -> 'Prefetcher[T]':
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()
