"""Sends an answer as one JSON body or as server-sent events, and frees its slots when the client disconnects.

    return StreamedAnswer(service, answer, ResponseBodies(model, wanted), include_usage=False)

Both classes are ASGI applications: only an ASGI application can notice a disconnect while it waits for the engine.
"""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from spmd_tasks.decoding.generated_sequence import Delta
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.responses import ResponseBodies
from spmd_tasks.serving.service import Answer, Service

_CUT = RequestError('the server shut down before this answer was complete.', status=503, code='cut')
_FAILED = RequestError('the model failed while it generated this answer.', status=500, code='engine_failed')


class WholeAnswer:
  """One JSON body, sent when all choices have ended."""

  def __init__(self, service: Service, answer: Answer, bodies: ResponseBodies):
    self._service = service
    self._answer = answer
    self._bodies = bodies

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async with _exchange(self._service, self._answer, receive):
      all_deltas: list[Delta] = []
      while _num_ended(all_deltas) < len(self._answer.sequences):
        deltas = await self._answer.next()
        if deltas is None:
          return
        all_deltas += deltas
      error = _failure(all_deltas)
      body = self._bodies.whole(self._answer.sequences, all_deltas) if error is None else error.body
      await JSONResponse(body, 200 if error is None else error.status)(scope, receive, send)


class StreamedAnswer:
  """Server-sent events: chunks as steps produce them, then `[DONE]`; an event with an error if the answer is cut."""

  def __init__(self, service: Service, answer: Answer, bodies: ResponseBodies, *, include_usage: bool):
    self._service = service
    self._answer = answer
    self._bodies = bodies
    self._include_usage = include_usage

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async with _exchange(self._service, self._answer, receive):

      async def send_events(events: list[bytes], *, is_last: bool = False) -> None:
        data = b''.join(events)
        if is_last:
          data += b'data: [DONE]\n\n'
        await send({'type': 'http.response.body', 'body': data, 'more_body': not is_last})

      # The last two headers keep proxies from buffering events.
      headers = [
        (b'content-type', b'text/event-stream; charset=utf-8'),
        (b'cache-control', b'no-cache'),
        (b'x-accel-buffering', b'no'),
      ]
      await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
      await send_events([_event(body) for body in self._bodies.opening()])
      num_ended = 0
      while num_ended < len(self._answer.sequences):
        deltas = await self._answer.next()
        if deltas is None:
          return
        num_ended += _num_ended(deltas)
        error = _failure(deltas)
        if error is not None:
          await send_events([_event(error.body)], is_last=True)
          return
        await send_events([self._bodies.event(delta) for delta in deltas])
      usage = [_event(self._bodies.usage_chunk(self._answer.sequences))] if self._include_usage else []
      await send_events(usage, is_last=True)


@contextlib.asynccontextmanager
async def _exchange(service: Service, answer: Answer, receive: Receive) -> AsyncIterator[None]:
  """Abandons the answer if the client disconnects during the body, and frees the answer's slots after the body."""

  async def listen() -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass
    service.thread.cancel(answer.sequences)
    answer.abandon()

  listener = asyncio.create_task(listen())
  try:
    yield
  except OSError:
    pass  # the client is gone
  finally:
    listener.cancel()
    service.end(answer)


def _event(body: dict[str, Any]) -> bytes:
  return b'data: ' + json.dumps(body).encode() + b'\n\n'


def _num_ended(deltas: list[Delta]) -> int:
  """Counts the ends among these deltas; the sequences themselves may already be further."""
  return sum(delta.finish_reason is not None for delta in deltas)


def _failure(deltas: list[Delta]) -> RequestError | None:
  for delta in deltas:
    if delta.finish_reason == 'error' and delta.sequence.matcher is not None and delta.sequence.matcher.failure:
      return RequestError(f'the form of the output cannot be used: {delta.sequence.matcher.failure}.')
  reasons = {delta.finish_reason for delta in deltas}
  return _FAILED if 'error' in reasons else _CUT if reasons & {'cut', 'cancelled'} else None
