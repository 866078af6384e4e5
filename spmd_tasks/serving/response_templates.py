r"""Parses answers with the `response_template` of a tokenizer_config.json, as transformers' `parse_response` does.

    template = ResponseTemplate.from_json('{"start_anchor": "<|assistant|>", "fields": {"content": {}, ...}}')
    parser = ResponseTemplateParser(template, tools, prompt='<|user|>Hi<|assistant|>')
    parser.push('<think>Hm.</think>Hello', is_last=True)      # MessageDelta(content='Hello', reasoning='Hm.', calls=[])

A response template lists the fields of a message: the marks that enclose each field in an answer, and how to parse its
text. One field may have no opening; it gets all other text. The field `content` is content; `reasoning_content`,
`reasoning` and `thinking` are reasoning; `tool_calls` are calls. A call that cannot be parsed becomes content, whereas
transformers raises an error.

Templates come with model folders, which are not trusted. Regular expressions therefore run on RE2, in linear time. RE2
has no partial matching, so a stream stays _BEHIND characters behind while a field has a pattern.
"""

from collections.abc import Mapping
import dataclasses
import json
import re
from typing import Any

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.extensions import require
from spmd_tasks.serving.answer_parsers import MessageDelta
from spmd_tasks.serving.tool_call_formats import named_call, typed_json
from spmd_tasks.serving.tool_calls import ToolCall, Tools, finite, without_surrogates

_BEHIND = 128  # characters; the longest match of a pattern that a stream waits for
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

_PLACEHOLDER = re.compile(r'\{\w+(\.\w+)*\}')
_BARE_KEY = re.compile(r'([{,]\s*)(\w+):')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Marks:
  """The texts, or the regular expression, that open or close a field."""

  texts: tuple[str, ...] = ()
  pattern: Any = None

  def find(self, text: str, start: int) -> tuple[int, int, Mapping[str, str]] | None:
    """Returns (start, end, named groups) of the first mark in `text`, the longest if several start there; or None."""
    if self.pattern is not None:
      match = self.pattern.search(text, start)
      is_mark = match is not None and match.end() > match.start()
      return (match.start(), match.end(), _groups(match)) if is_mark else None
    matches = [(index, -len(mark)) for mark in self.texts if (index := text.find(mark, start)) >= 0]
    if not matches:
      return None
    index, negative_length = min(matches)
    return index, index - negative_length, {}

  def num_pending(self, text: str) -> int:
    """Returns how many characters at the end of a text may be the start of a mark."""
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
  tags: Any  # the compiled regular expression of tags in the content
  transform: Any
  is_list: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseTemplate:
  """A response template with compiled regular expressions."""

  start: _Marks
  fields: tuple[_Field, ...]
  rest: _Field | None

  @classmethod
  def from_json(cls, text: str) -> 'ResponseTemplate':
    """Parses and compiles a template.

    Raises:
      ValueError: the template is invalid or uses a feature that is not supported.
      UserError: the package `re2` is missing.
    """
    template = json.loads(text)
    if not isinstance(template, dict) or template.get('version', 1) != 1:
      raise ValueError('it must be an object of version 1')
    fields = template.get('fields')
    if not isinstance(fields, dict) or not 0 < len(fields) <= _MAX_FIELDS:
      raise ValueError(f'it must have 1 to {_MAX_FIELDS} fields')
    if unknown := template.keys() - {'version', 'defaults', 'fields', 'start_anchor', 'start_anchor_pattern'}:
      raise ValueError(f'its key {sorted(unknown)[0]!r:.60} is not supported')
    start = _marks(template, 'start_anchor', 'start_anchor_pattern', 'it')
    if start is None:
      raise ValueError('it has neither start_anchor nor start_anchor_pattern')
    compiled = tuple(_field(name, field) for name, field in fields.items())
    rest = [field for field in compiled if field.opening is None]
    if len(rest) > 1:
      raise ValueError(f'only one field may have no opening, not {rest[0].name!r:.60} and {rest[1].name!r:.60}')
    return cls(start=start, fields=compiled, rest=rest[0] if rest else None)


def _field(name: str, field: Any) -> _Field:
  where = f'its field {name!r:.60}'
  if not isinstance(field, dict) or field.keys() - _FIELD_KEYS:
    raise ValueError(f'{where} must be an object with keys from {sorted(_FIELD_KEYS)}')
  content, arguments = field.get('content', 'text'), field.get('content_args', {})
  if content not in _CONTENTS or not isinstance(arguments, dict):
    raise ValueError(f'{where} must have a content from {_CONTENTS}, and an object as content_args')
  tags = None
  if content == 'xml-inline':
    tags = _compile(arguments.get('tag_pattern'), f'{where} has the tag_pattern')
    if not {'key', 'value'} <= tags.groupindex.keys():
      raise ValueError(f'{where} has a tag_pattern without the groups key and value')
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


