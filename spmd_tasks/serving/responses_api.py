"""Implements OpenAI's /v1/responses by chats: converts its body to a chat's, and the answer to items and events.

    parsed = responses_request({'input': 'Hello', 'max_output_tokens': 9}, model, limits)
    bodies = ResponsesApiBodies(model, parsed)
    bodies.whole(sequences, deltas)       # or bodies.opening(), .event(delta), .usage_chunk(sequences)

The server stores nothing: `input` must contain the earlier items of a conversation. Items are messages, function calls,
their outputs, and reasoning.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import json
import secrets
import time
from typing import Any

from spmd_tasks.decoding.generated_sequence import Delta, GeneratedSequence
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import ResponsesBody, SharedBody, validate
from spmd_tasks.serving.requests import GenerationRequest, ServedModel, chat_request
from spmd_tasks.serving.response_bodies import CompletionBodies
from spmd_tasks.serving.settings import ServerSettings

_SHARED_FIELDS = {*SharedBody.model_fields, 'parallel_tool_calls', 'chat_template_kwargs', 'enable_thinking'}
_LOGPROBS = 'message.output_text.logprobs'
# Fields of a chat's body, as named in errors -> fields of this body.
_FIELD_NAMES = {
  'messages': 'input',
  'max_completion_tokens': 'max_output_tokens',
  'reasoning_effort': 'reasoning.effort',
  'verbosity': 'text.verbosity',
}
_FIELD_NAMES |= {'response_format.json_schema': 'text.format', 'response_format': 'text.format'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponsesRequest(GenerationRequest):
  """A chat that answers /v1/responses, and the body of that request."""

  body: ResponsesBody


def responses_request(fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> ResponsesRequest:
  """Validates the body of /v1/responses. Raises a RequestError that names the invalid field."""
  body = validate(ResponsesBody, fields)
  chat = {name: getattr(body, name) for name in _SHARED_FIELDS & body.model_fields_set}
  chat['messages'] = _messages(body)
  if body.max_output_tokens is not None:
    chat['max_completion_tokens'] = body.max_output_tokens
  if body.tools:
    chat['tools'] = [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
  if body.tool_choice is not None:
    chat['tool_choice'] = _chat_choice(body.tool_choice)
  if _LOGPROBS in body.include or body.top_logprobs:
    chat |= {'logprobs': True, 'top_logprobs': body.top_logprobs or 0}
  if effort := body.reasoning.get('effort'):
    chat['reasoning_effort'] = effort
  if verbosity := body.text.get('verbosity'):
    chat['verbosity'] = verbosity
  form = body.text.get('format') or {'type': 'text'}
  chat['response_format'] = form
  if isinstance(form, dict) and form.get('type') == 'json_schema':
    chat['response_format'] = {'type': 'json_schema', 'json_schema': form}
  try:
    parsed = chat_request(chat, model, limits)
  except RequestError as error:
    for chat_name, name in _FIELD_NAMES.items():
      error.message = error.message.replace(chat_name, name)
      error.param = error.param and error.param.replace(chat_name, name)
    raise
  return ResponsesRequest(**vars(parsed) | {'include_usage': True}, body=body)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
  """Converts the items of `input` to the messages of a chat; calls and reasoning join the assistant's message."""
  messages: list[dict[str, Any]] = [] if body.instructions is None else [_message('system', body.instructions)]
  if isinstance(body.input, str):
    return [*messages, _message('user', body.input)]
  turn: dict[str, Any] | None = None  # the assistant's current message, which later items may join
  for index, item in enumerate(body.input):
    kind = item.get('type', 'message')
    if kind == 'message' and item.get('role') != 'assistant':
      messages.append(_message(item.get('role'), _text(item.get('content'), index)))
      turn = None
    elif kind == 'function_call_output':
      text = _text(item.get('output'), index)
      messages.append({'role': 'tool', 'tool_call_id': item.get('call_id'), 'content': text})
      turn = None
    elif kind in ('message', 'function_call', 'reasoning'):
      if turn is None or (kind == 'message' and turn['content']):
        turn = {'role': 'assistant', 'content': ''}
        messages.append(turn)
      if kind == 'message':
        turn['content'] = _text(item.get('content'), index)
      elif kind == 'reasoning':
        turn['reasoning_content'] = _text(item.get('content') or item.get('summary') or '', index)
      else:
        function = {'name': item.get('name'), 'arguments': item.get('arguments')}
        call = {'id': item.get('call_id'), 'type': 'function', 'function': function}
        turn.setdefault('tool_calls', []).append(call)
    else:
      raise RequestError(f'input[{index}] has type {str(kind)[:50]!r}, which is not supported.', param='input')
  return messages


