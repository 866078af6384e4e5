"""The other processes' side: runs on its own engine each operation that process 0 runs on its engine (leader.py).

    code = follow(engine, link, restore=restore, leave=leave)

An operation that fails ends the job: the process reports its error and raises.
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
from spmd_tasks.checkpoints.manifest import CheckpointChoiceError
from spmd_tasks.decoding.engine_contract import Engine, Launched
from spmd_tasks.distributed.links import Link, LinkError
from spmd_tasks.serving.multi_process.messages import from_message, to_message, unpack_masks

_SETTLE_S = 0.5  # without a new operation, until the outputs of the last launch are read
_MAX_REASON_CHARS = 500


def follow(
  engine: Engine,
  link: Link,
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> int:
  """Runs process 0's operations until process 0 ends the job; returns the exit code.

  Passes SIGTERM and Ctrl-C on to process 0, which ends the job in order.

  Args:
    engine: this process's own engine.
    link: the link to process 0.
    restore: returns a checkpoint's (weights, step) when every process calls it.
    leave: ends this process at once, given an exit code and a reason, because process 0 orders it or is gone. Called on
      another thread.

  Raises:
    whatever failed here, after process 0 was told.
  """
  operations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
  is_over = threading.Event()
  threading.Thread(target=_receive, args=(link, operations, leave, is_over), name='operations', daemon=True).start()
  try:
    _pass_signals_on(link)
    return _Follower(engine, operations, restore).run()
  except BaseException as error:
    with contextlib.suppress(OSError):
      link.send(to_message({'error': f'{type(error).__name__}: {error}'[:_MAX_REASON_CHARS]}))
    raise
  finally:
    is_over.set()
    link.close()  # process 0 waits for it


class _Follower:
  def __init__(self, engine: Engine, operations: queue.SimpleQueue, restore: Callable[[int | None], tuple[Any, int]]):
    self._engine = engine
    self._operations = operations
    self._restore = restore
    self._launched: Launched | None = None  # the last launch, whose error is not known yet
    self._num_received = 0
    self._calls: dict[str, Callable[..., Launched | None]] = {
      'warm_up': engine.warm_up,
      'prefill': lambda chunks, score_prompts, masks: engine.prefill(
        chunks, score_prompts=score_prompts, masks=unpack_masks(masks)
      ),
      'step': lambda keep, masks, grown, drafts: engine.step(
        np.array(keep, np.bool_), unpack_masks(masks), grown, dict(drafts)
      ),
      'restore': self._restore_weights,
      'drop_weights': lambda: setattr(engine, 'weights', None),
    }

  def run(self) -> int:
    while (operation := self._next())['name'] != 'end':
      launched = self._calls[operation['name']](*operation['arguments'])
      self._settle()
      self._launched = launched
    return operation['arguments'][0]

  def _next(self) -> dict[str, Any]:
    try:
      operation = self._operations.get(timeout=None if self._launched is None else _SETTLE_S)
    except queue.Empty:
      self._settle()
      operation = self._operations.get()
    if operation['number'] != self._num_received:
      raise RuntimeError(f'received operation {operation["number"]} instead of {self._num_received}: this is a bug.')
    self._num_received += 1
    return operation

  def _settle(self) -> None:
    """Reads the outputs of the last launch, as process 0 does, so that its error becomes known."""
    launched, self._launched = self._launched, None
    if launched is not None:
      launched.read()

  def _restore_weights(self, step: int | None) -> None:
    try:
      self._engine.weights, _ = self._restore(step)
    except CheckpointChoiceError as error:
      logging.warning('the weights stay as they are: %s', error)


def _receive(
  link: Link, operations: queue.SimpleQueue, leave: Callable[[int, str], object], is_over: threading.Event
) -> None:
  reason = 'is gone: it was killed, or its log says why it ended'
  try:
    for message in map(from_message, link):
      if 'leave' in message:
        leave(message['leave'], message['reason'])
        return
      operations.put(message)
      if message['name'] == 'end':
        return
  except LinkError as error:
    reason = str(error)
  if not is_over.is_set():  # otherwise this process closed the link itself, and reports why
    leave(exit_codes.PEER_FAILED, f'process 0 {reason}')


def _pass_signals_on(link: Link) -> None:
  def send(number: int) -> None:
    with contextlib.suppress(OSError):
      link.send(to_message({'signal': number}))

  def pass_on(number: int, frame: types.FrameType | None) -> None:
    del frame
    threading.Thread(target=send, args=(number,), daemon=True).start()  # the handler may have interrupted a send

  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, pass_on)
