"""Validates the tools of a request, its `tool_choice`, and the tool calls in its messages.

    tools = read_tools(body.tools)                # {'weather': the JSON schema of its arguments}
    choice = read_choice(body.tool_choice, tools)
    call_schema(tools)                            # JSON schema of a call: an object with `name` and `arguments`

tool_call_formats.py has the formats in which models write calls.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import secrets
import sys
from typing import Any, Literal

from spmd_tasks.decoding.json_schemas import moved, rewrite
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import is_function

Tools = Mapping[str, Mapping[str, Any]]  # name of a tool -> JSON schema of its arguments

_NO_ARGUMENTS = {'type': 'object', 'properties': {}, 'additionalProperties': False}
# The white space of json.dumps, as models have seen it. If a grammar allows any white space, small models never stop
# writing it.
_SPACES = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """A call of the function `name`; `arguments` is the text of a JSON object."""

  name: str
  arguments: str

  def as_json(self) -> dict[str, Any]:
    """Returns the call in the format of OpenAI's API, with a new id."""
    function = {'name': self.name, 'arguments': self.arguments}
    return {'id': f'call_{secrets.token_hex(12)}', 'type': 'function', 'function': function}


def parse_object(text: str) -> dict[str, Any] | None:
  """Parses a JSON object; returns None if the text is not one."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


# --- tools and tool_choice ---


def read_tools(tools: Sequence[Any]) -> Tools:
  """Returns the argument schemas of a request's tools, by name.

  Raises:
    RequestError: a tool is not a function in OpenAI's format, its parameters are not the schema of an object, or two
      different tools have the same name.
  """
  schemas = dict[str, Mapping[str, Any]]()
  for number, tool in enumerate(tools):
    where = f'tools[{number}]'
    if not is_function(tool) or tool.get('type', 'function') != 'function':
      raise RequestError(f'{where} must be an object of type function with a named function.', param=where)
    name, parameters = tool['function']['name'], tool['function'].get('parameters')
    parameters = _NO_ARGUMENTS if parameters is None else parameters
    where += '.function.parameters'
    if not isinstance(parameters, dict) or not _is_object_type(parameters.get('type', 'object')):
      raise RequestError(f'{where} must be the JSON schema of an object.', param=where)
    schema = {**parameters, 'type': 'object'}
    if schemas.setdefault(name, schema) != schema:
      raise RequestError(f'tools has two functions named {name[:100]!r}: rename one.', param=f'tools[{number}]')
  return schemas


def _is_object_type(kind: Any) -> bool:
  return kind == 'object' or (isinstance(kind, list) and 'object' in kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolChoice:
  """The tools that an answer may call, and whether it must be a call (mode `required`)."""

  mode: Literal['none', 'auto', 'required']
  tools: Tools


def read_choice(choice: Any, tools: Tools) -> ToolChoice:
  """Validates a `tool_choice`, which may be null.

  Raises:
    RequestError: it is not in OpenAI's format, or names a tool that is not in `tools`.
  """
  mode: Any
  if choice in (None, 'none', 'auto', 'required'):
    mode, names = choice or 'auto', list(tools)
  elif is_function(choice) and choice.get('type') == 'function':
    mode, names = 'required', [choice['function']['name']]
  else:
    is_allowed = isinstance(choice, dict) and choice.get('type') == 'allowed_tools'
    allowed = choice.get('allowed_tools') if is_allowed else None
    allowed = allowed if isinstance(allowed, dict) else {}
    listed = allowed.get('tools')
    if not isinstance(listed, list) or not listed or not all(map(is_function, listed)):
      raise RequestError(
        "tool_choice must be 'none', 'auto', 'required', an object of type function with a named function, or an "
        'object of type allowed_tools with a mode and such functions as tools.',
        param='tool_choice',
      )
    mode, names = allowed.get('mode'), [tool['function']['name'] for tool in listed]
    if mode not in ('auto', 'required'):
      raise RequestError("tool_choice.allowed_tools.mode must be 'auto' or 'required'.", param='tool_choice')
  missing = next((name for name in names if name not in tools), None)
  if missing is not None:
    raise RequestError(f'tool_choice names {missing[:100]!r}, which is not in tools.', param='tool_choice')
  if mode == 'required' and not names:
    raise RequestError("tool_choice 'required' needs tools to choose from.", param='tool_choice')
  return ToolChoice(mode=mode, tools={} if mode == 'none' else {name: tools[name] for name in names})


# --- schemas ---


def call_schema(
  tools: Tools | Sequence[Any], *, key: str = 'arguments', text: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the JSON schema of a call of one of the tools.

  Args:
    tools: the tools, or the `tools` of a request.
    key: the key of the arguments; the name has the key `name`.
    text: another schema, which the value may match instead of a call.

  Each schema keeps its own definitions and its `$ref`s to them.
  """
  tools = tools if isinstance(tools, Mapping) else read_tools(tools)
  definitions: dict[str, Any] = {}
  choices = list[Any]()
  spaces: Mapping[str, Any] = {}
  if text is not None:
    definitions['text'] = moved(rewrite(text), '#/$defs/text')
    choices.append({'$ref': '#/$defs/text'})
    spaces = _own_spaces(text)
  for number, (name, schema) in enumerate(tools.items()):
    definition = f'tool{number}'
    definitions[definition] = moved(rewrite(schema), f'#/$defs/{definition}')
    call = {'name': {'const': name}, key: {'$ref': f'#/$defs/{definition}'}}
    choices.append({'type': 'object', 'properties': call, 'required': ['name', key], 'additionalProperties': False})
    spaces = spaces or _own_spaces(schema)
  whole = choices[0] if len(choices) == 1 else {'anyOf': choices}
  return {**whole, '$defs': definitions, 'x-guidance': {**_SPACES, **spaces}}


def spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a schema for a grammar, with the white space of json.dumps unless its own `x-guidance` sets another."""
  return {**rewrite(schema), 'x-guidance': {**_SPACES, **_own_spaces(schema)}}


def _own_spaces(schema: Mapping[str, Any]) -> Mapping[str, Any]:
  rules = schema.get('x-guidance')
  return rules if isinstance(rules, dict) else {}


# --- calls in messages ---


def calls_for_template(calls: Any, path: str) -> list[dict[str, Any]]:
  """Converts the `tool_calls` of an assistant's message for chat templates, which read arguments as objects.

  Arguments that are null, empty or missing become an empty object.

  Args:
    calls: the `tool_calls` of the message.
    path: the message's path in the body, for errors.

  Raises:
    RequestError: a call is not in OpenAI's format.
  """
  converted = list[dict[str, Any]]()
  for number, call in enumerate(calls):
    where = f'{path}.tool_calls[{number}]'
    if not is_function(call):
      raise RequestError(f'{where} must be an object with a named function.', param=where)
    function = call['function']
    arguments = _arguments(function.get('arguments'))
    if arguments is None:
      where += '.function.arguments'
      raise RequestError(f'{where} must be a JSON object as text.', param=where)
    converted.append({'type': 'function', **call, 'function': {**function, 'arguments': arguments}})
  return converted


def _arguments(value: Any) -> dict[str, Any] | None:
  """Returns the arguments of a call as a dict; None if they are not a JSON object."""
  if isinstance(value, str) and value.strip():
    try:
      value = json.loads(without_surrogates(value), parse_float=finite)
      # Templates render the arguments into text, which cannot contain lone surrogates.
      value = json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
      return None
  if value is None or value == '':
    return {}
  return value if isinstance(value, dict) else None


def finite(text: str) -> float:
  """Parses a JSON number, clipped to finite floats because JSON has no infinity."""
  return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def without_surrogates(text: str) -> str:
  """Replaces lone surrogates by U+FFFD."""
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
