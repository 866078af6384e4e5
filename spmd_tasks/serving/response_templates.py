r"""Parses answers by the `response_template` of a tokenizer_config.json, as transformers' `parse_response` does.

    template = ResponseTemplate.from_json('{"start_anchor": "<|assistant|>", "fields": {"content": {}, ...}}')
    parser = ResponseTemplateParser(template, tools, prompt='<|user|>Hi<|assistant|>')
    parser.push('<think>Hm.</think>Hello', is_last=True)      # Part(content='Hello', reasoning='Hm.', calls=[])

A response template has fields of a message: between which marks each stands in an answer, and how it is read. The field
without an opening has the rest. `content` is content, `reasoning_content`, `reasoning` and `thinking` are reasoning,
`tool_calls` are calls; a call that cannot be read is content, where transformers raises.

The marks come with a stranger's folder. So patterns are RE2's, which take linear time. RE2 finds no beginnings of
matches: where a field has a pattern, a stream is _BEHIND characters behind.
"""

from collections.abc import Mapping
import dataclasses
import json
import re
from typing import Any

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.serving.answer_parsers import Part
from spmd_tasks.serving.call_forms import named_call, typed_json
from spmd_tasks.serving.tool_calls import ToolCall, Tools, finite, without_surrogates

_BEHIND = 128  # the longest match of a pattern that a stream waits for
_MAX_FIELDS, _MAX_MARKS, _MAX_LENGTH = 16, 32, 1000
_REASONING = ('reasoning_content', 'reasoning', 'thinking')
_FIELD_KEYS = {
  'open',
  'open_pattern',
  'close',
  'close_pattern',
  'content',
  'content_args',
  'repeats',
  'join',
  'optional',
}
_FIELD_KEYS |= {'transform', 'transform_each'}
_CONTENTS = ('text', 'int', 'float', 'bool', 'json', 'xml-inline', 'kv-lines')

_PLACE = re.compile(r'\{\w+(\.\w+)*\}')
_BARE_KEY = re.compile(r'([{,]\s*)(\w+):')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Marks:
  """The texts, or the pattern, that open or close a field."""

  texts: tuple[str, ...] = ()
  pattern: Any = None

  def find(self, text: str, start: int) -> tuple[int, int, Mapping[str, str]] | None:
    """Returns where the first mark is, the longest if several begin there, and the named groups of a pattern."""
    if self.pattern is not None:
      match = self.pattern.search(text, start)
      is_mark = match is not None and match.end() > match.start()
      return (match.start(), match.end(), _groups(match)) if is_mark else None
    places = [(place, -len(mark)) for mark in self.texts if (place := text.find(mark, start)) >= 0]
    if not places:
      return None
    place, length = min(places)
    return place, place - length, {}

  def num_held(self, text: str) -> int:
    """Returns how many characters at the end of a text may begin a mark, or may make one longer."""
    if self.pattern is not None:
      return min(len(text), _BEHIND)
    return begun_length(text, self.texts)


