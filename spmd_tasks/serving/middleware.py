"""Guard: checks the API key or the Host header of every request, before any route, and counts every response.

With a key, every route requires it: as `Authorization: Bearer <key>`, or as the password of HTTP's Basic scheme, with
which a browser asks for it. Without a key, a server on the loopback address answers only requests for that host.
"""

import base64
import binascii
import hmac
import ipaddress
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd_tasks.serving.errors import RequestError, error_response
from spmd_tasks.serving.service import Service

_HOST = re.compile(r'(?:\[([0-9a-f:.]+)\]|([^:@\[\]]*))(?::\d*)?')


class Guard:
  """ASGI middleware around the whole application."""

  def __init__(self, app: ASGIApp, *, service: Service, routes: frozenset[str]):
    self._app = app
    self._service = service
    self._routes = routes

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      if scope['type'] == 'lifespan':
        await self._app(scope, receive, send)
      elif scope['type'] == 'websocket':
        await send({'type': 'websocket.close', 'code': 1008})
      return

    async def counting_send(message: Message) -> None:
      if message['type'] == 'http.response.start':
        # Only names of routes: paths that clients choose would fill the memory.
        route = scope['path'] if scope['path'] in self._routes else 'other'
        self._service.metrics.http_requests.labels(route, str(message['status'])).inc()
      await send(message)

    error = self._refusal(scope, dict(scope['headers']), scope['http_version'])
    if error is not None:
      await error_response(error)(scope, receive, counting_send)
    else:
      await self._app(scope, receive, counting_send)

  def _refusal(self, scope: Scope, headers: dict[bytes, bytes], http_version: str) -> RequestError | None:
    settings = self._service.settings
    if b'transfer-encoding' in headers and (b'content-length' in headers or http_version == '1.0'):
      # A proxy in front may see another end of this request, and so another next request (RFC 9112, 6.1).
      message = 'HTTP/1.0 has no Transfer-Encoding: leave it out.'
      if b'content-length' in headers:
        message = 'the request has both Content-Length and Transfer-Encoding: leave one out.'
      return RequestError(message, code='ambiguous_length')
    if settings.api_key is not None:
      given = presented_key(headers.get(b'authorization', b''))
      clients = [each for each in settings.client_keys if hmac.compare_digest(given, each.key.encode())]
      if clients and scope['path'].startswith('/admin/'):
        return RequestError('this key does not open the routes of operators.', status=403, code='no_admin')
      scope['client_key'] = clients[0] if clients else None  # for the routes
      if not clients and not hmac.compare_digest(given, settings.api_key.encode()):
        return RequestError('the API key is missing or wrong.', status=401, code='invalid_api_key')
    elif is_loopback(settings.host):
      name = _HOST.fullmatch(headers.get(b'host', b'').decode('latin-1').strip().lower())
      # A page of another site can reach this server under a name that resolves to 127.0.0.1 (DNS rebinding).
      if name is None or not is_loopback(name[1] or name[2]):
        return RequestError('this server answers requests to localhost only.', status=403, code='wrong_host')
    return None


def presented_key(header: bytes) -> bytes:
  """Returns the key in an Authorization header; empty if there is none."""
  scheme, _, value = header.partition(b' ')
  value = value.strip()
  if scheme.lower() == b'bearer':
    return value
  if scheme.lower() == b'basic':
    try:
      return base64.b64decode(value, validate=True).partition(b':')[2]
    except binascii.Error:
      pass
  return b''


def is_loopback(host: str) -> bool:
  """Whether a host is this machine's localhost: by that name, or by an address such as 127.0.0.1 or ::1."""
  try:
    return host == 'localhost' or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
