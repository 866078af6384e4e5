"""Sends an answer as one JSON body or as server-sent events, and frees its slots when the client disconnects.

return await whole_answer(service, answer, bodies, request.receive)
return StreamedAnswer(service, answer, bodies, include_usage=False)
"""

import asyncio
from collections.abc import AsyncIterator
import functools
import json
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from spmd_tasks.decoding.generated_sequence import Delta
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.open_responses import ResponsesBodies
from spmd_tasks.serving.responses import ResponseBodies
from spmd_tasks.serving.scoring import ScoreRequest
from spmd_tasks.serving.service import Answer, Service

_QUICK_SEQUENCES = 16

_CUT = RequestError('the server shut down before this answer was complete.', status=503, code='cut')
_FAILED = RequestError('the model failed while it generated this answer.', status=500, code='engine_failed')


async def whole_answer(
  service: Service, answer: Answer, bodies: ResponseBodies | ResponsesBodies | ScoreRequest, receive: Receive
) -> Response:
  """Returns one JSON body when all choices have ended; stops waiting if the client disconnects."""

  async def collect() -> list[Delta]:
    deltas: list[Delta] = []
    while _num_ended(deltas) < len(answer.sequences):
      deltas += await answer.next()
    return deltas

  async def listen() -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass

  collecting, listening = asyncio.create_task(collect()), asyncio.create_task(listen())
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
    return await asyncio.to_thread(lambda: JSONResponse(make()))  # megabytes of vectors
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
      num_ended += _num_ended(deltas)
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


def _num_ended(deltas: list[Delta]) -> int:
  """Counts the ends among these deltas; the sequences themselves may already be further."""
  return sum(delta.finish_reason is not None for delta in deltas)


def _failure(deltas: list[Delta]) -> RequestError | None:
  for delta in deltas:
    if delta.finish_reason == 'error' and delta.sequence.matcher is not None and delta.sequence.matcher.failure:
      return RequestError(f'the form of the output cannot be used: {delta.sequence.matcher.failure}.')
  reasons = {delta.finish_reason for delta in deltas}
  return _FAILED if 'error' in reasons else _CUT if reasons & {'cut', 'cancelled'} else None