def _groups(match: Any) -> dict[str, str]:
  return {name: value for name, value in match.groupdict().items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Field:
  name: str
  opening: _Marks | None
  closing: _Marks | None
  content: str
  arguments: Mapping[str, Any]
  tags: Any  # the pattern of tags in the content
  transform: Any
  is_list: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseTemplate:
  """A response template, whose patterns are compiled."""

  start: _Marks
  fields: tuple[_Field, ...]
  rest: _Field | None

  @classmethod
  def from_json(cls, text: str) -> 'ResponseTemplate':
    """Compiles a template; raises a UserError whose message is a clause: it is wrong, or beyond what is read here."""
    template = json.loads(text)
    if not isinstance(template, dict) or template.get('version', 1) != 1:
      raise UserError('it must be an object of version 1')
    fields = template.get('fields')
    if not isinstance(fields, dict) or not 0 < len(fields) <= _MAX_FIELDS:
      raise UserError(f'it must have 1 to {_MAX_FIELDS} fields')
    if unknown := template.keys() - {'version', 'defaults', 'fields', 'start_anchor', 'start_anchor_pattern'}:
      raise UserError(f'its {sorted(unknown)[0]!r:.60} is not known')
    start = _marks(template, 'start_anchor', 'start_anchor_pattern', 'it')
    if start is None:
      raise UserError('it has neither start_anchor nor start_anchor_pattern')
    read = tuple(_field(name, field) for name, field in fields.items())
    rest = [field for field in read if field.opening is None]
    if len(rest) > 1:
      raise UserError(f'its fields {rest[0].name!r:.60} and {rest[1].name!r:.60} have no opening: one may')
    return cls(start=start, fields=read, rest=rest[0] if rest else None)


def _field(name: str, field: Any) -> _Field:
  where = f'its field {name!r:.60}'
  if not isinstance(field, dict) or field.keys() - _FIELD_KEYS:
    raise UserError(f'{where} must be an object with keys of {sorted(_FIELD_KEYS)}')
  content, arguments = field.get('content', 'text'), field.get('content_args', {})
  if content not in _CONTENTS or not isinstance(arguments, dict):
    raise UserError(f'{where} must have a content of {_CONTENTS}, and content_args that are an object')
  tags = None
  if content == 'xml-inline':
    tags = _pattern(arguments.get('tag_pattern'), f'{where} has the tag_pattern')
    if not {'key', 'value'} <= tags.groupindex.keys():
      raise UserError(f'{where} has a tag_pattern without the groups key and value')
  return _Field(
    name=name,
    opening=_marks(field, 'open', 'open_pattern', where),
    closing=_marks(field, 'close', 'close_pattern', where),
    content=content,
    arguments=arguments,
    tags=tags,
    transform=field.get('transform'),
    is_list=field.get('transform_each') is True,
  )


def _marks(given: Mapping[str, Any], texts_key: str, pattern_key: str, where: str) -> _Marks | None:
  texts, pattern = given.get(texts_key), given.get(pattern_key)
  if pattern is not None and texts is not None:
    raise UserError(f'{where} has both {texts_key} and {pattern_key}')
  if pattern is not None:
    return _Marks(pattern=_pattern(pattern, f'{where} has the {pattern_key}'))
  if texts is None:
    return None
  marks = texts if isinstance(texts, list) else [texts]
  if not 0 < len(marks) <= _MAX_MARKS or not all(isinstance(mark, str) and 0 < len(mark) <= _BEHIND for mark in marks):
    raise UserError(f'{where} must have 1 to {_MAX_MARKS} texts of 1 to {_BEHIND} characters in {texts_key}')
  return _Marks(texts=tuple(marks))


def _pattern(text: Any, said: str) -> Any:
  require('huggingface', 're2', wants=f'a response_template: {said} {text!r:.60}, which')
  import re2

  if not isinstance(text, str) or len(text) > _MAX_LENGTH:
    raise UserError(f'{said} {text!r:.60}, which is no text of at most {_MAX_LENGTH} characters')
  options = re2.Options()
  options.log_errors, options.dot_nl = False, True
  try:
    return re2.compile(text, options)
  except (re2.error, UnicodeEncodeError) as error:
    raise UserError(f'{said} {text!r:.60}, which RE2 cannot read: {error}') from error


class ResponseTemplateParser:
  """Parses one answer by a response template."""

  def __init__(self, template: ResponseTemplate, tools: Tools | None, *, prompt: str = ''):
    """Begins an answer behind a prompt, which may have begun one of its fields."""
    self._template = template
    self._tools = tools or {}
    self._field = template.rest
    self._groups: Mapping[str, str] = {}
    self._body = ''  # of a call, with its opening
    self._opening_length = 0
    self._held = ''
    self._is_at_start, self._gap = True, ''  # white space around a text is no part of it
    self.num_calls = 0
    begin = 0
    while (mark := template.start.find(prompt, begin)) is not None:
      begin = mark[1]
    if begin:
      self.push(prompt[begin:], is_last=False)

  @property
  def may_hold_content(self) -> bool:
    return bool(self._held or self._gap) and not self._is_reasoning

  @property
  def _is_reasoning(self) -> bool:
    return self._field is not None and self._field.name in _REASONING

  @property
  def _is_call(self) -> bool:
    return self._field is not None and self._field.name == 'tool_calls'

  def push(self, piece: str, *, is_last: bool) -> Part:
    """Adds a piece; returns what is certain."""
    text, self._held = self._held + piece, ''
    content, reasoning, calls = '', '', list[ToolCall]()
    while True:
      watched = self._watched()
      held = 0 if is_last else max((marks.num_held(text) for marks, _ in watched), default=0)
      certain = len(text) - held
      places = [(*mark, field) for marks, field in watched if (mark := marks.find(text, 0)) is not None]
      place = min(places, key=lambda at: (at[0], -at[1]), default=None)
      if place is not None and place[0] >= certain and not is_last:
        place = None  # another mark may begin there, or a longer one
      end = certain if place is None else place[0]
      if self._is_call:
        self._body += text[:end]
      elif self._is_reasoning:
        reasoning += self._shown(text[:end])
      else:
        content += self._shown(text[:end])
      if place is None:
        self._held = text[end:]
        if is_last:
          content += self._end(calls, '')
        break
      start, end, groups, field = place
      content += self._end(calls, text[start:end])
      self._field = self._template.rest if field is self._field else field
      self._groups = groups
      self._body, self._opening_length = (text[start:end], end - start) if self._is_call else ('', 0)
      self._is_at_start, self._gap = True, ''
      text = text[end:]
    self.num_calls += len(calls)
    return Part(content, reasoning, calls)

  def _watched(self) -> list[tuple[_Marks, _Field]]:
    """The marks that may come next, each with the field that it opens or closes."""
    field, rest = self._field, self._template.rest
    if field is not rest and field is not None:
      return [] if field.closing is None else [(field.closing, field)]
    marks = [(field.opening, field) for field in self._template.fields if field.opening is not None]
    return marks + ([(rest.closing, rest)] if rest is not None and rest.closing is not None else [])

  def _shown(self, text: str) -> str:
    """The text of a field that is certain, without the white space around the whole."""
    if self._field is not None and self._field.arguments.get('strip') is False:
      return text
    if self._is_at_start:
      text = text.lstrip()
      self._is_at_start = not text
    text, self._gap = self._gap + text, ''
    shown = text.rstrip()
    self._gap = text[len(shown) :]
    return shown

  def _end(self, calls: list[ToolCall], closing: str) -> str:
    """Ends the field that is open: adds its calls, or returns it as content if it has none."""
    if not self._is_call or self._field is None:
      return ''
    new = _calls(self._field, self._body[self._opening_length :], self._groups, self._tools)
    calls += new
    return '' if new else self._body + closing


# --- contents ---


def _calls(field: _Field, body: str, groups: Mapping[str, str], tools: Tools) -> list[ToolCall]:
  """The calls in the text of a field; none if one of them cannot be read."""
  try:
    value = _value(body, field.content, field.arguments, field.tags)
    items = value if field.is_list else [value]
    scopes = [item if field.is_list else {'content': item} for item in items]
    shaped = [value] if field.transform is None else [_shaped(field.transform, {**groups, **one}) for one in scopes]
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    return []
  calls = list[ToolCall]()
  for one in shaped if len(shaped) != 1 or not isinstance(shaped[0], list) else shaped[0]:
    function = one.get('function', one) if isinstance(one, dict) else None
    if not isinstance(function, dict):
      return []
    name = function.get('name')
    if not isinstance(name, str) or name not in tools:
      return []
    arguments = function.get('arguments', function.get('parameters'))
    if isinstance(arguments, dict):
      known = tools[name].get('properties')
      schemas = known if isinstance(known, dict) else {}
      texts = (f'{_json(key)}: {_typed(item, schemas.get(key), tools[name])}' for key, item in arguments.items())
      arguments = f'{{{", ".join(texts)}}}'
    call = named_call(name, arguments if isinstance(arguments, str) else _json(arguments), tools)
    if call is None:
      return []
    calls.append(call)
  return calls


def _typed(value: Any, schema: Any, root: Mapping[str, Any]) -> str:
  return typed_json(value, schema, root) if isinstance(value, str) and schema is not None else _json(value)


def _json(value: Any) -> str:
  return without_surrogates(json.dumps(value, ensure_ascii=False))


def _shaped(transform: Any, scope: Mapping[str, Any]) -> Any:
  """A transform with the values of a scope in place of its `{name}` texts."""
  if isinstance(transform, dict):
    return {name: _shaped(part, scope) for name, part in transform.items()}
  if isinstance(transform, list):
    return [_shaped(part, scope) for part in transform]
  if not isinstance(transform, str) or _PLACE.fullmatch(transform) is None:
    return transform
  value: Any = scope
  for name in transform[1:-1].split('.'):
    value = value[name]
  return value


def _value(text: str, content: Any, arguments: Mapping[str, Any], tags: Any = None) -> Any:
  """The value of a field's text."""
  bare = text if arguments.get('strip') is False else text.strip()
  if content == 'json':
    return _lax_json(text, arguments)
  if content == 'xml-inline':
    pairs = [(match['key'], match['value']) for match in tags.finditer(text)]
  elif content == 'kv-lines':
    separator = str(arguments.get('kv_sep', ':'))
    lines = text.split(str(arguments.get('line_sep', '\n')))
    pairs = [
      (key.strip(), value.strip()) for key, found, value in (line.partition(separator) for line in lines) if found
    ]
  else:
    if content == 'bool':
      return bare.lower() in ('true', '1')
    return int(bare) if content == 'int' else float(bare) if content == 'float' else bare
  parser = arguments.get('value_parser') or {}
  read = lambda text: _value(text, parser.get('name', 'text'), parser.get('args', {})) if parser else text
  return {key: read(value) for key, value in pairs}


def _lax_json(text: str, arguments: Mapping[str, Any]) -> Any:
  """JSON with the liberties that a template gives: strings between other marks, keys without quotes."""
  pieces, rest = list[str](), text
  delimiters = [tuple(pair) for pair in arguments.get('string_delims', ())]
  while delimiters:
    places = [(place, pair) for pair in delimiters if (place := rest.find(pair[0])) >= 0]
    if not places:
      break
    place, (begin, end) = min(places)
    inner, closed, after = rest[place + len(begin) :].partition(end)
    if not closed:
      break
    pieces += [_with_quotes(rest[:place], arguments), json.dumps(inner)]
    rest = after
  pieces.append(_with_quotes(rest, arguments))
  try:
    return json.loads(''.join(pieces), parse_float=finite)
  except (ValueError, RecursionError):
    if arguments.get('allow_non_json'):
      return text.strip()
    raise


def _with_quotes(text: str, arguments: Mapping[str, Any]) -> str:
  return _BARE_KEY.sub(r'\1"\2":', text) if arguments.get('unquoted_keys') else text