def _marks(fields: Mapping[str, Any], texts_key: str, pattern_key: str, where: str) -> _Marks | None:
  texts, pattern = fields.get(texts_key), fields.get(pattern_key)
  if pattern is not None and texts is not None:
    raise ValueError(f'{where} has both {texts_key} and {pattern_key}')
  if pattern is not None:
    return _Marks(pattern=_compile(pattern, f'{where} has the {pattern_key}'))
  if texts is None:
    return None
  marks = texts if isinstance(texts, list) else [texts]
  if not 0 < len(marks) <= _MAX_MARKS or not all(isinstance(mark, str) and 0 < len(mark) <= _BEHIND for mark in marks):
    raise ValueError(f'{where} must have 1 to {_MAX_MARKS} texts of 1 to {_BEHIND} characters in {texts_key}')
  return _Marks(texts=tuple(marks))


def _compile(pattern: Any, subject: str) -> Any:
  """Compiles a regular expression with RE2; errors start with `subject`, as in "its field 'x' has the tag_pattern"."""
  require('huggingface', 're2', wants=f'a response_template: {subject} {pattern!r:.60}, which')
  import re2

  if not isinstance(pattern, str) or len(pattern) > _MAX_LENGTH:
    raise ValueError(f'{subject} {pattern!r:.60}, which is not a text of at most {_MAX_LENGTH} characters')
  options = re2.Options()
  options.log_errors, options.dot_nl = False, True
  try:
    return re2.compile(pattern, options)
  except (re2.error, UnicodeEncodeError) as error:
    raise ValueError(f'{subject} {pattern!r:.60}, which RE2 cannot compile: {error}') from error


class ResponseTemplateParser:
  """Parses one answer with a response template."""

  def __init__(self, template: ResponseTemplate, tools: Tools | None, *, prompt: str = ''):
    """Initializes the parser at the start of an answer; `prompt` may already open one of its fields."""
    self._template = template
    self._tools = tools or {}
    self._field = template.rest
    self._groups: Mapping[str, str] = {}
    self._call_text = ''  # of the current call, with its opening
    self._opening_length = 0
    self._buffer = ''
    self._is_at_start, self._pending_space = True, ''  # strips white space around the text of a field
    self.num_calls = 0
    begin = 0
    while (mark := template.start.find(prompt, begin)) is not None:
      begin = mark[1]
    if begin:
      self.push(prompt[begin:], is_last=False)

  @property
  def may_hold_content(self) -> bool:
    return bool(self._buffer or self._pending_space) and not self._is_reasoning

  @property
  def _is_reasoning(self) -> bool:
    return self._field is not None and self._field.name in _REASONING

  @property
  def _is_call(self) -> bool:
    return self._field is not None and self._field.name == 'tool_calls'

  def push(self, piece: str, *, is_last: bool) -> MessageDelta:
    """Parses one more piece of the text; returns everything that no later piece can change."""
    text, self._buffer = self._buffer + piece, ''
    content, reasoning, calls = '', '', list[ToolCall]()
    while True:
      watched = self._watched()
      num_pending = 0 if is_last else max((marks.num_pending(text) for marks, _ in watched), default=0)
      num_final = len(text) - num_pending
      matches = [(*mark, field) for marks, field in watched if (mark := marks.find(text, 0)) is not None]
      match = min(matches, key=lambda match: (match[0], -match[1]), default=None)
      if match is not None and match[0] >= num_final and not is_last:
        match = None  # a longer mark may start there
      end = num_final if match is None else match[0]
      if self._is_call:
        self._call_text += text[:end]
      elif self._is_reasoning:
        reasoning += self._emit(text[:end])
      else:
        content += self._emit(text[:end])
      if match is None:
        self._buffer = text[end:]
        if is_last:
          content += self._end(calls, '')
        break
      start, end, groups, field = match
      content += self._end(calls, text[start:end])
      self._field = self._template.rest if field is self._field else field
      self._groups = groups
      self._call_text, self._opening_length = (text[start:end], end - start) if self._is_call else ('', 0)
      self._is_at_start, self._pending_space = True, ''
      text = text[end:]
    self.num_calls += len(calls)
    return MessageDelta(content, reasoning, calls)

  def _watched(self) -> list[tuple[_Marks, _Field]]:
    """Returns the marks that may come next, each with the field that it opens or closes."""
    field, rest = self._field, self._template.rest
    if field is not rest and field is not None:
      return [] if field.closing is None else [(field.closing, field)]
    marks = [(field.opening, field) for field in self._template.fields if field.opening is not None]
    return marks + ([(rest.closing, rest)] if rest is not None and rest.closing is not None else [])

  def _emit(self, text: str) -> str:
    """Returns the part of a field's text to send now; strips white space around the field."""
    if self._field is not None and self._field.arguments.get('strip') is False:
      return text
    if self._is_at_start:
      text = text.lstrip()
      self._is_at_start = not text
    text, self._pending_space = self._pending_space + text, ''
    shown = text.rstrip()
    self._pending_space = text[len(shown) :]
    return shown

  def _end(self, calls: list[ToolCall], closing: str) -> str:
    """Ends the current field: adds its calls to `calls`, or returns its text as content if it cannot be parsed."""
    if not self._is_call or self._field is None:
      return ''
    new = _calls(self._field, self._call_text[self._opening_length :], self._groups, self._tools)
    calls += new
    return '' if new else self._call_text + closing


