"""Limits on connections, which hold before any request is read and any key is checked.

    limits = ConnectionLimits(settings, metrics)
    uvicorn.Config(app, http=limits.protocol)

uvicorn bounds none of this: its `timeout_keep_alive` begins after a response and ends with the next byte, and its
`limit_concurrency` refuses everybody while idle connections fill it. Here, the time without a complete header of a
request is bounded, whatever bytes come; so is the time in which a client must read. When there are too many
connections, of one peer or in all, the one that has waited longest for its first request gives way to the new one: a
client that asks at once is served however many others are silent. Only when all have requests is the new one refused.
"""

import asyncio
from collections import Counter
import ipaddress
import logging as stdlib_logging
import os
import resource
import time
from typing import Any

from absl import logging
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmd_tasks.errors import UserError
from spmd_tasks.serving.metrics import ServerMetrics
from spmd_tasks.serving.settings import ServerSettings

_MIN_CONNECTIONS = 8
_LOG_EVERY_S = 10
_BUSY = (
  b'HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\r\n'
  b'{"error": {"message": "the server has too many connections.", "type": "server_error", "param": null, '
  b'"code": "too_many_connections"}}'
)


class ConnectionLimits:
  """The connections of one server."""

  def __init__(self, settings: ServerSettings, metrics: ServerMetrics):
    """Has no connections yet.

    Args:
      settings: the server's limits.
      metrics: counts the connections, those that are open and those that were closed.

    Raises:
      UserError: the process may not open enough files.
    """
    stdlib_logging.getLogger('uvicorn.error').addFilter(_FEW_WARNINGS)
    self.settings = settings
    self._metrics = metrics
    self._num_closed = 0
    self._max = min(settings.max_connections, _room_for_connections())
    self._connections: Counter[str] = Counter()  # by peer
    # Those without a request in progress, the oldest first: before their first request, and after it.
    self._silent: dict[_Connection, None] = {}
    self._idle: dict[_Connection, None] = {}

  def protocol(self, **arguments: Any) -> asyncio.Protocol:
    """Makes the protocol of one connection, as uvicorn asks for it."""
    return _Connection(self, **arguments)

  def admit(self, connection: '_Connection') -> bool:
    """Takes a new connection if there is room, or if a waiting connection can make room."""
    peer = connection.peer
    is_peer_full = self._connections[peer] >= self._max // 2
    if is_peer_full or self._connections.total() >= self._max:
      reason = (
        f'half of the {self._max} connections are of {peer}' if is_peer_full else f'there are {self._max} connections'
      )
      longest = self._waiting(peer if is_peer_full else None)
      if longest is None:
        self.count_closed('refused', f'refused a connection from {peer}: {reason}, all with a request')
        return False
      longest.give_up('gave_way', f'{reason}: the one that has waited longest gives way')
    self._connections[peer] += 1
    self._metrics.open_connections.inc()
    self._silent[connection] = None
    return True

  def set_waiting(self, connection: '_Connection', is_waiting: bool) -> None:
    """Notes whether an admitted connection has no request in progress."""
    self._silent.pop(connection, None)
    self._idle.pop(connection, None)
    if is_waiting:
      self._idle[connection] = None

  def forget(self, connection: '_Connection') -> None:
    """Makes room for others."""
    self.set_waiting(connection, False)
    self._metrics.open_connections.dec()
    self._connections[connection.peer] -= 1
    if not self._connections[connection.peer]:
      del self._connections[connection.peer]

  def count_closed(self, reason: str, sentence: str) -> None:
    """Counts a connection that the server closes, and logs it unless another one was logged a moment ago."""
    self._num_closed += 1
    self._metrics.closed_connections.labels(reason).inc()
    logging.log_every_n_seconds(
      logging.WARNING, '%s (so far: %d closed or refused)', _LOG_EVERY_S, sentence, self._num_closed
    )

  def _waiting(self, peer: str | None) -> '_Connection | None':
    """The connection of this peer (None: of any) that has waited longest, preferably for a first request."""
    return next((each for group in (self._silent, self._idle) for each in group if peer in (None, each.peer)), None)


