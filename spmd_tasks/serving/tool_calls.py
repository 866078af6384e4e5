"""Tool calls in a conversation: in the messages of a request, and in the text that a model generates.

    parser = ToolCallParser({'weather'})
    content, calls = parser.push('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', is_last=True)

    parser = ChannelParser({'weather'})        # of texts in the harmony format (gpt-oss)
    text = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7 °C'
    parser.push(text, is_last=True)            # ('7 °C', []), and parser.take_reasoning() is 'Hm.'

A parser splits one growing text, and holds back what may become a call or a marker. A call is read only where it names
a tool of the request.

ToolCallParser reads two forms: `<tool_call>{...}</tool_call>` (Hermes, Qwen), any number of them in a text, and one
JSON object that is the whole text (Llama 3). The object has `name` and `arguments` (or `parameters`).

ChannelParser reads messages: a header, `<|message|>` and a body, up to `<|end|>`, `<|call|>` or `<|return|>`. The
header names a channel: `analysis` is reasoning, `final` and `commentary` are content. With `to=functions.NAME`, the
body is a call's arguments. A text without a header, as a grammar makes it, is content.

Why not transformers' ResponseParser? It raises where a call is malformed or cut by max_tokens, takes any name for a
tool, and goes by a `response_template` that folders of models do not have yet.
"""

from collections.abc import Collection
import dataclasses
import json
import re
import secrets
from typing import Any

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.serving.bodies import is_function
from spmd_tasks.serving.errors import RequestError

_START, CALL_END = '<tool_call>', '</tool_call>'
_BARE = re.compile(r'\s*\{\s*"(name|type)"\s*:')
_CALL_KEYS = {'name', 'arguments', 'parameters', 'type', 'id'}
_MESSAGE = '<|message|>'
_ENDS = ('<|end|>', '<|call|>', '<|return|>', '<|start|>')
_OPENINGS = ('<|channel|>', '<|start|>', _MESSAGE, 'to=')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """A function's name, and its arguments as the text of a JSON object."""

  name: str
  arguments: str

  def as_json(self) -> dict[str, Any]:
    """In the format of OpenAI's API, with a new id."""
    function = {'name': self.name, 'arguments': self.arguments}
    return {'id': f'call_{secrets.token_hex(12)}', 'type': 'function', 'function': function}


