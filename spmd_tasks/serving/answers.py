"""How an answer is sent: in one piece, or as server-sent events; and how it ends when the client does.

Both are ASGI applications, because only those hear of a disconnect while they wait for the engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
import json
from typing import Any

from spmd_tasks.serving.json_fields import RequestError
from spmd_tasks.serving.response_bodies import ResponseBodies
from spmd_tasks.serving.sequence import Delta
from spmd_tasks.serving.service import Answer, Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CUT = RequestError('the server went down before this answer was finished.', status=503, code='cut')
_FAILED = RequestError('the model failed while it generated this answer.', status=500, code='engine_failed')


class WholeAnswer:
  """A JSON body, once everything is there."""

  def __init__(self, service: Service, answer: Answer, bodies: ResponseBodies):
    self._service = service
    self._answer = answer
    self._bodies = bodies

  async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
    async with _Listening(self._service, self._answer, receive):
      all_deltas: list[Delta] = []
      while not _is_all_there(self._answer, all_deltas):
        deltas = await self._answer.next()
        if deltas is None:
          return
        all_deltas += deltas
      error = _failure(all_deltas)
      body = self._bodies.whole(self._answer.sequences, all_deltas) if error is None else error.body
      data = json.dumps(body).encode()
      headers = [(b'content-type', b'application/json'), (b'content-length', str(len(data)).encode())]
      status = 200 if error is None else error.status
      async with asyncio.timeout(self._service.settings.send_timeout_s):
        await send({'type': 'http.response.start', 'status': status, 'headers': headers})
        await send({'type': 'http.response.body', 'body': data})


class StreamedAnswer:
  """Server-sent events: a chunk as each step brings one, then `[DONE]`; an error in place of what was cut."""

  def __init__(self, service: Service, answer: Answer, bodies: ResponseBodies, *, include_usage: bool):
    self._service = service
    self._answer = answer
    self._bodies = bodies
    self._include_usage = include_usage

  async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
    async def send_events(events: list[dict[str, Any]], *, is_last: bool = False) -> None:
      data = b''.join(b'data: ' + json.dumps(event).encode() + b'\n\n' for event in events)
      if is_last:
        data += b'data: [DONE]\n\n'
      async with asyncio.timeout(self._service.settings.send_timeout_s):
        await send({'type': 'http.response.body', 'body': data, 'more_body': not is_last})

    async with _Listening(self._service, self._answer, receive):
      # No proxy shall keep back what is there.
      headers = [
        (b'content-type', b'text/event-stream; charset=utf-8'),
        (b'cache-control', b'no-cache'),
        (b'x-accel-buffering', b'no'),
      ]
      await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
      await send_events(self._bodies.opening())
      ended: list[Delta] = []
      while not _is_all_there(self._answer, ended):
        deltas = await self._answer.next()
        if deltas is None:
          return
        ended += [delta for delta in deltas if delta.finish_reason is not None]
        error = _failure(deltas)
        if error is not None:
          await send_events([error.body], is_last=True)
          return
        await send_events([self._bodies.chunk(delta) for delta in deltas])
      usage = [self._bodies.usage_chunk(self._answer.sequences)] if self._include_usage else []
      await send_events(usage, is_last=True)


class _Listening:
  """While an answer is being sent: a client that goes away abandons it, and whatever happens, its slots are freed."""

  def __init__(self, service: Service, answer: Answer, receive: Receive):
    self._service = service
    self._answer = answer
    self._receive = receive
    self._listener: asyncio.Task[None] | None = None

  async def __aenter__(self) -> None:
    self._listener = asyncio.create_task(self._listen())

  async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
    assert self._listener is not None
    self._listener.cancel()
    self._service.end(self._answer)
    return kind is not None and issubclass(kind, TimeoutError | OSError)  # a client that does not read is gone

  async def _listen(self) -> None:
    while (await self._receive())['type'] != 'http.disconnect':
      pass
    self._service.thread.cancel(self._answer.sequences)
    self._answer.abandon()


def _is_all_there(answer: Answer, deltas: list[Delta]) -> bool:
  """By what has come here: the sequences themselves are ahead."""
  return sum(delta.finish_reason is not None for delta in deltas) == len(answer.sequences)


def _failure(deltas: list[Delta]) -> RequestError | None:
  reasons = {delta.finish_reason for delta in deltas}
  return _FAILED if 'error' in reasons else _CUT if reasons & {'cut', 'cancelled'} else None
