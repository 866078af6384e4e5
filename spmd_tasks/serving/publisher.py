"""Replaces the weights of a running server with another checkpoint.

    step = await publisher.publish(300)    # None: the newest checkpoint
    await publisher.unpublish()            # frees the weights and rejects requests until the next publish

Running sequences finish with their weights; queued sequences wait for them, and then use the new weights. No sequence
is dropped, and no text mixes two checkpoints.

A single process keeps serving while it reads a checkpoint. Several processes read it together, as one of the operations
that all of them run in the same order, and pause generation meanwhile.
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
from spmd_tasks.serving.scoring import ScoringEngine
from spmd_tasks.serving.service import Service

_Restore = Callable[[int | None], tuple[Any, int]]
_POLL_S = 0.02


class Publisher:
  """Publishes one checkpoint at a time.

  Attributes:
    is_reading: whether a thread is reading a checkpoint, which cannot be interrupted.
  """

  def __init__(
    self, service: Service, engine: Engine | ScoringEngine, restore: _Restore | None, *, pauses: bool = False
  ):
    """Initializes the publisher.

    Args:
      service: the service that serves the model.
      engine: the engine that gets the new weights.
      restore: returns (weights, step) of the checkpoint of a step, or of the newest for None. It runs on a separate
        thread, so that reading files does not delay the streams. If `restore` is None, nothing can be published.
      pauses: whether to run `restore` on the engine's thread instead, while no slot is in use. A CheckpointChoiceError
        then means that nothing has changed; any other error ends the engine.
    """
    self._service = service
    self._engine = engine
    self._restore = restore
    self._pauses = pauses
    self._lock = asyncio.Lock()
    self._reader = ThreadPoolExecutor(1, thread_name_prefix='publisher')
    self.is_reading = False

  async def publish(self, step: int | None) -> int:
    """Switches to the checkpoint of `step`, None for the newest; returns its step.

    Raises:
      RequestError: there is no such checkpoint, the server is not ready, or it has no API key.
    """
    self._check_key()
    async with self._lock:
      if not self._service.thread.is_ready:
        raise RequestError('the server is not ready.', status=503, code='not_ready', retry_after_s=5)
      try:
        with self._service.uncounted_compilations():
          restored = await (self._publish_paused(step) if self._pauses else self._publish_while_serving(step))
      except (ValueError, RuntimeError) as error:
        logging.warning('publishing failed, and the weights stay as they are: %s', error)
        raise RequestError(f'step cannot be published: {error}', status=409, param='step') from error
      self._service.model = dataclasses.replace(self._service.model, step=restored, created=int(time.time()))
      self._service.is_published = True
      return restored

  async def unpublish(self) -> None:
    """Rejects new requests, waits for the running ones, and frees the weights."""
    self._check_key()
    async with self._lock:
      self._service.is_published = False
      while not self._service.thread.is_idle:
        await asyncio.sleep(_POLL_S)
      await self._between_sequences(self._set_weights, None)

  def _check_key(self) -> None:
    if self._service.settings.api_key is None or self._restore is None:
      raise RequestError(
        'publishing needs a server with an API key: start it with --api_key_file.', status=403, code='no_admin'
      )

  async def _publish_while_serving(self, step: int | None) -> int:
    # Not asyncio's default executor, because the event loop would wait for its threads at the end.
    weights, restored = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, step)
    await self._between_sequences(self._set_weights, weights)
    return restored

  def _read(self, step: int | None) -> tuple[Any, int]:
    assert self._restore is not None
    self.is_reading = True
    try:
      return self._restore(step)
    finally:
      self.is_reading = False

  async def _publish_paused(self, step: int | None) -> int:
    def restore_and_set() -> int | CheckpointChoiceError:
      try:
        weights, restored = self._read(step)
      except CheckpointChoiceError as error:
        return error
      self._set_weights(weights)
      return restored

    outcome = await self._between_sequences(restore_and_set)
    if isinstance(outcome, CheckpointChoiceError):
      raise outcome
    return outcome

  def _set_weights(self, weights: Any) -> None:
    self._engine.weights = weights

  async def _between_sequences(self, action: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wrap_future(self._service.thread.between_sequences(lambda: action(*arguments)))
