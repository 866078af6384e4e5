"""Publisher: replaces the weights by those of another checkpoint while the server runs.

    step = await publisher.publish(300)    # None: the newest checkpoint
    await publisher.unpublish()            # frees the weights and refuses requests until the next publish

Sequences in slots end with the weights with which they began; queued sequences wait for that and get the new weights.
No sequence is dropped, and no text comes from two checkpoints.

A single process goes on serving while it reads a checkpoint. Several processes read it together, as one of the
operations that they all run in the same order, and generate nothing meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import time
from typing import Any

from absl import logging

from spmd_tasks.checkpoints.manifest import CheckpointChoiceError
from spmd_tasks.decoding.engine_contract import Engine
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.scoring import TextScoring
from spmd_tasks.serving.service import Service

_Restore = Callable[[int | None], tuple[Any, int]]
_POLL_S = 0.02


class Publisher:
  """Publishes one checkpoint at a time; while `is_reading`, its own thread reads one, which nothing can interrupt."""

  def __init__(self, service: Service, engine: Engine | TextScoring, restore: _Restore | None, *, pauses: bool = False):
    """Publishes nothing yet.

    Args:
      service: the service whose model is replaced.
      engine: gets the new weights, on its own thread.
      restore: returns the (weights, step) of a checkpoint, None naming the newest, on a thread of its own, so that
        reading files does not delay the streams. If `restore` is None, nothing can be published.
      pauses: run `restore` on the engine's thread instead, between sequences. A CheckpointChoiceError then means that
        nothing has changed; any other error ends the engine.
    """
    self._service = service
    self._engine = engine
    self._restore = restore
    self._pauses = pauses
    self._lock = asyncio.Lock()
    self._reader = ThreadPoolExecutor(1, thread_name_prefix='publisher')
    self.is_reading = False

  async def publish(self, step: int | None) -> int:
    """Serves the checkpoint of `step` (None: the newest) from now on; returns its step.

    Raises a RequestError: there is no such checkpoint, or nothing can be published now.
    """
    self._check_key()
    async with self._lock:
      if not self._service.thread.is_ready:
        raise RequestError('the server is not ready.', status=503, code='not_ready', retry_after_s=5)
      try:
        with self._service.uncounted_compilations():
          restored = await (self._pause(step) if self._pauses else self._go_on(step))
      except (ValueError, RuntimeError) as error:
        logging.warning('nothing is published: %s', error)
        raise RequestError(f'step cannot be published: {error}', status=409, param='step') from error
      self._service.model = dataclasses.replace(self._service.model, step=restored, created=int(time.time()))
      self._service.is_published = True
      return restored

  async def unpublish(self) -> None:
    """Refuses new requests, waits until the running ones have ended, and frees the weights."""
    self._check_key()
    async with self._lock:
      await self._when_idle(self._use, None)

  async def _when_idle(self, action: Callable[..., Any], *arguments: Any) -> None:
    self._service.is_published = False
    while not self._service.thread.is_idle:
      await asyncio.sleep(_POLL_S)
    await self._between_sequences(action, *arguments)

  def _check_key(self) -> None:
    if self._service.settings.api_key is None or self._restore is None:
      raise RequestError(
        'only a server with an API key can publish other weights: start it with one.', status=403, code='no_admin'
      )

  async def _go_on(self, step: int | None) -> int:
    # Not asyncio's own executor: the end of the event loop would wait for its threads.
    weights, restored = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, step)
    await self._between_sequences(self._use, weights)
    return restored

  def _read(self, step: int | None) -> tuple[Any, int]:
    assert self._restore is not None
    self.is_reading = True
    try:
      return self._restore(step)
    finally:
      self.is_reading = False

  async def _pause(self, step: int | None) -> int:
    def restore_and_use() -> int | CheckpointChoiceError:
      try:
        weights, restored = self._read(step)
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