class _FewWarnings(stdlib_logging.Filter):
  """Drops a warning that was logged a moment ago: uvicorn has one for each request that is not HTTP."""

  def __init__(self) -> None:
    super().__init__()
    self._logged: dict[str, float] = {}

  def filter(self, record: stdlib_logging.LogRecord) -> bool:
    if record.levelno != stdlib_logging.WARNING:
      return True
    now = time.monotonic()
    is_new = now >= self._logged.get(record.msg, now - _LOG_EVERY_S) + _LOG_EVERY_S
    if is_new:
      self._logged[record.msg] = now
    return is_new


_FEW_WARNINGS = _FewWarnings()


def _room_for_connections() -> int:
  """Returns the number of connections that may be open; a quarter of the free descriptors is left for files."""
  most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if most == resource.RLIM_INFINITY:
    most = 1 << 20
  room = (most - len(os.listdir('/dev/fd'))) * 3 // 4
  if room < _MIN_CONNECTIONS:
    raise UserError(f'a limit of {most} open files leaves no room for connections: raise it, as by `ulimit -n 4096`.')
  return room


class _Connection(H11Protocol):
  """uvicorn's connection, with limits on its silence and on its size of unread answers."""

  def __init__(self, limits: ConnectionLimits, **arguments: Any):
    super().__init__(**arguments)
    self.peer = ''
    self._limits = limits
    self._is_admitted = False
    self._has_request = False
    self._timers: dict[str, asyncio.TimerHandle] = {}

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as H11Protocol has it
    super().connection_made(transport)
    self.peer = _peer(self.client)
    self._is_admitted = self._limits.admit(self)
    if self._is_admitted:
      self._start('no_header', self._limits.settings.header_timeout_s)
    else:
      transport.write(_BUSY)
      transport.close()

  def connection_lost(self, exc: Exception | None) -> None:
    for reason in list(self._timers):
      self._stop(reason)
    self._leave()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._note_request()

  def on_response_complete(self) -> None:
    super().on_response_complete()  # and begins the next request, if it has come already
    self._has_request = False
    self._note_request()
    if not self._has_request and self._is_admitted:
      self._limits.set_waiting(self, True)
      # uvicorn closes an idle connection; this is for one that sends, but no request, or that reads no answer.
      self._start('no_header', self.timeout_keep_alive + self._limits.settings.header_timeout_s)

  def send_400_response(self, msg: str) -> None:
    if self.cycle is not None and not self.cycle.response_complete:  # the body of a request breaks HTTP
      self.cycle.disconnected = True  # so that uvicorn drops the application's answer
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

  def give_up(self, reason: str, sentence: str) -> None:
    """Closes the connection at once."""
    self._limits.count_closed(reason, f'closed a connection of {self.peer}: {sentence}')
    self._leave()
    self.transport.abort()

  def _note_request(self) -> None:
    if not self._has_request and self.cycle is not None and not self.cycle.response_complete:
      self._has_request = True
      self._stop('no_header')
      if self._is_admitted:
        self._limits.set_waiting(self, False)

  def _leave(self) -> None:
    if self._is_admitted:
      self._is_admitted = False
      self._limits.forget(self)

  def _start(self, reason: str, seconds: float) -> None:
    sentence = {
      'no_header': f'no complete header of a request within {seconds:g} s',
      'not_read': f'the client has not read for {seconds:g} s',
    }[reason]
    self._stop(reason)
    self._timers[reason] = self.loop.call_later(seconds, self.give_up, reason, sentence)

  def _stop(self, reason: str) -> None:
    if reason in self._timers:
      self._timers.pop(reason).cancel()


def _peer(client: tuple[str, int] | None) -> str:
  """The host of a client; of an IPv6 address its network, as one host may have all addresses of a network."""
  host = client[0] if client else ''
  try:
    address = ipaddress.ip_address(host.partition('%')[0])
  except ValueError:
    return host
  if isinstance(address, ipaddress.IPv4Address):
    return host
  return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
