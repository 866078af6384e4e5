"""Reads the form that a request or a prompt asks for its output, and compiles it to a grammar.

    form = wanted_form(prompt)                     # None where it leaves the form open
    matcher = form.compile(grammars)               # UserError('response_format cannot be used: ...')

`response_format` is OpenAI's; `structured_outputs` and the four `guided_` fields are vLLM's.
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from spmd_tasks.decoding.constraints import Grammars, Kind, Matcher
from spmd_tasks.errors import UserError

# Their names in `structured_outputs`, and with `guided_` before them as fields; and the grammar's kind.
_KINDS: dict[str, Kind] = {'json': 'json_schema', 'regex': 'regex', 'choice': 'choice', 'grammar': 'grammar'}
_ANY_OBJECT = {'type': 'object'}


class FormError(UserError):
  """The form of an output cannot be had; `field` is the one that says it."""

  def __init__(self, message: str, field: str):
    super().__init__(message)
    self.field = field


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputForm:
  """A grammar that a whole text must match: `value` in the language `kind`; `field` is where the request gives it."""

  field: str
  kind: Kind
  value: Any

  def compile(self, grammars: Grammars | None, end_ids: Sequence[int] | None = None) -> Matcher:
    """Makes the matcher of one text.

    Args:
      grammars: of the tokenizer; None where there are none.
      end_ids: tokens that end the text; None takes the model's.

    Raises:
      FormError: the form is none, or cannot be had.
    """
    field, value = self.field, self.value
    if grammars is None:
      raise FormError(f'{field} is not supported by this server: leave it out.', field)
    if self.kind in ('regex', 'grammar'):
      text = value if isinstance(value, str) and value else None
    elif self.kind == 'choice':
      is_choice = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
      text = json.dumps(value) if is_choice else None
    else:
      text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | bool) else None
    if text is None:
      expected = {'choice': 'an array of strings', 'json_schema': 'a JSON schema'}.get(self.kind, 'a string')
      raise FormError(f'{field} must be {expected}, and not empty.', field)
    try:
      return grammars.compile(self.kind, text, end_ids=end_ids)
    except UserError as error:
      raise FormError(f'{field} cannot be used: {error}.', field) from error


def wanted_form(given: object, *others: OutputForm) -> OutputForm | None:
  """Returns the form that an object asks for by those of these fields that it has; None where it asks for none.

  Args:
    given: with the fields `response_format`, `structured_outputs` and `guided_json`, `_regex`, `_choice`, `_grammar`.
    others: forms that follow from other fields.

  Raises:
    FormError: it asks for several forms, or for one of a kind that is not known here.
  """
  wanted = [
    OutputForm(field=f'guided_{name}', kind=kind, value=getattr(given, f'guided_{name}'))
    for name, kind in _KINDS.items()
    if getattr(given, f'guided_{name}', None) is not None
  ]
  for name, value in (getattr(given, 'structured_outputs', None) or {}).items():
    field = f'structured_outputs.{name}'
    if name == 'json_object' and value is True:
      wanted.append(OutputForm(field=field, kind='json_schema', value=_ANY_OBJECT))
    elif name in _KINDS and value is not None:
      wanted.append(OutputForm(field=field, kind=_KINDS[name], value=value))
    elif value not in (None, False):
      raise FormError(f'{field} is not supported here: leave it out.', field)
  response = getattr(given, 'response_format', None) or {'type': 'text'}
  if response.get('type') == 'json_object':
    wanted.append(OutputForm(field='response_format', kind='json_schema', value=_ANY_OBJECT))
  elif response.get('type') == 'json_schema':
    schema = (response.get('json_schema') or {}).get('schema')
    wanted.append(OutputForm(field='response_format.json_schema.schema', kind='json_schema', value=schema))
  elif response.get('type') != 'text':
    raise FormError("response_format must have the type 'text', 'json_object' or 'json_schema'.", 'response_format')
  wanted += others
  if len(wanted) > 1:
    fields = ', '.join(form.field for form in wanted)
    raise FormError(f'the output can have one form, not several: {fields}.', wanted[1].field)
  return wanted[0] if wanted else None
