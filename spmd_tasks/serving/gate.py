"""Gate: what every request passes first, whatever its route: the key, the counting, and a limit on its body.

With a key, every route wants it: as `Authorization: Bearer <key>`, or as the password of HTTP's Basic scheme, which is
how a browser asks for it.
"""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
import contextlib
import hmac
import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd_tasks.serving.json_fields import RequestError
from spmd_tasks.serving.service import Service

_DISCARD_FACTOR = 8
_DISCARD_LIMIT_S = 2.0
_LOOPBACK = ('127.0.0.1', 'localhost', '::1')


class Gate:
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
        # Names of routes only: a client must not be able to fill the memory with paths of its own.
        route = scope['path'] if scope['path'] in self._routes else 'other'
        self._service.http_requests.add(route, message['status'])
      await send(message)

    error = self._refusal(dict(scope['headers']))
    if error is not None:
      await error_response(error)(scope, receive, counting_send)
    else:
      await self._app(scope, receive, counting_send)

  def _refusal(self, headers: dict[bytes, bytes]) -> RequestError | None:
    settings = self._service.settings
    if settings.api_key is not None:
      given = presented_key(headers.get(b'authorization', b''))
      if not hmac.compare_digest(given, settings.api_key.encode()):
        return RequestError('the API key is missing or wrong.', status=401, code='invalid_api_key')
    elif settings.host in _LOOPBACK and host_name(headers.get(b'host', b'')) not in _LOOPBACK:
      # A page of another site whose name was made to lead here (DNS rebinding).
      return RequestError('this server answers to localhost only.', status=403, code='wrong_host')
    return None


def presented_key(header: bytes) -> bytes:
  """The key in an Authorization header; empty where there is none."""
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


def host_name(header: bytes) -> str:
  """The name in a Host header, without its port."""
  text = header.decode('latin-1').strip().lower()
  if text.startswith('['):
    return text[1:].partition(']')[0]
  return text.partition(':')[0]


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
  """The body of a request that says that it is JSON.

  Raises:
    RequestError: 413 it is too large, 415 it is something else, 408 it does not come.
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
  if kind != 'application/json':
    # Also what keeps other sites' pages out: with this type, a browser asks before it sends.
    raise RequestError('the content-type must be application/json.', status=415, code='unsupported_media_type')
  too_large = RequestError(f'the body is larger than {max_bytes} bytes.', status=413, code='body_too_large')
  length = request.headers.get('content-length', '0')
  data = bytearray()
  chunks = request.stream()
  try:
    async with asyncio.timeout(timeout_s):
      is_too_large = not length.isdecimal() or len(length) > 20 or int(length) > max_bytes
      while not is_too_large and (chunk := await anext(chunks, None)) is not None:
        data += chunk
        is_too_large = len(data) > max_bytes
  except TimeoutError:
    raise RequestError(f'the body did not come within {timeout_s:g} s.', status=408, code='timeout') from None
  if is_too_large:
    await _discard(chunks, _DISCARD_FACTOR * max_bytes)
    raise too_large
  return bytes(data)


async def _discard(chunks: AsyncIterator[bytes], max_bytes: int) -> None:
  """Reads what a client still sends: closed while it sends, it would see a broken connection and not the answer."""
  num_bytes = 0
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_DISCARD_LIMIT_S):
      while num_bytes < max_bytes and (chunk := await anext(chunks, None)) is not None:
        num_bytes += len(chunk)


def error_response(error: RequestError) -> Response:
  """An error as JSON."""
  headers = {} if error.retry_after_s is None else {'retry-after': str(error.retry_after_s)}
  if error.status == 401:
    headers['www-authenticate'] = 'Basic realm="spmd-tasks", charset="UTF-8"'
  if error.status in (401, 408, 413):
    headers['connection'] = 'close'
  body = json.dumps(error.body)  # ASCII: also what cannot be encoded, such as half of a surrogate pair
  return Response(body, status_code=error.status, headers=headers, media_type='application/json')
