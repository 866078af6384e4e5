"""The HTTP application: OpenAI's API, routes for operators, and a page to try the model.

    app = make_app(service, publisher)    # an ASGI application, for uvicorn

Guard checks the key of each request. The route then reads and validates the body (request_bodies.py, requests.py), and
sends the answer (response_bodies.py) as one JSON body or as server-sent events. If the client disconnects, its
sequences are cancelled. An invalid request gets a 4xx status and a JSON error that names the field.
"""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable
import contextlib
import difflib
import functools
import hmac
import importlib.resources
import ipaddress
import json
import re
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd_tasks.decoding.generated_sequence import Delta
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.errors import RequestError, error_response
from spmd_tasks.serving.publisher import Publisher
from spmd_tasks.serving.request_bodies import NoFieldsBody, PublishBody, parse_json, validate
from spmd_tasks.serving.requests import (
  GenerationRequest,
  ServedModel,
  chat_request,
  check_model_name,
  completion_request,
  detokenize,
  tokenize,
  tokenizer_info,
)
from spmd_tasks.serving.response_bodies import CompletionBodies
from spmd_tasks.serving.responses_api import ResponsesApiBodies, ResponsesRequest, responses_request
from spmd_tasks.serving.scoring import ROUTES, ScoreRequest, score_request
from spmd_tasks.serving.service import Answer, Service
from spmd_tasks.serving.settings import ServerSettings

# Larger bodies are parsed and tokenized on another thread, to keep the event loop free for the streams. So are bodies
# with a grammar or bad words, and chats, because rendering a template can take long.
_QUICK_BYTES = 16_384
_SLOW_FIELDS = (b'"structured_outputs"', b'"response_format"', b'"bad_words"')
# The rest of a body that is too large is read and dropped, up to this multiple of the limit; see _discard.
_DISCARD_FACTOR = 8
_DISCARD_LIMIT_S = 2.0

_PAGE_TOKENS = 256  # of a continued text on the page: a model may never end it
_QUICK_SEQUENCES = 16  # larger answers, which can be megabytes of vectors, are encoded on another thread
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; only the metrics see it
_CUT = RequestError('the server shut down before this answer was complete.', status=503, code='cut')
_FAILED = RequestError('the model failed while it generated this answer.', status=500, code='engine_failed')

_Read = Callable[[dict[str, Any], ServedModel, ServerSettings], GenerationRequest | ScoreRequest]


def make_app(service: Service, publisher: Publisher) -> Starlette:
  """Returns the ASGI application."""
  page = importlib.resources.files('spmd_tasks.serving').joinpath('page.html').read_text(encoding='utf-8')
  routes = _Routes(service, publisher, page)
  table = [
    Route('/health', routes.health),
    Route('/ready', routes.ready),
    Route('/metrics', routes.metrics),
    Route('/v1/models', routes.models),
    Route('/v1/models/{name:path}', routes.model),
    Route('/tokenize', functools.partial(routes.compute, tokenize), methods=['POST']),
    Route('/detokenize', functools.partial(routes.compute, detokenize), methods=['POST']),
    Route('/tokenizer_info', routes.tokenizer_info),
    Route('/admin/publish', routes.publish, methods=['POST']),
    Route('/admin/unpublish', routes.unpublish, methods=['POST']),
  ]
  readers: dict[str, _Read] = {path: functools.partial(score_request, path) for path in ROUTES}
  if service.model.reading is None:
    chats = {'/v1/chat/completions': chat_request, '/v1/responses': responses_request}
    readers = {'/v1/completions': completion_request, **chats}
    table.append(Route('/', routes.page))
  table += [Route(path, functools.partial(routes.answer, read), methods=['POST']) for path, read in readers.items()]
  return Starlette(
    routes=table,
    middleware=[Middleware(Guard, service=service, routes=frozenset(route.path for route in table))],
    exception_handlers={
      RequestError: _request_error,
      HTTPException: _http_error,
      ClientDisconnect: _client_disconnected,
      Exception: _internal_error,
    },
  )