class ToolCallParser:
  """Splits a text into content and calls, `num_calls` so far."""

  def __init__(self, names: Collection[str], *, one_call: bool = False):
    """Knows a request's tools by name; with `one_call` the text is ended before its first CALL_END, or has none."""
    self._names = names
    self._one_call = one_call
    self._held = ''
    self._may_be_bare = True  # whether the text so far may be the beginning of one JSON object
    self._gap: str | None = None  # white space since the last call, which is content only where text follows
    self.num_calls = 0

  def push(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
    """Adds a piece; returns (content, calls) that are certain now."""
    text, self._held = self._held + piece, ''
    if is_last and self._one_call and self._call(text.rpartition(_START)[2]) is not None and _START in text:
      text += CALL_END
    content, calls = '', list[ToolCall]()
    if self._may_be_bare:
      self._may_be_bare = _may_begin_bare_call(text)
      if self._may_be_bare and not is_last:
        self._held = text
        return '', []
      if self._may_be_bare and (call := self._call(text)) is not None:
        calls, text = [call], ''
    while (start := text.find(_START)) >= 0 and (end := text.find(CALL_END, start)) >= 0:
      call = self._call(text[start + len(_START) : end])
      end += len(CALL_END)
      content += self._content(text[: end if call is None else start])
      if call is not None:
        calls.append(call)
        self._gap = ''
      text = text[end:]
    if not is_last:
      kept = start if start >= 0 else len(text) - begun_length(text, (_START,))
      text, self._held = text[:kept], text[kept:]
    self.num_calls += len(calls)
    return content + self._content(text), calls

  def take_reasoning(self) -> str:
    """Returns '': these texts have no reasoning apart from their content."""
    return ''

  def _content(self, text: str) -> str:
    """The text that is content for certain."""
    if self._gap is None:
      return text
    text, self._gap = self._gap + text, None
    if not text.strip():
      text, self._gap = '', text
    return text

  def _call(self, text: str) -> ToolCall | None:
    value = _object(text)
    if value is None or not value.keys() <= _CALL_KEYS or value.get('name') not in self._names:
      return None
    arguments = value.get('arguments', value.get('parameters'))
    if not isinstance(arguments, dict):
      return None
    return ToolCall(name=value['name'], arguments=json.dumps(arguments, ensure_ascii=False))


class ChannelParser:
  """Splits a text into content, calls (`num_calls` so far) and reasoning."""

  def __init__(self, names: Collection[str]):
    """Knows a request's tools by name."""
    self._names = names
    self._held = ''
    self._kind: str | None = None  # of the message whose body is read: content, reasoning or call; None in a header
    self._callee = ''
    self._is_first = True
    self._content_begun = False
    self._separator = ''  # between two messages of content
    self._reasoning = ''
    self.num_calls = 0

  def push(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
    """Adds a piece; returns (content, calls) that are certain now."""
    text, self._held = self._held + piece, ''
    content, calls = '', list[ToolCall]()
    while True:
      if self._kind is None:
        if self._is_first and not _may_be_header(text):
          self._kind = 'content'
          continue
        header, marker, rest = text.partition(_MESSAGE)
        if not marker:
          self._held = '' if is_last else text
          break
        self._begin(header)
        text = rest
        continue
      ends = [(place, end) for end in _ENDS if (place := text.find(end)) >= 0]
      if ends:
        place, end = min(ends)
        body, text = text[:place], text[place + len(end) :]
      elif self._kind == 'call' and not is_last:
        self._held = text  # a call is given whole
        break
      else:
        kept = 0 if is_last else begun_length(text, _ENDS)
        body, text = text[: len(text) - kept], text[len(text) - kept :]
      if self._kind == 'reasoning':
        self._reasoning += body
      elif self._kind == 'call' and (arguments := _object(body)) is not None:
        calls.append(ToolCall(name=self._callee, arguments=json.dumps(arguments, ensure_ascii=False)))
      elif body:
        content, self._separator, self._content_begun = content + self._separator + body, '', True
      if not ends:
        self._held = text
        break
      self._kind = None
    self.num_calls += len(calls)
    return content, calls

  def take_reasoning(self) -> str:
    """Returns the reasoning since the last time."""
    taken, self._reasoning = self._reasoning, ''
    return taken

  def _begin(self, header: str) -> None:
    self._is_first = False
    channel = re.search(r'<\|channel\|>\s*(\w+)', header)
    callee = re.search(r'\bto=(?:functions\.)?([^\s<]+)', header)
    self._callee = callee[1] if callee else ''
    if self._callee in self._names:
      self._kind = 'call'
    elif self._callee or (channel and channel[1] == 'analysis'):
      self._kind = 'reasoning'
    else:
      self._kind, self._separator = 'content', '\n' if self._content_begun else ''


def _may_be_header(text: str) -> bool:
  text = text.lstrip()
  return any(text.startswith(opening) or opening.startswith(text) for opening in _OPENINGS)


def _object(text: str) -> dict[str, Any] | None:
  """The object that a text is in JSON; None where it is none."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _may_begin_bare_call(text: str) -> bool:
  compact = re.sub(r'\s', '', text[:200])
  return bool(_BARE.match(text)) or any(form.startswith(compact) for form in ('{"name":', '{"type":'))


def calls_for_template(calls: Any, path: str) -> list[dict[str, Any]]:
  """The `tool_calls` of an assistant's message as chat templates read them: their arguments as objects.

  Raises a RequestError: a call is not one of OpenAI's format; `path` names the message.
  """
  made = []
  for number, call in enumerate(calls):
    where = f'{path}.tool_calls[{number}]'
    if not is_function(call):
      raise RequestError(f'{where} must be an object with a function that has a name.', param=where)
    function = call['function']
    arguments = function.get('arguments') or {}
    if isinstance(arguments, str):
      arguments = _object(arguments)
    if not isinstance(arguments, dict):
      where += '.function.arguments'
      raise RequestError(f'{where} must be a JSON object, as text.', param=where)
    made.append({'type': 'function', **call, 'function': {**function, 'arguments': arguments}})
  return made


def call_schema(tools: list[Any]) -> dict[str, Any]:
  """The JSON schema of one call of any of these tools, as the parser reads it."""
  calls = [
    {
      'type': 'object',
      'properties': {
        'name': {'const': tool['function']['name']},
        'arguments': {'type': 'object'} | (tool['function'].get('parameters') or {}),
      },
      'required': ['name', 'arguments'],
      'additionalProperties': False,
    }
    for tool in tools
  ]
  # As json.dumps writes it and models have seen it. Where any white space may stand, small models write it for ever.
  spaces = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}
  return (calls[0] if len(calls) == 1 else {'anyOf': calls}) | {'x-guidance': spaces}


def tool_names(tools: list[Any]) -> frozenset[str]:
  """The names of a request's tools. Raises a RequestError: one is not a function of OpenAI's format."""
  for number, tool in enumerate(tools):
    if not is_function(tool) or tool.get('type', 'function') != 'function':
      where = f'tools[{number}]'
      raise RequestError(f'{where} must be an object of type function, with a function that has a name.', param=where)
  return frozenset(tool['function']['name'] for tool in tools)
