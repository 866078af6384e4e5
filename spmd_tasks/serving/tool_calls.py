"""The tools of a request: their schemas, the choice among them, and the calls in its messages.

    tools = read_tools(body.tools)                # {'weather': the JSON schema of its arguments}
    choice = read_choice(body.tool_choice, tools)
    call_schema(tools)                            # of a call as an object with `name` and `arguments`

call_forms.py has the forms in which models write calls.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import secrets
import sys
from typing import Any, Literal

from spmd_tasks.decoding.json_schemas import moved, rewrite
from spmd_tasks.serving.bodies import is_function
from spmd_tasks.serving.errors import RequestError

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of a tool's arguments by the tool's name

_NO_ARGUMENTS = {'type': 'object', 'properties': {}, 'additionalProperties': False}
# As json.dumps writes JSON and models have seen it. If any white space is allowed, small models write it for ever.
_SPACES = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """A function's name, and its arguments as the text of a JSON object."""

  name: str
  arguments: str

  def as_json(self) -> dict[str, Any]:
    """In the format of OpenAI's API, with a new id."""
    function = {'name': self.name, 'arguments': self.arguments}
    return {'id': f'call_{secrets.token_hex(12)}', 'type': 'function', 'function': function}


def parse_object(text: str) -> dict[str, Any] | None:
  """Returns the object that a text is in JSON; None if it is none."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


# --- tools and the choice among them ---


def read_tools(tools: Sequence[Any]) -> Tools:
  """Returns the schemas of a request's tools by name.

  Raises a RequestError: a tool is not a function in OpenAI's format, its parameters are no schema of an object, or two
  different tools have one name.
  """
  schemas = dict[str, Mapping[str, Any]]()
  for number, tool in enumerate(tools):
    where = f'tools[{number}]'
    if not is_function(tool) or tool.get('type', 'function') != 'function':
      raise RequestError(f'{where} must be an object of type function, with a function that has a name.', param=where)
    name, parameters = tool['function']['name'], tool['function'].get('parameters')
    parameters = _NO_ARGUMENTS if parameters is None else parameters
    where += '.function.parameters'
    if not isinstance(parameters, dict) or not _is_object_type(parameters.get('type', 'object')):
      raise RequestError(f'{where} must be the JSON schema of an object.', param=where)
    schema = {**parameters, 'type': 'object'}
    if schemas.setdefault(name, schema) != schema:
      raise RequestError(f'tools has two functions with the name {name[:100]!r}: rename one.', param=f'tools[{number}]')
  return schemas


def _is_object_type(kind: Any) -> bool:
  return kind == 'object' or (isinstance(kind, list) and 'object' in kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolChoice:
  """Which tools an answer may call, and whether it is a call."""

  mode: Literal['none', 'auto', 'required']
  tools: Tools


def read_choice(choice: Any, tools: Tools) -> ToolChoice:
  """Reads a `tool_choice`, which may be null.

  Raises a RequestError: it is not in OpenAI's format, or names a tool that is not among `tools`.
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
        "tool_choice must be 'none', 'auto', 'required', an object of type function with a function that has a name, "
        'or one of type allowed_tools with a mode and such functions as tools.',
        param='tool_choice',
      )
    mode, names = allowed.get('mode'), [tool['function']['name'] for tool in listed]
    if mode not in ('auto', 'required'):
      raise RequestError("tool_choice.allowed_tools.mode must be 'auto' or 'required'.", param='tool_choice')
  missing = next((name for name in names if name not in tools), None)
  if missing is not None:
    raise RequestError(f'tool_choice names {missing[:100]!r}, which is not among the tools.', param='tool_choice')
  if mode == 'required' and not names:
    raise RequestError("tool_choice 'required' needs tools to choose from.", param='tool_choice')
  return ToolChoice(mode=mode, tools={} if mode == 'none' else {name: tools[name] for name in names})


# --- schemas ---


def call_schema(
  tools: Tools | Sequence[Any], *, key: str = 'arguments', text: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the JSON schema of an object with `name` and `key` that calls one of a request's tools.

  With `text` the value may also be one of that schema. Each schema keeps its own definitions, and its `$ref`s to them.
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
    place = f'tool{number}'
    definitions[place] = moved(rewrite(schema), f'#/$defs/{place}')
    call = {'name': {'const': name}, key: {'$ref': f'#/$defs/{place}'}}
    choices.append({'type': 'object', 'properties': call, 'required': ['name', key], 'additionalProperties': False})
    spaces = spaces or _own_spaces(schema)
  whole = choices[0] if len(choices) == 1 else {'anyOf': choices}
  return {**whole, '$defs': definitions, 'x-guidance': {**_SPACES, **spaces}}


def spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a schema for a grammar; its JSON has the white space of json.dumps, or what the schema's own rule says."""
  return {**rewrite(schema), 'x-guidance': {**_SPACES, **_own_spaces(schema)}}


def _own_spaces(schema: Mapping[str, Any]) -> Mapping[str, Any]:
  rules = schema.get('x-guidance')
  return rules if isinstance(rules, dict) else {}


# --- calls in messages ---


def calls_for_template(calls: Any, path: str) -> list[dict[str, Any]]:
  """Returns the `tool_calls` of an assistant's message as templates read them: their arguments as objects.

  Arguments that are null, empty or left out are an empty object.

  Raises a RequestError: a call is not in OpenAI's format; `path` names the message.
  """
  converted = list[dict[str, Any]]()
  for number, call in enumerate(calls):
    where = f'{path}.tool_calls[{number}]'
    if not is_function(call):
      raise RequestError(f'{where} must be an object with a function that has a name.', param=where)
    function = call['function']
    arguments = _arguments(function.get('arguments'))
    if arguments is None:
      where += '.function.arguments'
      raise RequestError(f'{where} must be a JSON object, as text.', param=where)
    converted.append({'type': 'function', **call, 'function': {**function, 'arguments': arguments}})
  return converted


def _arguments(value: Any) -> dict[str, Any] | None:
  """The arguments of a call as an object; None if they are none."""
  if isinstance(value, str) and value.strip():
    try:
      value = json.loads(without_surrogates(value), parse_float=finite)
      # Templates write them into text, which has no surrogates.
      value = json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
      return None
  if value is None or value == '':
    return {}
  return value if isinstance(value, dict) else None


def finite(text: str) -> float:
  """A number in JSON as a float; one beyond floats is the largest float, because JSON has no infinity."""
  return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def without_surrogates(text: str) -> str:
  """A text with U+FFFD in place of lone surrogates, which are no characters."""
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
