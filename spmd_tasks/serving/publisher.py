"""Publisher: another checkpoint's weights while the server serves.

Publish, update and unpublish, as Pax's server had them. Sequences in slots end with the weights that they began with;
those of the queue wait until then, and get the new ones. Nothing is dropped, and no text is from two checkpoints.

One process reads a checkpoint while it serves. Several read it together, as one more of the operations that they all
run in the same order, and serve nothing meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import time
from typing import Any

from absl import logging

from spmd_tasks.checkpoints import CheckpointChoiceError
from spmd_tasks.decoding import Engine
from spmd_tasks.serving.json_fields import RequestError
from spmd_tasks.serving.service import Service

_Restore = Callable[[int | None], tuple[Any, int]]
_POLL_S = 0.02


class Publisher:
  """Publishes one at a time.

  Attributes:
    is_reading: whether a thread of its own is reading a checkpoint, which nothing can end.
  """

  def __init__(self, service: Service, engine: Engine, restore: _Restore | None, *, pauses: bool = False):
    """Publishes nothing yet.

    Args:
      service: whose model it is.
      engine: gets the weights, on its own thread.
      restore: a checkpoint's weights and its step; None is the newest. It runs on a thread of its own: reading files
        must not hold up the streams. None: nothing can be published.
      pauses: run `restore` on the engine's thread instead, between sequences. It must then raise a
        CheckpointChoiceError where all is as before; whatever else it raises ends the engine.
    """
    self._service = service
    self._engine = engine
    self._restore = restore
    self._pauses = pauses
    self._lock = asyncio.Lock()
    self._reader = ThreadPoolExecutor(1, thread_name_prefix='publisher')
    self.is_reading = False

  async def publish(self, step: int | None) -> int:
    """Serves the checkpoint of `step` from now on; returns its step.

    Raises:
      RequestError: there is no such checkpoint, or nothing can be published now.
    """
    restore = self._permission()
    async with self._lock:
      if not self._service.thread.is_ready:
        raise RequestError('the server is not ready.', status=503, code='not_ready', retry_after_s=5)
      try:
        with self._service.uncounted_compilations():
          restored = await (self._pause(restore, step) if self._pauses else self._go_on(restore, step))
      except (ValueError, RuntimeError) as error:
        logging.warning('nothing is published: %s', error)
        raise RequestError(f'step cannot be published: {error}', status=409, param='step') from error
      self._service.model = dataclasses.replace(self._service.model, step=restored, created=int(time.time()))
      self._service.is_published = True
      return restored

  async def unpublish(self) -> None:
    """Refuses new requests, lets what has begun end, and frees the weights."""
    self._permission()
    async with self._lock:
      self._service.is_published = False
      while not self._service.thread.is_idle:
        await asyncio.sleep(_POLL_S)
      await self._between_sequences(self._use, None)

  def _permission(self) -> _Restore:
    if self._service.settings.api_key is None or self._restore is None:
      raise RequestError('start the server with an API key to publish other weights.', status=403, code='no_admin')
    return self._restore

  async def _go_on(self, restore: _Restore, step: int | None) -> int:
    # Not asyncio's own executor, for whose threads the end of the loop would wait.
    loop = asyncio.get_running_loop()
    weights, restored = await loop.run_in_executor(self._reader, self._read, restore, step)
    await self._between_sequences(self._use, weights)
    return restored

  def _read(self, restore: _Restore, step: int | None) -> tuple[Any, int]:
    self.is_reading = True
    try:
      return restore(step)
    finally:
      self.is_reading = False

  async def _pause(self, restore: _Restore, step: int | None) -> int:
    def restore_and_use() -> int | CheckpointChoiceError:
      try:
        weights, restored = restore(step)
      except CheckpointChoiceError as error:
        return error
      self._use(weights)
      return restored

    outcome = await self._between_sequences(restore_and_use)
    if isinstance(outcome, CheckpointChoiceError):
      raise outcome
    return outcome

  def _use(self, weights: Any) -> None:
    self._engine.weights = weights

  async def _between_sequences(self, action: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wrap_future(self._service.thread.between_sequences(lambda: action(*arguments)))
