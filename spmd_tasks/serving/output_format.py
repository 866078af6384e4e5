"""What a request says about the form of its output, as a grammar.

    compile_format(ChatBody(..., response_format={'type': 'json_object'}), model.grammars, end_ids)   # a Matcher

`response_format` is OpenAI's; `structured_outputs` and the four `guided_` fields are vLLM's.
"""

from collections.abc import Sequence
import json
from typing import Any

from spmd_tasks.decoding import Grammars, Matcher
from spmd_tasks.errors import UserError
from spmd_tasks.serving.bodies import ChatBody, CompletionBody
from spmd_tasks.serving.errors import RequestError

# Their names in `structured_outputs`, and with `guided_` before them as fields; and the grammar's kind.
_KINDS = {'json': 'json_schema', 'regex': 'regex', 'choice': 'choice', 'grammar': 'grammar'}
_ANY_OBJECT = {'type': 'object'}


def compile_format(
  body: CompletionBody | ChatBody, grammars: Grammars | None, end_ids: Sequence[int]
) -> Matcher | None:
  """Makes the matcher of a request's output; None where the request leaves the form open.

  Raises:
    RequestError: the request asks for several forms, or for one that cannot be had.
  """
  wanted = _wanted(body)
  if not wanted:
    return None
  if len(wanted) > 1:
    fields = ', '.join(field for field, _, _ in wanted)
    raise RequestError(f'the output can have one form, not several: {fields}.', param=wanted[1][0])
  field, kind, value = wanted[0]
  if grammars is None:
    raise RequestError(f'{field} is not supported by this server: leave it out.', param=field)
  if kind in ('regex', 'grammar'):
    text = value if isinstance(value, str) and value else None
  elif kind == 'choice':
    is_choice = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
    text = json.dumps(value) if is_choice else None
  else:
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | bool) else None
  if text is None:
    expected = {'choice': 'an array of strings', 'json_schema': 'a JSON schema'}.get(kind, 'a string')
    raise RequestError(f'{field} must be {expected}, and not empty.', param=field)
  try:
    return grammars.compile(kind, text, end_ids=end_ids)
  except UserError as error:
    raise RequestError(f'{field} cannot be used: {error}.', param=field) from error


def _wanted(body: CompletionBody | ChatBody) -> list[tuple[str, Any, Any]]:
  """(field, kind of grammar, value) of each form that a request asks for."""
  wanted = []
  for name, kind in _KINDS.items():
    value = getattr(body, f'guided_{name}')
    if value is not None:
      wanted.append((f'guided_{name}', kind, value))
  for name, value in (body.structured_outputs or {}).items():
    field = f'structured_outputs.{name}'
    if name == 'json_object' and value is True:
      wanted.append((field, 'json_schema', _ANY_OBJECT))
    elif name in _KINDS and value is not None:
      wanted.append((field, _KINDS[name], value))
    elif value not in (None, False):
      raise RequestError(f'{field} is not supported by this server: leave it out.', param=field)
  response = getattr(body, 'response_format', None) or {'type': 'text'}
  if response.get('type') == 'json_object':
    wanted.append(('response_format', 'json_schema', _ANY_OBJECT))
  elif response.get('type') == 'json_schema':
    given = response.get('json_schema')
    wanted.append(('response_format.json_schema.schema', 'json_schema', given.get('schema') if given else None))
  return wanted