# --- parsing the text of a field ---


def _calls(field: _Field, body: str, groups: Mapping[str, str], tools: Tools) -> list[ToolCall]:
  """Parses the text of a field as calls; returns an empty list if any of them is invalid."""
  try:
    value = _value(body, field.content, field.arguments, field.tags)
    items = value if field.is_list else [value]
    scopes = [item if field.is_list else {'content': item} for item in items]
    shaped = [value] if field.transform is None else [_fill(field.transform, {**groups, **scope}) for scope in scopes]
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    return []
  calls = list[ToolCall]()
  for call_json in shaped if len(shaped) != 1 or not isinstance(shaped[0], list) else shaped[0]:
    function = call_json.get('function', call_json) if isinstance(call_json, dict) else None
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


def _fill(transform: Any, scope: Mapping[str, Any]) -> Any:
  """Returns a transform with its `{name}` texts replaced by the values of `scope`."""
  if isinstance(transform, dict):
    return {name: _fill(part, scope) for name, part in transform.items()}
  if isinstance(transform, list):
    return [_fill(part, scope) for part in transform]
  if not isinstance(transform, str) or _PLACEHOLDER.fullmatch(transform) is None:
    return transform
  value: Any = scope
  for name in transform[1:-1].split('.'):
    value = value[name]
  return value


def _value(text: str, content: Any, arguments: Mapping[str, Any], tags: Any = None) -> Any:
  """Parses the text of a field as its `content` type."""
  bare = text if arguments.get('strip') is False else text.strip()
  if content == 'json':
    return _lax_json(text, arguments)
  if content == 'xml-inline':
    pairs = [(match['key'], match['value']) for match in tags.finditer(text)]
  elif content == 'kv-lines':
    separator = str(arguments.get('kv_sep', ':'))
    lines = text.split(str(arguments.get('line_sep', '\n')))
    pairs = [(key.strip(), value.strip()) for key, sep, value in (line.partition(separator) for line in lines) if sep]
  else:
    if content == 'bool':
      return bare.lower() in ('true', '1')
    return int(bare) if content == 'int' else float(bare) if content == 'float' else bare
  parser = arguments.get('value_parser') or {}
  read = lambda text: _value(text, parser.get('name', 'text'), parser.get('args', {})) if parser else text
  return {key: read(value) for key, value in pairs}


def _lax_json(text: str, arguments: Mapping[str, Any]) -> Any:
  """Parses JSON in the variants that a template may allow: other string delimiters, unquoted keys."""
  pieces, rest = list[str](), text
  delimiters = [tuple(pair) for pair in arguments.get('string_delims', ())]
  while delimiters:
    matches = [(index, pair) for pair in delimiters if (index := rest.find(pair[0])) >= 0]
    if not matches:
      break
    index, (begin, end) = min(matches)
    inner, closing, after = rest[index + len(begin) :].partition(end)
    if not closing:
      break
    pieces += [_quote_keys(rest[:index], arguments), json.dumps(inner)]
    rest = after
  pieces.append(_quote_keys(rest, arguments))
  try:
    return json.loads(''.join(pieces), parse_float=finite)
  except (ValueError, RecursionError):
    if arguments.get('allow_non_json'):
      return text.strip()
    raise


def _quote_keys(text: str, arguments: Mapping[str, Any]) -> str:
  return _BARE_KEY.sub(r'\1"\2":', text) if arguments.get('unquoted_keys') else text
