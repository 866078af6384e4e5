"""Arguments of tool calls, which most chat templates read as objects and some, as DeepSeek's, join to texts as JSON."""

from collections.abc import Mapping
import json
import re
from typing import Any

_ARGUMENTS = r'\barguments[\'"]?\]?\s*'
_JOINED = re.compile(r'(\+|~|\{\{-?)\s*[\w.\[\]\'"]*' + _ARGUMENTS + r'(\+|~|-?\}\})')
_READ = re.compile(_ARGUMENTS + r'(\|\s*(tojson|items)|\.items|is\s)')


def with_arguments_as_read(source: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the variables of a template; calls in `messages` have their arguments as JSON text if `source` joins it."""
  if _JOINED.search(source) is None or _READ.search(source) is not None:
    return variables
  messages = list[Any]()
  for message in variables.get('messages', ()):
    calls = message.get('tool_calls')
    messages.append({**message, 'tool_calls': list(map(_with_text, calls))} if isinstance(calls, list) else message)
  return {**variables, 'messages': messages}


def _with_text(call: Any) -> Any:
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get('arguments'), Mapping):
    return call
  text = json.dumps(function['arguments'], ensure_ascii=False, default=str)
  return {**call, 'function': {**function, 'arguments': text}}