class _Routes:
  def __init__(self, service: Service, publisher: Publisher, page: str):
    self._service = service
    self._publisher = publisher
    model = service.model
    is_chat = model.chat_template != ChatTemplate()  # whether the model has a chat template of its own
    has_default = is_chat or model.settings.max_tokens is not None
    max_tokens = None if has_default else min(_PAGE_TOKENS, max(1, model.max_len // 2))
    for name, value in (('models', model.names), ('is_chat', is_chat), ('max_tokens', max_tokens)):
      page = page.replace(f'{{{{{name}}}}}', json.dumps(value).replace('<', '\\u003c'))
    self._page = page

  async def page(self, request: Request) -> Response:
    # The page loads nothing from other sites, and other sites cannot embed it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {'content-security-policy': f"{policy}; frame-ancestors 'none'", 'x-content-type-options': 'nosniff'}
    return HTMLResponse(self._page.replace('{{is_ready}}', json.dumps(self._service.is_ready)), headers=headers)

  async def health(self, request: Request) -> Response:
    is_healthy = self._service.is_healthy
    return JSONResponse({'status': 'ok' if is_healthy else 'failed'}, 200 if is_healthy else 503)

  async def ready(self, request: Request) -> Response:
    if self._service.is_ready:
      return JSONResponse({'status': 'ready'})
    return JSONResponse({'status': 'not ready', 'message': f'The server {self._service.state}.'}, 503)

  async def metrics(self, request: Request) -> Response:
    return PlainTextResponse(self._service.metrics.exposition(), media_type='text/plain; version=0.0.4')

  async def models(self, request: Request) -> Response:
    names = self._service.model.names if self._service.is_published else ()
    return JSONResponse({'object': 'list', 'data': [self._card(name) for name in names]})

  async def model(self, request: Request) -> Response:
    check_model_name({'model': request.path_params['name']}, self._service.model)
    return JSONResponse(self._card(self._service.model.resolve(request.path_params['name'])))

  async def compute(self, function: Callable[..., dict[str, Any]], request: Request) -> Response:
    data = await self._read_body(request)

    def answer() -> dict[str, Any]:
      return function(parse_json(data), self._service.model)

    return JSONResponse(answer() if len(data) <= _QUICK_BYTES else await asyncio.to_thread(answer))

  async def tokenizer_info(self, request: Request) -> Response:
    return JSONResponse(tokenizer_info(self._service.model))

  async def publish(self, request: Request) -> Response:
    body = validate(PublishBody, parse_json(await self._read_body(request)))
    return JSONResponse({'model': self._service.model.name, 'step': await self._publisher.publish(body.step)})

  async def unpublish(self, request: Request) -> Response:
    validate(NoFieldsBody, parse_json(await self._read_body(request)))
    await self._publisher.unpublish()
    return JSONResponse({'model': self._service.model.name, 'step': None})

  async def _read_body(self, request: Request) -> bytes:
    settings = self._service.settings
    return await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)

  async def answer(self, read: _Read, request: Request) -> Response:
    service = self._service
    data = await self._read_body(request)

    def parse() -> GenerationRequest | ScoreRequest:
      return read(parse_json(data), service.model, service.settings)

    is_quick = read not in (chat_request, responses_request) and len(data) <= _QUICK_BYTES
    is_quick = is_quick and not any(field in data for field in _SLOW_FIELDS)
    parsed = parse() if is_quick else await asyncio.to_thread(parse)
    answer = service.begin(parsed, request, request.scope.get('client_key'))
    if isinstance(parsed, ScoreRequest):
      return await whole_answer(service, answer, parsed, request.receive)
    bodies: CompletionBodies | ResponsesApiBodies = CompletionBodies(service.model, parsed)
    if isinstance(parsed, ResponsesRequest):
      bodies = ResponsesApiBodies(service.model, parsed)
    if parsed.stream:
      return StreamedAnswer(service, answer, bodies, include_usage=parsed.include_usage)
    return await whole_answer(service, answer, bodies, request.receive)

  def _card(self, name: str) -> dict[str, Any]:
    """Returns the entry of the model or an adapter in the list of models; `parent` is the model of an adapter."""
    model = self._service.model
    return {
      'id': name,
      'object': 'model',
      'created': model.created,
      'owned_by': 'spmd-tasks',
      'step': model.step,
      'max_model_len': model.max_len,
      'parent': None if name == model.name else model.name,
    }


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
  """Reads the body of a request.

  Raises:
    RequestError: the body is too large (413), is not declared as JSON (415), or does not arrive in time (408).
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
  if kind != 'application/json':
    # This also blocks cross-site requests: a browser sends this type for another site only after a CORS preflight.
    raise RequestError('the content-type must be application/json.', status=415, code='unsupported_media_type')
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
    raise RequestError(f'the body did not arrive within {timeout_s:g} s.', status=408, code='timeout') from None
  if is_too_large:
    await _discard(chunks, _DISCARD_FACTOR * max_bytes)
    raise RequestError(f'the body is larger than {max_bytes} bytes.', status=413, code='body_too_large')
  return bytes(data)


async def _discard(chunks: AsyncIterator[bytes], max_bytes: int) -> None:
  """Reads and drops the rest of a body: a client that is still sending would otherwise miss the answer."""
  num_bytes = 0
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_DISCARD_LIMIT_S):
      while num_bytes < max_bytes and (chunk := await anext(chunks, None)) is not None:
        num_bytes += len(chunk)


async def _request_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, RequestError)
  return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  message = {405: 'this path does not allow this method.'}.get(error.status_code, error.detail)
  if error.status_code == 404:
    message = _no_such_path(request.url.path, [route.path for route in request.app.routes])
  response = error_response(RequestError(message, status=error.status_code))
  response.headers.update(error.headers or {})
  return response


def _no_such_path(path: str, served: list[str]) -> str:
  """Returns the sentence for a path that is not served, with what such a path needs, or else the nearest one."""
  if path in ROUTES:
    return f'there is no such path: {path} needs a model of vectors or scores (hf.Scorer), and this one writes text.'
  near = difflib.get_close_matches(path, served, n=1, cutoff=0.75)
  return f'there is no such path; nearest: {near[0]!r}.' if near else 'there is no such path.'


async def _client_disconnected(request: Request, error: Exception) -> Response:
  return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
  logging.error('a request failed', exc_info=error)
  return error_response(RequestError('the server failed to handle this request.', status=500, code='internal_error'))


# --- answers ---


async def whole_answer(
  service: Service, answer: Answer, bodies: CompletionBodies | ResponsesApiBodies | ScoreRequest, receive: Receive
) -> Response:
  """Waits until all choices have ended and returns one JSON body; stops waiting if the client disconnects."""

  async def listen() -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass

  collecting, listening = asyncio.create_task(answer.all()), asyncio.create_task(listen())
  try:
    await asyncio.wait((collecting, listening), return_when=asyncio.FIRST_COMPLETED)
    if not collecting.done():
      return Response(status_code=_CLIENT_CLOSED_REQUEST)
    error = _failure(collecting.result())
    if error is not None:
      return JSONResponse(error.body, error.status)
    make_response = lambda: JSONResponse(bodies.whole(answer.sequences, collecting.result()))
    return make_response() if len(answer.sequences) <= _QUICK_SEQUENCES else await asyncio.to_thread(make_response)
  finally:
    collecting.cancel()
    listening.cancel()
    service.end(answer)


class StreamedAnswer(StreamingResponse):
  """Streams server-sent events: one chunk per delta, then `[DONE]`; an error event if the answer is cut off."""

  def __init__(
    self, service: Service, answer: Answer, bodies: CompletionBodies | ResponsesApiBodies, *, include_usage: bool
  ):
    self._service = service
    self._answer = answer
    self._bodies = bodies
    self._include_usage = include_usage
    headers = {'cache-control': 'no-cache', 'x-accel-buffering': 'no'}  # keeps proxies from buffering events
    super().__init__(self._events(), media_type='text/event-stream', headers=headers)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)  # cancelled when the client disconnects
    finally:
      self._service.end(self._answer)

  async def _events(self) -> AsyncIterator[bytes]:
    yield b''.join(map(_event, self._bodies.opening()))
    num_ended = 0
    while num_ended < len(self._answer.sequences):
      deltas = await self._answer.next()
      # Count deltas, because the sequences themselves may already be further.
      num_ended += sum(delta.finish_reason is not None for delta in deltas)
      error = _failure(deltas)
      if error is not None:
        yield _event(self._bodies.failed(error)) + b'data: [DONE]\n\n'
        return
      yield b''.join(map(self._bodies.event, deltas))
    usage = _event(self._bodies.usage_chunk(self._answer.sequences)) if self._include_usage else b''
    yield usage + b'data: [DONE]\n\n'


def _event(body: dict[str, Any]) -> bytes:
  name = f'event: {body["type"]}\n' if 'type' in body else ''  # only events of /v1/responses have types
  return f'{name}data: {json.dumps(body)}\n\n'.encode()


def _failure(deltas: list[Delta]) -> RequestError | None:
  for delta in deltas:
    if delta.finish_reason == 'error' and delta.sequence.matcher is not None and delta.sequence.matcher.failure:
      return RequestError(f'the output cannot be continued: {delta.sequence.matcher.failure}.')
  reasons = {delta.finish_reason for delta in deltas}
  return _FAILED if 'error' in reasons else _CUT if reasons & {'cut', 'cancelled'} else None


# --- the API key and the Host header of every request ---

_HOST = re.compile(r'(?:\[([0-9a-f:.]+)\]|([^:@\[\]]*))(?::\d*)?')


class Guard:
  """ASGI middleware that checks the key of every request before any route runs, and counts responses.

  If the server has a key, every route requires it: as `Authorization: Bearer <key>`, or as the password of HTTP Basic
  authentication, for which browsers prompt. Without a key, a server on a loopback address answers only requests whose
  Host is a loopback name.
  """

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
        # Label by known routes only: arbitrary paths from clients would grow memory without bound.
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
      # A proxy might disagree about where this request ends (request smuggling; RFC 9112, 6.1).
      message = 'HTTP/1.0 does not allow Transfer-Encoding: leave it out.'
      if b'content-length' in headers:
        message = 'the request has both Content-Length and Transfer-Encoding: leave one out.'
      return RequestError(message, code='ambiguous_length')
    if sum(name == b'authorization' for name, _ in scope['headers']) > 1:
      # A proxy might check a different header than this server does.
      return RequestError('the request has more than one Authorization header: send one.', code='ambiguous_key')
    if settings.api_key is not None:
      request_key = presented_key(headers.get(b'authorization', b''))
      clients = [client for client in settings.client_keys if hmac.compare_digest(request_key, client.key.encode())]
      if clients and scope['path'].startswith('/admin/'):
        return RequestError('this key cannot access /admin routes.', status=403, code='no_admin')
      scope['client_key'] = clients[0] if clients else None  # for the routes
      if not clients and not hmac.compare_digest(request_key, settings.api_key.encode()):
        return RequestError('the API key is missing or wrong.', status=401, code='invalid_api_key')
    elif is_loopback(settings.host):
      name = _HOST.fullmatch(headers.get(b'host', b'').decode('latin-1').strip().lower())
      # Another site's page can reach this server by a name that resolves to 127.0.0.1 (DNS rebinding).
      if name is None or not is_loopback(name[1] or name[2]):
        return RequestError('this server answers requests to localhost only.', status=403, code='wrong_host')
    return None


def presented_key(header: bytes) -> bytes:
  """Returns the key in an Authorization header; empty if there is no key."""
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
  """Whether a host is `localhost` or a loopback address such as 127.0.0.1 or ::1."""
  try:
    return host == 'localhost' or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
