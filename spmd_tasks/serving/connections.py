"""Time limits on connections that uvicorn lacks: for a request to come, and for a client to read its answer.

    uvicorn.Config(app, http=limited_connections(settings, metrics), limit_concurrency=settings.max_connections)

uvicorn's `timeout_keep_alive` begins after a response and ends with the next byte. Here the time without a complete
header of a request is bounded, whatever bytes come, so that silent clients do not keep their places. Beyond
`max_connections` uvicorn answers 503. Fairness among clients is a proxy's task.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmd_tasks.serving.metrics import ServerMetrics
from spmd_tasks.serving.settings import ServerSettings


def limited_connections(settings: ServerSettings, metrics: ServerMetrics) -> type[asyncio.Protocol]:
  """Returns uvicorn's protocol of a connection with the limits of `settings`; `metrics` counts connections."""

  class Connection(H11Protocol):
    def __init__(self, **arguments: Any):
      super().__init__(**arguments)
      self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as H11Protocol has it
      super().connection_made(transport)
      metrics.open_connections.inc()
      self._start('no_header', settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
      metrics.open_connections.dec()
      for reason in list(self._timers):
        self._stop(reason)
      super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self._has_request:
        self._stop('no_header')

    def on_response_complete(self) -> None:
      super().on_response_complete()  # and begins the next request, if it has come already
      if not self._has_request:
        # uvicorn closes an idle connection; this is for one that sends, but no request, or that reads no answer.
        self._start('no_header', self.timeout_keep_alive + settings.header_timeout_s)

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
      self._start('not_read', settings.send_timeout_s)

    def resume_writing(self) -> None:
      super().resume_writing()
      self._stop('not_read')

    @property
    def _has_request(self) -> bool:
      return self.cycle is not None and not self.cycle.response_complete

    def _start(self, reason: str, seconds: float) -> None:
      self._stop(reason)
      self._timers[reason] = self.loop.call_later(seconds, self._give_up, reason)

    def _stop(self, reason: str) -> None:
      if reason in self._timers:
        self._timers.pop(reason).cancel()

    def _give_up(self, reason: str) -> None:
      metrics.closed_connections.labels(reason).inc()
      self.transport.abort()

  return Connection
