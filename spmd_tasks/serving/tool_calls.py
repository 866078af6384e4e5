"""Tool calls in a conversation: in the messages of a request, and in the text that a model generates.

    parser = ToolCallParser({'weather'})
    content, calls = parser.push('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', is_last=True)

Two forms are read, and only where they name a tool of the request: `<tool_call>{...}</tool_call>` (Hermes, Qwen), any
number of them in a text, and one JSON object that is the whole text (Llama 3). The object has `name` and `arguments`
(or `parameters`). Everything else is text.

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
from spmd_tasks.serving.errors import RequestError

_START, CALL_END = '<tool_call>', '</tool_call>'
_BARE = re.compile(r'\s*\{\s*"(name|type)"\s*:')
_CALL_KEYS = {'name', 'arguments', 'parameters', 'type', 'id'}


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
  """Splits one growing text into content and calls; what may become a call is held back.

  Attributes:
    num_calls: calls so far.
  """

  def __init__(self, names: Collection[str], *, one_call: bool = False):
    """Begins an empty text.

    Args:
      names: of the tools of a request.
      one_call: whether the text was ended before its first CALL_END; a call may then lack it.
    """
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
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      return None
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS or value.get('name') not in self._names:
      return None
    arguments = value.get('arguments', value.get('parameters'))
    if not isinstance(arguments, dict):
      return None
    return ToolCall(name=value['name'], arguments=json.dumps(arguments, ensure_ascii=False))


def _may_begin_bare_call(text: str) -> bool:
  compact = re.sub(r'\s', '', text[:200])
  return bool(_BARE.match(text)) or any(form.startswith(compact) for form in ('{"name":', '{"type":'))


def calls_for_template(calls: Any, path: str) -> list[dict[str, Any]]:
  """The `tool_calls` of an assistant's message as chat templates read them: their arguments as objects.

  Raises:
    RequestError: a call is not one of OpenAI's format; `path` names the message.
  """
  made = []
  for number, call in enumerate(calls):
    where = f'{path}.tool_calls[{number}]'
    function = call.get('function') if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get('name'), str):
      raise RequestError(f'{where} must be an object with a function that has a name.', param=where)
    arguments = function.get('arguments') or {}
    if isinstance(arguments, str):
      try:
        arguments = json.loads(arguments)
      except (ValueError, RecursionError):
        arguments = None
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
  """The names of a request's tools.

  Raises:
    RequestError: one is not a function of OpenAI's format.
  """
  for number, tool in enumerate(tools):
    function = tool.get('function') if isinstance(tool, dict) and tool.get('type', 'function') == 'function' else None
    if not isinstance(function, dict) or not isinstance(function.get('name'), str):
      where = f'tools[{number}]'
      raise RequestError(f'{where} must be an object of type function, with a function that has a name.', param=where)
  return frozenset(tool['function']['name'] for tool in tools)
