"""Prefetcher: reads batches ahead in a thread and pairs each batch with the input position after it."""

from collections.abc import Callable, Iterator
import contextlib
import math
import queue
import sys
import threading
import time
import traceback
from typing import Any, Generic, TypeVar

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base

T = TypeVar('T')

# How long close() waits for a thread that does not answer; it is a daemon thread, so the process can still end.
_JOIN_TIMEOUT_S = 5.0
_LOOK_PERIOD_S = 0.005


class Prefetcher(Generic[T]):
  """Iterates over (transform(batch), state), where `state` is the input's position after exactly this batch.

  `next` raises an error of the input or of `transform`, or StopIteration, after it has delivered the batches before.
  The Prefetcher owns the iterator from now on.

  Args:
    iterator: an input iterator, already at the position from which to continue.
    transform: called in the thread on each batch, such as the placement on devices; None leaves it as is.
    depth: how many batches to keep ready.
    timeout_s: seconds to wait for one batch; a longer wait raises a JobError that shows where the thread is stuck.
      None waits without limit.
    is_idle: tells whether the device has nothing else to do; only such waits count as `seconds_waited`.

  Attributes:
    seconds_waited: in `next`, while `is_idle`, all together: what the device has had to wait for the input.
  """

  def __init__(
    self,
    iterator: base.InputIterator,
    transform: Callable[[base.Batch], T] | None = None,
    depth: int = 2,
    timeout_s: float | None = None,
    is_idle: Callable[[], bool] = lambda: True,
  ):
    if depth < 1:
      raise UserError(f'depth {depth} must be at least 1.')
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
      del batch, item  # do not hold a batch's memory while the next one is read

  def _put(self, item: tuple[Any, base.State | None, BaseException | None]) -> None:
    while not self._stop.is_set():
      with contextlib.suppress(queue.Full):
        self._queue.put(item, timeout=0.1)
        return

  def __iter__(self) -> Iterator[tuple[T, base.State]]:
    return self

  def __next__(self) -> tuple[T, base.State]:
    """The next (transformed batch, state). Raises a JobError after timeout_s, or whatever the input raised."""
    if self._closed:
      raise UserError('this Prefetcher has been closed.')
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
    """Returns the next item; raises queue.Empty after `timeout_s`. Looks now and then whether the device is idle."""
    end = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s
    with contextlib.suppress(queue.Empty):
      return self._queue.get_nowait()
    while not self._is_idle() and time.monotonic() < end:
      with contextlib.suppress(queue.Empty):
        return self._queue.get(timeout=_LOOK_PERIOD_S)
    start = time.monotonic()
    try:
      return self._queue.get(timeout=None if self._timeout_s is None else max(0.0, end - start))
    finally:
      self.seconds_waited += time.monotonic() - start

  def _stack(self) -> str:
    frame = sys._current_frames().get(self._thread.ident or 0)
    return 'no thread' if frame is None else ''.join(traceback.format_stack(frame))

  def close(self) -> None:
    """Stops the thread and closes the input. Idempotent; bounded even when the input hangs."""
    if self._closed:
      return
    self._closed = True
    self._stop.set()
    with contextlib.suppress(queue.Empty):  # let a thread that waits for room in the queue see the stop
      while True:
        self._queue.get_nowait()
    self._thread.join(_JOIN_TIMEOUT_S)
    self._input.close()

  def __enter__(self) -> 'Prefetcher[T]':
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()
