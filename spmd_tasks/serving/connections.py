"""Limits on connections that uvicorn lacks: on the wait for a request, and for a client that does not read.

    limits = ConnectionLimits(settings, metrics)
    uvicorn.Config(app, http=limits.protocol, limit_concurrency=limits.max_connections + 1)

uvicorn's `timeout_keep_alive` begins after a response and ends with the next byte, and its `limit_concurrency` refuses
everybody while silent connections fill it. Here the time without a complete header of a request is bounded, whatever
bytes come, and beyond `max_connections` the connection that has waited longest for a request gives way to the new one.
If all have requests, uvicorn answers the new one's with 503. Fairness among clients is a proxy's task.
"""

import asyncio
import os
import resource
from typing import Any

from absl import logging
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmd_tasks.serving.metrics import ServerMetrics
from spmd_tasks.serving.settings import ServerSettings

_LOG_EVERY_S = 10
_REASONS = {
  'no_header': 'no complete header of a request in time',
  'not_read': 'the client has not read its answer in time',
  'gave_way': 'there are too many, and it has waited longest for a request',
}


class ConnectionLimits:
  """The connections of one server.

  Attributes:
    max_connections: how many may be open.
    waiting: those without a request in progress, the one that waits longest first.
  """

  def __init__(self, settings: ServerSettings, metrics: ServerMetrics):
    """Has no connections yet; `metrics` counts them."""
    self.settings, self.metrics = settings, metrics
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = settings.max_connections
    if most != resource.RLIM_INFINITY:  # a quarter of the free descriptors is left for files
      room = (most - len(os.listdir('/dev/fd'))) * 3 // 4
    self.max_connections = max(1, min(settings.max_connections, room))
    self.waiting: dict[_Connection, None] = {}

  def protocol(self, **arguments: Any) -> asyncio.Protocol:
    """Makes the protocol of one connection, as uvicorn asks for it."""
    return _Connection(self, **arguments)


class _Connection(H11Protocol):
  """uvicorn's connection, with limits on its silence and on its unread answers."""

  def __init__(self, limits: ConnectionLimits, **arguments: Any):
    super().__init__(**arguments)
    self._limits = limits
    self._timers: dict[str, asyncio.TimerHandle] = {}

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as H11Protocol has it
    super().connection_made(transport)
    self._limits.metrics.open_connections.inc()
    if len(self.connections) > self._limits.max_connections and self._limits.waiting:
      next(iter(self._limits.waiting)).give_up('gave_way')
    self._wait(self._limits.settings.header_timeout_s)

  def connection_lost(self, exc: Exception | None) -> None:
    self._limits.metrics.open_connections.dec()
    self._limits.waiting.pop(self, None)
    for reason in list(self._timers):
      self._stop(reason)
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    if self._has_request:
      self._limits.waiting.pop(self, None)
      self._stop('no_header')

  def on_response_complete(self) -> None:
    super().on_response_complete()  # and begins the next request, if it has come already
    if not self._has_request:
      # uvicorn closes an idle connection; this is for one that sends, but no request, or that reads no answer.
      self._wait(self.timeout_keep_alive + self._limits.settings.header_timeout_s)

  def send_400_response(self, msg: str) -> None:
    if self._has_request:  # its body breaks HTTP: uvicorn shall drop the application's answer
      self.cycle.disconnected = True
      self.cycle.message_event.set()
    if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
      super().send_400_response(msg)
    else:  # an answer has been sent, or begun
      self.transport.close()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._start('not_read', self._limits.settings.send_timeout_s)

  def resume_writing(self) -> None:
    super().resume_writing()
    self._stop('not_read')

  def give_up(self, reason: str) -> None:
    """Closes the connection at once."""
    logging.log_every_n_seconds(
      logging.WARNING, 'closed a connection of %s: %s', _LOG_EVERY_S, self.client, _REASONS[reason]
    )
    self._limits.metrics.closed_connections.labels(reason).inc()
    self._limits.waiting.pop(self, None)
    self.connections.discard(self)  # now, for the count; `connection_lost` comes later
    self.transport.abort()

  @property
  def _has_request(self) -> bool:
    return self.cycle is not None and not self.cycle.response_complete

  def _wait(self, seconds: float) -> None:
    self._limits.waiting[self] = None
    self._start('no_header', seconds)

  def _start(self, reason: str, seconds: float) -> None:
    self._stop(reason)
    self._timers[reason] = self.loop.call_later(seconds, self.give_up, reason)

  def _stop(self, reason: str) -> None:
    if reason in self._timers:
      self._timers.pop(reason).cancel()
