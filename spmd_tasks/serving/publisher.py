"""Publisher: another checkpoint's weights while the server serves.

Publish, update and unpublish, as Pax's server had them. Sequences in slots end with the weights that they began with;
those of the queue wait until then, and get the new ones. Nothing is dropped, and no text is from two checkpoints.
"""

import asyncio
from collections.abc import Callable
import dataclasses
import time
from typing import Any

from absl import logging

from spmd_tasks.decoding.engine_contract import Engine
from spmd_tasks.serving.json_fields import RequestError
from spmd_tasks.serving.service import Service

_POLL_S = 0.02


class Publisher:
  """Publishes one at a time."""

  def __init__(self, service: Service, engine: Engine, restore: Callable[[int | None], tuple[Any, int]] | None):
    """Publishes nothing yet.

    Args:
      service: whose model it is.
      engine: gets the weights, on its own thread.
      restore: a checkpoint's weights and its step; None is the newest. It runs on a thread of its own: reading files
        must not hold up the streams. None: nothing can be published.
    """
    self._service = service
    self._engine = engine
    self._restore = restore
    self._lock = asyncio.Lock()

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
          weights, restored = await asyncio.to_thread(restore, step)
      except (ValueError, RuntimeError) as error:
        logging.warning('nothing is published: %s', error)
        raise RequestError(f'step cannot be published: {error}', status=409, param='step') from error
      await self._replace(weights)
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
      await self._replace(None)

  def _permission(self) -> Callable[[int | None], tuple[Any, int]]:
    if self._service.settings.api_key is None or self._restore is None:
      raise RequestError('start the server with an API key to publish other weights.', status=403, code='no_admin')
    return self._restore

  async def _replace(self, weights: Any) -> None:
    def replace():
      self._engine.weights = weights

    await asyncio.wrap_future(self._service.thread.between_sequences(replace))
