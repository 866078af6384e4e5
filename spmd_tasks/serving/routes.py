"""The HTTP application: OpenAI's completions and chat, routes for operators, and a page to try the model.

    app = make_app(service, publisher)    # an ASGI application, for uvicorn

A request passes the Guard, and then its route reads the body, has it checked (bodies.py, requests.py), and sends
the answer (responses.py) as one JSON body or as server-sent events. When the client disconnects, its slots are free. An
invalid request gets a 4xx status and JSON that names the wrong field.
"""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable
import contextlib
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
from spmd_tasks.serving.bodies import NoFieldsBody, PublishBody, parse_json, validate
from spmd_tasks.serving.errors import RequestError, error_response
from spmd_tasks.serving.open_responses import ResponsesBodies, ResponsesRequest, responses_request
from spmd_tasks.serving.publisher import Publisher
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
from spmd_tasks.serving.responses import ResponseBodies
from spmd_tasks.serving.scoring import ROUTES, ScoreRequest, score_request
from spmd_tasks.serving.service import Answer, Service
from spmd_tasks.serving.settings import ServerSettings

# Larger bodies are parsed and tokenized on another thread, so that the event loop goes on with the streams. So are
# those with a grammar or bad words, and chats, whose templates are programs.
_QUICK_BYTES = 16_384
_SLOW_FIELDS = (b'"structured_outputs"', b'"response_format"', b'"bad_words"')
# A body that is too large is read on, up to this multiple of the limit and for this long; see _discard.
_DISCARD_FACTOR = 8
_DISCARD_LIMIT_S = 2.0

_QUICK_SEQUENCES = 16  # more have their answer, megabytes of vectors, encoded on another thread
_CUT = RequestError('the server shut down before this answer was complete.', status=503, code='cut')
_FAILED = RequestError('the model failed while it generated this answer.', status=500, code='engine_failed')

_Read = Callable[[dict[str, Any], ServedModel, ServerSettings], GenerationRequest | ScoreRequest]


def make_app(service: Service, publisher: Publisher) -> Starlette:
  """Makes the ASGI application."""
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
  ]
  for name, action in (('unpublish', publisher.unpublish),):
    table.append(Route(f'/admin/{name}', functools.partial(routes.administer, action), methods=['POST']))
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
      ClientDisconnect: _client_left,
      Exception: _bug,
    },
  )


