"""The routes: OpenAI's completions and chat, what operators ask, and a page to try the model.

Whatever a client sends is answered with a 4xx and JSON that names the field, or served; see gate.py for what every
request passes before it comes here.
"""

import asyncio
import importlib.resources
import json
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from spmd_tasks.serving.answers import StreamedAnswer, WholeAnswer
from spmd_tasks.serving.gate import Gate, error_response, read_body
from spmd_tasks.serving.generation_request import GenerationRequest, parse_chat, parse_completion
from spmd_tasks.serving.json_fields import Fields, RequestError, parse_body
from spmd_tasks.serving.publisher import Publisher
from spmd_tasks.serving.response_bodies import ResponseBodies
from spmd_tasks.serving.service import Service

# Larger bodies are read and tokenized on another thread, so that the streams do not stand still.
_QUICK_BYTES = 16_384


def make_app(service: Service, publisher: Publisher) -> Starlette:
  """The ASGI application."""
  page = importlib.resources.files('spmd_tasks.serving').joinpath('page.html').read_text(encoding='utf-8')
  routes = _Routes(service, publisher, page)
  table = [
    Route('/', routes.page),
    Route('/health', routes.health),
    Route('/ready', routes.ready),
    Route('/metrics', routes.metrics),
    Route('/v1/models', routes.models),
    Route('/v1/models/{name:path}', routes.model),
    Route('/v1/completions', routes.completions, methods=['POST']),
    Route('/v1/chat/completions', routes.chat_completions, methods=['POST']),
    Route('/admin/publish', routes.publish, methods=['POST']),
    Route('/admin/unpublish', routes.unpublish, methods=['POST']),
  ]
  return Starlette(
    routes=table,
    middleware=[Middleware(Gate, service=service, routes=frozenset(route.path for route in table))],
    exception_handlers={RequestError: _request_error, HTTPException: _http_error, Exception: _own_error},
  )


class _Routes:
  def __init__(self, service: Service, publisher: Publisher, page: str):
    self._service = service
    self._publisher = publisher
    self._page = page.replace('{{model}}', json.dumps(service.model.name).replace('<', '\\u003c'))

  async def page(self, request: Request) -> Response:
    # Nothing from elsewhere, and no page of another site around it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {'content-security-policy': f"{policy}; frame-ancestors 'none'", 'x-content-type-options': 'nosniff'}
    return HTMLResponse(self._page, headers=headers)

  async def health(self, request: Request) -> Response:
    is_healthy = self._service.is_healthy
    return JSONResponse({'status': 'ok' if is_healthy else 'failed'}, 200 if is_healthy else 503)

  async def ready(self, request: Request) -> Response:
    is_ready = self._service.is_ready
    return JSONResponse({'status': 'ready' if is_ready else 'not ready'}, 200 if is_ready else 503)

  async def metrics(self, request: Request) -> Response:
    return PlainTextResponse(self._service.metrics(), media_type='text/plain; version=0.0.4')

  async def models(self, request: Request) -> Response:
    return JSONResponse({'object': 'list', 'data': [self._card()] if self._service.is_published else []})

  async def model(self, request: Request) -> Response:
    if request.path_params['name'] != self._service.model.name:
      raise RequestError('there is no such model here.', status=404, param='model', code='model_not_found')
    return JSONResponse(self._card())

  async def completions(self, request: Request) -> Response:
    return await self._generate(request, parse_completion)

  async def chat_completions(self, request: Request) -> Response:
    return await self._generate(request, parse_chat)

  async def publish(self, request: Request) -> Response:
    fields = Fields(parse_body(await self._body(request)))
    step = fields.integer('step', None, 0, 2**53)
    fields.refuse_unknown()
    return JSONResponse({'model': self._service.model.name, 'step': await self._publisher.publish(step)})

  async def unpublish(self, request: Request) -> Response:
    Fields(parse_body(await self._body(request))).refuse_unknown()
    await self._publisher.unpublish()
    return JSONResponse({'model': self._service.model.name, 'step': None})

  async def _body(self, request: Request) -> bytes:
    settings = self._service.settings
    return await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)

  async def _generate(self, request: Request, parse: Any) -> Any:
    service = self._service
    data = await self._body(request)

    def read() -> GenerationRequest:
      return parse(parse_body(data), service.model, service.settings)

    wanted = read() if len(data) <= _QUICK_BYTES else await asyncio.to_thread(read)
    answer = service.begin(wanted)
    bodies = ResponseBodies(service.model, wanted)
    if wanted.stream:
      return StreamedAnswer(service, answer, bodies, include_usage=wanted.include_usage)
    return WholeAnswer(service, answer, bodies)

  def _card(self) -> dict[str, Any]:
    model = self._service.model
    return {
      'id': model.name,
      'object': 'model',
      'created': model.created,
      'owned_by': 'spmd-tasks',
      'step': model.step,
      'max_model_len': model.max_len,
    }


async def _request_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, RequestError)
  return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  sentence = {404: 'there is no such path.', 405: 'this path takes another method.'}.get(
    error.status_code, error.detail
  )
  response = error_response(RequestError(sentence, status=error.status_code))
  response.headers.update(error.headers or {})
  return response


async def _own_error(request: Request, error: Exception) -> Response:
  if not isinstance(error, ClientDisconnect):
    logging.error('a request failed', exc_info=error)
  return error_response(RequestError('the server failed on this request.', status=500, code='internal_error'))