def _message(role: Any, text: str) -> dict[str, Any]:
  return {'role': role, 'content': text}


def _text(content: Any, index: int) -> str:
  """Returns the text of an item's content, which is a string or a list of text parts."""
  parts = [content] if isinstance(content, str) else content
  if not isinstance(parts, list):
    raise RequestError(f'input[{index}] must have a string or an array of text parts as content.', param='input')
  texts: list[Any] = [part.get('text') if isinstance(part, dict) else part for part in parts]
  if not all(isinstance(text, str) for text in texts):
    raise RequestError(f'input[{index}] has a part that is not text, which is not supported.', param='input')
  return ''.join(texts)


def _chat_tool(tool: Any, index: int) -> dict[str, Any]:
  if not isinstance(tool, dict) or tool.get('type') != 'function':
    raise RequestError(f'tools[{index}] must be an object of type function.', param='tools')
  return {'type': 'function', 'function': {name: value for name, value in tool.items() if name != 'type'}}


def _chat_choice(choice: Any) -> Any:
  if not isinstance(choice, dict) or choice.get('type') not in ('function', 'allowed_tools'):
    return choice
  if choice['type'] == 'function':
    return {'type': 'function', 'function': {'name': choice.get('name')}}
  tools = choice.get('tools')
  allowed = [_chat_choice(tool) for tool in tools] if isinstance(tools, list) else tools
  return {'type': 'allowed_tools', 'allowed_tools': {'mode': choice.get('mode'), 'tools': allowed}}


