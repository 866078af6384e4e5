"""follow: what another process of a serving job does: on its own engine what process 0 does on its, see leading_engine.

    code = follow(engine, link, restore=restore, leave=leave)

A process that cannot do what process 0 asks for says so, and that ends the job. Only where it failed on process 0 too,
which then empties its slots, it goes on; process 0 waits until all have emptied theirs.
"""

from collections.abc import Callable
import contextlib
import queue
import signal
import threading
import types
from typing import Any

from absl import logging
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints import CheckpointChoiceError
from spmd_tasks.decoding import Engine, Launched
from spmd_tasks.serving.process_link import Link, to_line

_SETTLE_S = 0.5  # with nothing to do, until what was launched last is looked at
_RESET_LIMIT_S = 10.0  # for process 0 to notice that an operation has failed on it too
_MAX_REASON_CHARS = 500


def follow(
  engine: Engine,
  link: Link,
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> int:
  """Follows until process 0 says that the job ends; returns the exit code.

  SIGTERM and Ctrl-C are passed on to process 0, which ends the job in order.

  Args:
    engine: this process's own.
    link: to process 0.
    restore: a checkpoint's weights and its step, if every process calls it.
    leave: ends this process at once, with an exit code and a reason: process 0 has said so, or is gone. Called on
      another thread.

  Raises:
    whatever failed here and not on process 0, which has been told.
  """
  orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
  is_over = threading.Event()
  threading.Thread(target=_receive, args=(link, orders, leave, is_over), name='orders', daemon=True).start()
  try:
    _pass_signals_on(link)
    return _Follower(engine, orders, restore, on_reset=lambda: link.send(to_line({'reset': True}))).run()
  except BaseException as error:
    with contextlib.suppress(OSError):
      link.send(to_line({'error': f'{type(error).__name__}: {error}'[:_MAX_REASON_CHARS]}))
    raise
  finally:
    is_over.set()
    link.close()  # process 0 waits for it


class _Follower:
  def __init__(
    self,
    engine: Engine,
    orders: queue.SimpleQueue,
    restore: Callable[[int | None], tuple[Any, int]],
    *,
    on_reset: Callable[[], object],
  ):
    self._on_reset = on_reset
    self._engine = engine
    self._orders = orders
    self._restore = restore
    self._launched: Launched | None = None  # the last one: what it raises is not known yet
    self._num_received = 0
    self._operations: dict[str, Callable[..., Launched | None]] = {
      'warm_up': engine.warm_up,
      'reset': self._reset,
      'prefill': lambda chunks, score_prompts: engine.prefill(chunks, score_prompts=score_prompts),
      'step': lambda keep: engine.step(np.array(keep, np.bool_)),
      'restore': self._restore_weights,
      'drop_weights': lambda: setattr(engine, 'weights', None),
    }

  def run(self) -> int:
    while True:
      try:
        order = self._next()
        if order['name'] == 'end':
          return order['arguments'][0]
        launched = self._operations[order['name']](*order['arguments'])
        self._settle()
        self._launched = launched
      except Exception as error:
        self._skip_to_reset(error)

  def _next(self) -> dict[str, Any]:
    if self._launched is not None:
      try:
        return self._checked(self._orders.get(timeout=_SETTLE_S))
      except queue.Empty:
        self._settle()
    return self._checked(self._orders.get())

  def _checked(self, order: dict[str, Any]) -> dict[str, Any]:
    if order['number'] != self._num_received:
      raise RuntimeError(f'operation {order["number"]} came where {self._num_received} was due: this is a bug.')
    self._num_received += 1
    return order

  def _settle(self) -> None:
    """Waits for what was launched last, as process 0 does: an error that nobody reads would stay unknown."""
    launched, self._launched = self._launched, None
    if launched is not None:
      launched.read()

  def _skip_to_reset(self, error: Exception) -> None:
    """Goes on from process 0's reset after a failure there; raises `error` where there is none."""
    logging.warning('an operation failed; is it the same on process 0? %s: %s', type(error).__name__, error)
    order = {'name': ''}
    while order['name'] != 'reset':
      try:
        order = self._checked(self._orders.get(timeout=_RESET_LIMIT_S))
      except queue.Empty:
        raise error from None
      if order['name'] == 'end':
        raise error
    self._reset()

  def _reset(self) -> None:
    try:
      self._settle()
    except Exception as error:
      logging.warning('it failed as on process 0: %s: %s', type(error).__name__, error)
    self._engine.reset()
    self._on_reset()

  def _restore_weights(self, step: int | None) -> None:
    try:
      self._engine.weights, _ = self._restore(step)
    except CheckpointChoiceError as error:
      logging.warning('nothing is published: %s', error)


def _receive(
  link: Link, orders: queue.SimpleQueue, leave: Callable[[int, str], object], is_over: threading.Event
) -> None:
  for message in link:
    if 'leave' in message:
      leave(message['leave'], message['reason'])
      return
    orders.put(message)
    if message['name'] == 'end':
      return
  if not is_over.is_set():  # else this end closed the link, and says itself why
    leave(exit_codes.PEER_FAILED, 'process 0 is gone: it was killed, or its log says why it ended')


def _pass_signals_on(link: Link) -> None:
  def pass_on(number: int, frame: types.FrameType | None) -> None:
    del frame
    with contextlib.suppress(OSError):
      link.send(to_line({'signal': number}))

  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, pass_on)