class _Routes:
  def __init__(self, service: Service, publisher: Publisher, page: str):
    self._service = service
    self._publisher = publisher
    names = json.dumps(service.model.names).replace('<', '\\u003c')
    is_chat = service.model.chat_template != ChatTemplate()  # a model's own, rather than the plain transcript
    self._page = page.replace('{{models}}', names).replace('{{is_chat}}', json.dumps(is_chat))

  async def page(self, request: Request) -> Response:
    # The page loads nothing from other sites, and no other site can frame it.
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

  async def administer(self, action: Callable[[], Awaitable[None]], request: Request) -> Response:
    validate(NoFieldsBody, parse_json(await self._read_body(request)))
    await action()
    service = self._service
    return JSONResponse({'model': service.model.name, 'step': service.model.step if service.is_published else None})

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
    wanted = parse() if is_quick else await asyncio.to_thread(parse)
    answer = service.begin(wanted, request, request.scope.get('client_key'))
    if isinstance(wanted, ScoreRequest):
      return await whole_answer(service, answer, wanted, request.receive)
    bodies: ResponseBodies | ResponsesBodies = ResponseBodies(service.model, wanted)
    if isinstance(wanted, ResponsesRequest):
      bodies = ResponsesBodies(service.model, wanted)
    if wanted.stream:
      return StreamedAnswer(service, answer, bodies, include_usage=wanted.include_usage)
    return await whole_answer(service, answer, bodies, request.receive)

  def _card(self, name: str) -> dict[str, Any]:
    """Returns the entry in the list of models of the model, or of an adapter, whose `parent` is the model."""
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
  """Reads the body of a request that declares it as JSON.

  Raises a RequestError: 413 the body is too large, 415 it has another type, 408 it does not arrive in time.
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
  if kind != 'application/json':
    # This also keeps other sites' pages out: a browser asks the server before it sends this type for them.
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
  """Reads what a client still sends: if the server closed earlier, the client would see no answer."""
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
  sentence = {404: 'there is no such path.', 405: 'this path does not take this method.'}.get(
    error.status_code, error.detail
  )
  response = error_response(RequestError(sentence, status=error.status_code))
  response.headers.update(error.headers or {})
  return response


async def _client_left(request: Request, error: Exception) -> Response:
  return Response(status_code=499)  # for the metrics: nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
  logging.error('a request failed', exc_info=error)
  return error_response(RequestError('the server failed to handle this request.', status=500, code='internal_error'))


# --- answers ---


async def whole_answer(
  service: Service, answer: Answer, bodies: ResponseBodies | ResponsesBodies | ScoreRequest, receive: Receive
) -> Response:
  """Returns one JSON body when all choices have ended; stops waiting if the client disconnects."""

  async def listen() -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass

  collecting, listening = asyncio.create_task(answer.all()), asyncio.create_task(listen())
  try:
    await asyncio.wait((collecting, listening), return_when=asyncio.FIRST_COMPLETED)
    if not collecting.done():
      return Response(status_code=499)  # for the metrics: nobody reads it
    error = _failure(collecting.result())
    if error is not None:
      return JSONResponse(error.body, error.status)
    make = functools.partial(bodies.whole, answer.sequences, collecting.result())
    if len(answer.sequences) <= _QUICK_SEQUENCES:
      return JSONResponse(make())
    return await asyncio.to_thread(lambda: JSONResponse(make()))
  finally:
    collecting.cancel()
    listening.cancel()
    service.end(answer)


class StreamedAnswer(StreamingResponse):
  """Server-sent events: chunks as steps produce them, then `[DONE]`; an event with an error if the answer is cut."""

  def __init__(
    self, service: Service, answer: Answer, bodies: ResponseBodies | ResponsesBodies, *, include_usage: bool
  ):
    self._service = service
    self._answer = answer
    self._bodies = bodies
    self._include_usage = include_usage
    headers = {'cache-control': 'no-cache', 'x-accel-buffering': 'no'}  # no proxy shall buffer events
    super().__init__(self._events(), media_type='text/event-stream', headers=headers)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)  # which is cancelled when the client disconnects
    finally:
      self._service.end(self._answer)

  async def _events(self) -> AsyncIterator[bytes]:
    yield b''.join(map(_event, self._bodies.opening()))
    num_ended = 0
    while num_ended < len(self._answer.sequences):
      deltas = await self._answer.next()
      num_ended += sum(delta.finish_reason is not None for delta in deltas)  # the sequences may already be further
      error = _failure(deltas)
      if error is not None:
        yield _event(self._bodies.failed(error)) + b'data: [DONE]\n\n'
        return
      yield b''.join(map(self._bodies.event, deltas))
    usage = _event(self._bodies.usage_chunk(self._answer.sequences)) if self._include_usage else b''
    yield usage + b'data: [DONE]\n\n'


def _event(body: dict[str, Any]) -> bytes:
  name = f'event: {body["type"]}\n' if 'type' in body else ''  # of /v1/responses
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
  """ASGI middleware around the whole application: checks each request, before any route, and counts its response.

  With a key, every route requires it: as `Authorization: Bearer <key>`, or as the password of HTTP's Basic scheme, with
  which a browser asks for it. Without a key, a server on the loopback address answers only requests for that host.
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
    if sum(name == b'authorization' for name, _ in scope['headers']) > 1:
      # A proxy in front may check another one than this server does.
      return RequestError('the request has more than one Authorization header: send one.', code='ambiguous_key')
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