class ResponsesApiBodies:
  """Formats the body or the events of one response; has the methods of CompletionBodies that routes.py calls."""

  def __init__(self, model: ServedModel, parsed: ResponsesRequest):
    self._chat = CompletionBodies(model, parsed)
    self._parsed = parsed
    self._body = parsed.body
    self._id, self._created = f'resp_{secrets.token_hex(16)}', int(time.time())
    self._items: list[dict[str, Any]] = []
    self._is_open = False  # whether the last item is still in progress
    self._pending_logprobs: list[dict[str, Any]] = []  # of buffered text, which may become a call
    self._next_event = 0

  def whole(self, sequences: Iterable[GeneratedSequence], deltas: Iterable[Delta]) -> dict[str, Any]:
    """Formats the body of an answer that is not streamed."""
    for delta in deltas:
      self._add(delta)
    return self._response(list(sequences))

  def opening(self) -> list[dict[str, Any]]:
    """Formats the events before the first token."""
    kinds = ('response.created', 'response.in_progress')
    return [self._event(kind, response=self._response(None)) for kind in kinds]

  def event(self, delta: Delta) -> bytes:
    """Formats the events of one delta."""
    return b''.join(f'event: {event["type"]}\ndata: {json.dumps(event)}\n\n'.encode() for event in self._add(delta))

  def usage_chunk(self, sequences: Iterable[GeneratedSequence]) -> dict[str, Any]:
    """Formats the last event."""
    response = self._response(list(sequences))
    return self._event(f'response.{response["status"]}', response=response)

  def failed(self, error: RequestError) -> dict[str, Any]:
    """Formats the last event of an answer that failed."""
    fields = {'code': 'invalid_prompt' if error.status < 500 else 'server_error', 'message': error.message}
    return self._event('response.failed', response=self._response(None) | {'status': 'failed', 'error': fields})

  def _add(self, delta: Delta) -> list[dict[str, Any]]:
    """Adds a delta to the items; returns the events."""
    message, events = self._chat.chat_delta(delta), list[dict[str, Any]]()
    entries = self._chat.chat_logprobs(delta)
    if message.keys() <= {'content'}:
      entries = self._pending_logprobs + entries
    self._pending_logprobs = entries if not message and self._chat.may_hold_content(delta.sequence.index) else []
    for kind, name in (('reasoning', 'reasoning_content'), ('message', 'content')):
      if text := message.get(name):
        events += self._open(kind)
        item = self._items[-1]
        part = item['content'][0]
        part['text'] += text
        logprobs = {'logprobs': entries} if kind == 'message' else {}
        if kind == 'message':
          part['logprobs'] += entries
        events.append(self._event(f'response.{part["type"]}.delta', **self._place(0), delta=text, **logprobs))
    for call in message.get('tool_calls', ()):
      events += self._close()
      function = {'name': call['function']['name'], 'arguments': call['function']['arguments']}
      item = {'type': 'function_call', 'id': f'fc_{secrets.token_hex(16)}', 'call_id': call['id'], **function}
      self._items.append({**item, 'status': 'completed'})
      added = item | {'arguments': '', 'status': 'in_progress'}
      place = self._place()
      events += [
        self._event('response.output_item.added', output_index=place['output_index'], item=added),
        self._event('response.function_call_arguments.delta', **place, delta=function['arguments']),
        self._event('response.function_call_arguments.done', **place, **function),
        self._event('response.output_item.done', output_index=place['output_index'], item=self._items[-1]),
      ]
    if delta.finish_reason is not None:
      events += self._close('incomplete' if delta.finish_reason == 'length' else 'completed')
    return events

  def _open(self, kind: str) -> list[dict[str, Any]]:
    """Starts an item with one text part, unless the last item is in progress and of this kind; returns the events."""
    if self._is_open and self._items[-1]['type'] == kind:
      return []
    events, is_message = self._close(), kind == 'message'
    part: dict[str, Any] = {'type': 'output_text' if is_message else 'reasoning_text', 'text': ''}
    part |= {'annotations': [], 'logprobs': []} if is_message else {}
    item: dict[str, Any] = {'type': kind, 'id': f'{"msg" if is_message else "rs"}_{secrets.token_hex(16)}'}
    item['role' if is_message else 'summary'] = 'assistant' if is_message else []
    item |= {'status': 'in_progress', 'content': [part]}
    self._items.append(item)
    self._is_open = True
    place = self._place(0)
    return [
      *events,
      self._event('response.output_item.added', output_index=place['output_index'], item=item | {'content': []}),
      self._event('response.content_part.added', **place, part=dict(part)),
    ]

  def _close(self, status: str = 'completed') -> list[dict[str, Any]]:
    """Ends the item in progress, if any; returns the events."""
    if not self._is_open:
      return []
    self._is_open = False
    item, place = self._items[-1], self._place(0)
    item['status'], part = status, item['content'][0]
    logprobs = {'logprobs': part['logprobs']} if 'logprobs' in part else {}
    return [
      self._event(f'response.{part["type"]}.done', **place, text=part['text'], **logprobs),
      self._event('response.content_part.done', **place, part=part),
      self._event('response.output_item.done', output_index=place['output_index'], item=item),
    ]

  def _place(self, content_index: int | None = None) -> dict[str, Any]:
    """Returns the fields that identify the last item in an event."""
    place = {'item_id': self._items[-1]['id'], 'output_index': len(self._items) - 1}
    return place if content_index is None else place | {'content_index': content_index}

  def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
    self._next_event += 1
    return {'type': kind, 'sequence_number': self._next_event - 1, **fields}

  def _response(self, sequences: Sequence[GeneratedSequence] | None) -> dict[str, Any]:
    """Returns the response object; its status is `in_progress` if `sequences` is None."""
    body, status, reason, usage = self._body, 'in_progress', None, None
    if sequences is not None:
      is_cut = any(sequence.finish_reason == 'length' for sequence in sequences)
      status, reason = ('incomplete', {'reason': 'max_output_tokens'}) if is_cut else ('completed', None)
      chat = self._chat.usage(sequences)
      usage = {
        'input_tokens': chat['prompt_tokens'],
        'input_tokens_details': chat['prompt_tokens_details'],
        'output_tokens': chat['completion_tokens'],
        'output_tokens_details': {'reasoning_tokens': 0},
        'total_tokens': chat['total_tokens'],
      }
    sampling = self._parsed.requests[0].sampling
    return {
      'id': self._id,
      'object': 'response',
      'created_at': self._created,
      'status': status,
      'background': False,
      'error': None,
      'incomplete_details': reason,
      'instructions': body.instructions,
      'max_output_tokens': body.max_output_tokens,
      'metadata': body.metadata or {},
      'model': self._parsed.model,
      'output': [dict(item) for item in self._items],
      'parallel_tool_calls': body.parallel_tool_calls is not False,
      'previous_response_id': None,
      'store': False,
      'temperature': sampling.temperature,
      'text': {'format': {'type': 'text'}, **body.text},
      'tool_choice': body.tool_choice or 'auto',
      'tools': body.tools,
      'top_p': sampling.top_p,
      'truncation': 'disabled',
      'usage': usage,
    }
