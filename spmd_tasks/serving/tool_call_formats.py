r"""The formats in which models write tool calls: one table for detecting, parsing and constraining them.

    call_format = tool_call_format(chat_template)    # such as TOOL_CALL_FORMATS['hermes']
    call_format.forced                               # '<tool_call>\n{call}', for grammars
    call_format.read(text, tools, False)             # a ParsedPrefix, or None if more text is needed

Text is a call only if it names a tool of the request; otherwise it is content. Arguments keep the model's own text, so
a number such as 1e400 is not changed.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any, NamedTuple

from spmd_tasks.decoding.json_schemas import resolve
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.tool_calls import ToolCall, Tools


class ParsedPrefix(NamedTuple):
  """What the first `length` characters of a text are: tool calls, markup to drop, or (with neither) content."""

  length: int
  calls: Sequence[ToolCall] = ()
  is_markup: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
  """One format of tool calls.

  Fields:
    template_marks: texts that identify a chat template of this format; all of them must occur in it.
    openings: texts that start a call. If there are none, the whole answer is the call.
    read: parses the start of a text that begins with one of `openings`, given (text, tools, is_last). Returns None if
      it needs more text.
    forced: the text of a call under constrained decoding. `{call}` stands for a JSON object with the name and the
      arguments, `{calls}` for an array with one such object, `{name}` and `{arguments}` for the two separately.
    closing: the text after a call, before another call may follow.
    markers: further markup, which the tokenizer may have as special tokens.
    key: the key of the arguments in `{call}`.
  """

  template_marks: tuple[str, ...]
  openings: tuple[str, ...] = ()
  read: Callable[[str, Tools, bool], ParsedPrefix | None]
  forced: str
  closing: str = ''
  markers: tuple[str, ...] = ()
  key: str = 'arguments'


# --- JSON inside a longer text ---

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_DECODER = json.JSONDecoder()
_BETWEEN, _COLON = re.compile(r'[\s,]*'), re.compile(r'\s*:\s*')
_CALL_KEYS = {'name', 'arguments', 'parameters', 'type', 'id'}


def json_end(text: str, start: int) -> int | None:
  """Returns the end index of the JSON object or array at `start`; None if it is incomplete."""
  depth = 0
  for match in _BRACKETS.finditer(text, start):
    if (mark := match[0]) in '{[':
      depth += 1
    elif mark in '}]':
      depth -= 1
      if depth == 0:
        return match.end()
  return None


def _refuse(constant: str) -> float:
  raise ValueError(f'{constant} is not JSON')


def _parse(text: str) -> Any:
  """Parses JSON. Raises a ValueError if the text is not JSON; NaN and Infinity are not JSON."""
  try:
    return json.loads(text, parse_constant=_refuse)
  except RecursionError as error:
    raise ValueError('nested too deeply') from error


def _members(text: str) -> dict[str, str] | None:
  """Returns the members of a JSON object with their values unparsed; None if the text is not a JSON object."""
  try:
    value = _parse(text)
  except ValueError:
    return None
  if not isinstance(value, dict):
    return None
  members, place = dict[str, str](), text.index('{') + 1
  while text[place := _BETWEEN.match(text, place).end()] != '}':  # type: ignore[union-attr]
    name, place = _DECODER.raw_decode(text, place)
    start = _COLON.match(text, place).end()  # type: ignore[union-attr]
    _, place = _DECODER.raw_decode(text, start)
    members[name] = text[start:place]
  return members


def _call(text: str, tools: Tools) -> ToolCall | None:
  """Parses a JSON object with `name` and `arguments` (or `parameters`) as a call; None if it is not a call."""
  members = _members(text)
  if members is not None and 'function' in members and 'name' not in members:
    members = _members(members['function'])
  if members is None or not members.keys() <= _CALL_KEYS or 'name' not in members:
    return None
  return named_call(json.loads(members['name']), members.get('arguments', members.get('parameters', '')), tools)


def named_call(name: Any, arguments: str, tools: Tools) -> ToolCall | None:
  """Returns the call of the tool `name`; None if there is no such tool or the arguments are not a JSON object.

  Args:
    name: the tool's name; any JSON value.
    arguments: a JSON object, or a JSON string that contains one. Empty text and null stand for an empty object.
    tools: the tools of the request.
  """
  arguments = arguments.strip()
  if arguments.startswith('"'):
    try:
      text = _parse(arguments)
    except ValueError:
      return None
    arguments = text.encode('utf-8', 'replace').decode().strip()
  if arguments in ('', 'null'):
    arguments = '{}'
  if not isinstance(name, str) or name not in tools or _members(arguments) is None:
    return None
  return ToolCall(name=name, arguments=arguments)


def _calls(text: str, tools: Tools) -> list[ToolCall]:
  """Parses a JSON object or an array of objects as calls; returns an empty list if any object is not a call."""
  text = text.strip()
  if text.startswith('['):
    calls, place = [], 1
    while text[place := _BETWEEN.match(text, place).end()] != ']':  # type: ignore[union-attr]
      end = json_end(text, place) if text[place] == '{' else None
      call = None if end is None else _call(text[place:end], tools)
      if call is None or end is None:
        return []
      calls.append(call)
      place = end
    return calls
  call = _call(text, tools) if text.startswith('{') else None
  return [] if call is None else [call]


# --- arguments written as text between tags ---


def typed_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
  """Converts an unquoted argument to JSON, as a value of the type that its schema declares.

  Args:
    text: the argument as the model wrote it.
    schema: the argument's schema; None if the tool declares none.
    root: the schema of all arguments, which `schema` may reference by `$ref`.
  """
  types, values = _types(schema, root, 0)
  bare = {'True': 'true', 'False': 'false', 'None': 'null'}.get(text.strip(), text.strip())
  kinds = {bool: 'boolean', int: 'integer', float: 'number', list: 'array', dict: 'object', type(None): 'null'}
  try:
    kind = kinds.get(type(_parse(bare)), 'string')
  except ValueError:
    kind = 'string'
  if (
    text in values
    or kind == 'string'
    or not (kind in types or (kind == 'integer' and 'number' in types) or (not types and not values))
  ):
    return json.dumps(text, ensure_ascii=False)
  return bare


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> tuple[set[str], list[str]]:
  """Returns the JSON types that a schema allows, and the strings in its `enum` or `const`."""
  if not isinstance(schema, Mapping) or depth > 8:
    return set(), []
  declared = schema.get('type', [])
  types = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
  listed = schema.get('enum', [schema['const']] if 'const' in schema else [])
  values = [value for value in (listed if isinstance(listed, list) else []) if isinstance(value, str)]
  parts = [part for name in ('anyOf', 'oneOf', 'allOf') for part in _list(schema.get(name))]
  parts.append(resolve(schema.get('$ref'), root))
  for part in parts:
    more_types, more_values = _types(part, root, depth + 1)
    types |= more_types
    values += more_values
  return types, values


def _list(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []


def tagged_call(name: str, texts: Sequence[tuple[str, str]], tools: Tools) -> ToolCall | None:
  """Returns the call of the tool `name` with unquoted arguments; None if there is no such tool."""
  if name not in tools:
    return None
  root = tools[name]
  known = root.get('properties')
  known = known if isinstance(known, dict) else {}
  members = (f'{json.dumps(key, ensure_ascii=False)}: {typed_json(text, known.get(key), root)}' for key, text in texts)
  return ToolCall(name=name, arguments=f'{{{", ".join(members)}}}')


# --- readers ---

# Parses the text between an opening and a closing, given (text, start, tools). Returns its end and its calls, an empty
# list if it is not a call; None if the text is incomplete.
_Body = Callable[[str, int, Tools], tuple[int, Sequence[ToolCall]] | None]


def _enclosed(opening: str, closing: str, body: _Body) -> Callable[[str, Tools, bool], ParsedPrefix | None]:
  """Returns the reader of calls between `opening` and `closing`; at the end of an answer, `closing` may be missing."""

  def read(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
    start = len(text) - len(text[len(opening) :].lstrip())
    content = body(text, start, tools) if start < len(text) else None
    if content is None and not is_last:
      return None
    end, calls = content or (start, ())
    place = text.find(closing, end)
    if place < 0:
      is_whole = closing.startswith(text[end:].strip())
      return ParsedPrefix(len(text), calls if is_whole else ()) if is_last else None
    return ParsedPrefix(place + len(closing), () if text[end:place].strip() else calls)

  return read


def _markup(text: str, tools: Tools, is_last: bool) -> ParsedPrefix:
  """Reads a marker around calls, which is dropped."""
  return ParsedPrefix(next(len(marker) for marker in _OUTER_MARKERS if text.startswith(marker)), is_markup=True)


def _json_body(text: str, start: int, tools: Tools) -> tuple[int, Sequence[ToolCall]] | None:
  if text[start] not in '[{':
    return start, ()
  end = json_end(text, start)
  return None if end is None else (end, _calls(text[start:end], tools))


# Hermes and Qwen write <tool_call>{...}</tool_call>; Qwen3-Coder and GLM-4.5 write tagged text inside these tags.
_FUNCTION = re.compile(r'<function=([^>\n]+)>\s*')
_PARAMETER = re.compile(r'<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)', re.DOTALL)
_PAIR = re.compile(r'<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*', re.DOTALL)
_NAME = re.compile(r'([^\s<{]+)\s*')


def _tool_call_body(text: str, start: int, tools: Tools) -> tuple[int, Sequence[ToolCall]] | None:
  if text[start] == '{':
    return _json_body(text, start, tools)
  if text[start] == '<':
    match, pattern, closing, begun = _FUNCTION.match(text, start), _PARAMETER, '</function>', ''
    if match is None:
      return None if len(text) - start < 200 else (start, ())
  else:
    match, pattern, closing, begun = _NAME.match(text, start), _PAIR, '', '<arg_key>'
    if match is None:
      return start, ()
  texts, place = list[tuple[str, str]](), match.end()
  while argument := pattern.match(text, place):
    texts.append((argument[1].strip(), argument[2]))
    place = argument.end()
  if not text.startswith(closing, place) or (begun and text.startswith(begun, place)):
    return None
  call = tagged_call(match[1].strip(), texts, tools)
  return place + len(closing), [] if call is None else [call]


def _read_function(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
  """Reads `<function=NAME>...</function>` without the enclosing `<tool_call>`, which Qwen3-Coder sometimes omits."""
  body = _tool_call_body(text, 0, tools)
  if body is None:
    return ParsedPrefix(len(text)) if is_last else None
  end, calls = body
  rest = text[end:].lstrip()
  if not is_last and len(rest) < len(_END_TOOL_CALL) and _END_TOOL_CALL.startswith(rest):
    return None
  return ParsedPrefix(len(text) - len(rest.removeprefix(_END_TOOL_CALL)) if calls else end, calls)


_END_TOOL_CALL = '</tool_call>'
_read_tool_call = _enclosed('<tool_call>', _END_TOOL_CALL, _tool_call_body)


def _read_tool_call_or_function(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
  return (_read_function if text.startswith('<function=') else _read_tool_call)(text, tools, is_last)


# Mistral writes [TOOL_CALLS] before an array of calls, or before the name and arguments of each call.
_NAME_BEFORE_ARGUMENTS = re.compile(r'([^\s\[{]+)\s*(?:\[CALL_ID\]\s*[^\s\[{]*\s*)?(?:\[ARGS\])?\s*(?=\{)')


def _mistral_body(text: str, start: int, tools: Tools) -> tuple[int, Sequence[ToolCall]] | None:
  if text[start] in '[{':
    return _json_body(text, start, tools)
  match = _NAME_BEFORE_ARGUMENTS.match(text, start)
  if match is None:
    return (start, ()) if '{' in text[start:] else None
  end = json_end(text, match.end())
  call = None if end is None else named_call(match[1], text[match.end() : end], tools)
  return None if end is None else (end, [] if call is None else [call])


# DeepSeek-V3.1 writes the name before the separator; V3 and R1 write it after, followed by a fenced block of JSON.
_CALL_BEGIN, _CALL_END, _SEPARATOR = '<｜tool▁call▁begin｜>', '<｜tool▁call▁end｜>', '<｜tool▁sep｜>'  # noqa: RUF001
_OUTER_MARKERS = ('<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>', '<|python_tag|>')  # noqa: RUF001
_DEEPSEEK = re.compile(rf'([^{{]*?){_SEPARATOR}([^{{]*?)\s*(?=\{{)')


def _deepseek_body(text: str, start: int, tools: Tools) -> tuple[int, Sequence[ToolCall]] | None:
  match = _DEEPSEEK.match(text, start)
  if match is None:
    return (start, ()) if '{' in text[start:] else None
  end = json_end(text, match.end())
  if end is None:
    return None
  name = (match[2].partition('```')[0] if match[2].strip() else match[1]).strip()
  call = named_call(name, text[match.end() : end], tools)
  fence = re.compile(r'\s*```').match(text, end)
  return end if fence is None else fence.end(), [] if call is None else [call]


def _read_deepseek(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
  return (_enclosed_deepseek if text.startswith(_CALL_BEGIN) else _markup)(text, tools, is_last)


_enclosed_deepseek = _enclosed(_CALL_BEGIN, _CALL_END, _deepseek_body)


# Calls that are the whole answer: JSON objects (Llama 3), or the name on a line before the arguments (GLM-4).
_GAP = re.compile(r'[\s;,]*')


def _read_json_answer(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
  body = text.lstrip().removeprefix('<|python_tag|>').lstrip()
  begun = re.sub(r'\s', '', body[:200])
  begins = (f'{bracket}{{"{key}":' for bracket in ('', '[') for key in ('name', 'type'))
  if not any(begin.startswith(begun) or begun.startswith(begin) for begin in (*begins, '<|python_tag|>')):
    return ParsedPrefix(0)
  if not is_last:
    return None
  calls, place = list[ToolCall](), 0
  while (place := _GAP.match(body, place).end()) < len(body):  # type: ignore[union-attr]
    end = json_end(body, place) if body[place] in '[{' else None
    more = [] if end is None else _calls(body[place:end], tools)
    if end is None or not more:
      return ParsedPrefix(0)
    calls += more
    place = end
  return ParsedPrefix(len(text) if calls else 0, calls)


def _read_named_answer(text: str, tools: Tools, is_last: bool) -> ParsedPrefix | None:
  name, line_end, arguments = text.lstrip().partition('\n')
  is_begun = any(tool.startswith(name.strip()) for tool in tools) and (not line_end or name.strip() in tools)
  if not is_begun or arguments.strip()[:1] not in ('', '{'):
    return ParsedPrefix(0)
  if not is_last:
    return None
  call = named_call(name.strip(), arguments, tools) if arguments.strip() else None
  return ParsedPrefix(0) if call is None else ParsedPrefix(len(text), [call])


# --- the table ---

_PHI = ToolCallFormat(
  template_marks=('<|tool_call|>',),
  openings=('<|tool_call|>',),
  read=_enclosed('<|tool_call|>', '<|/tool_call|>', _json_body),
  forced='<|tool_call|>{calls}',
  closing='<|/tool_call|>',
  markers=('<|/tool_call|>',),
)
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
  'deepseek_v3': ToolCallFormat(
    template_marks=(_CALL_BEGIN, '```json'),
    openings=(_CALL_BEGIN, *_OUTER_MARKERS[:2]),
    read=_read_deepseek,
    forced=f'{_OUTER_MARKERS[0]}{_CALL_BEGIN}function{_SEPARATOR}{{name}}\n```json\n{{arguments}}',
    closing=f'\n```{_CALL_END}',
    markers=(_SEPARATOR, _CALL_END),
  ),
  'deepseek_v31': ToolCallFormat(
    template_marks=(_CALL_BEGIN,),
    openings=(_CALL_BEGIN, *_OUTER_MARKERS[:2]),
    read=_read_deepseek,
    forced=f'{_OUTER_MARKERS[0]}{_CALL_BEGIN}{{name}}{_SEPARATOR}{{arguments}}',
    closing=_CALL_END,
    markers=(_SEPARATOR, _CALL_END),
  ),
  'mistral_named': ToolCallFormat(
    template_marks=('[TOOL_CALLS]', '[ARGS]'),
    openings=('[TOOL_CALLS]',),
    read=_enclosed('[TOOL_CALLS]', '', _mistral_body),
    forced='[TOOL_CALLS]{name}[ARGS]{arguments}',
    markers=('[ARGS]', '[CALL_ID]'),
  ),
  'mistral': ToolCallFormat(
    template_marks=('[TOOL_CALLS]',),
    openings=('[TOOL_CALLS]',),
    read=_enclosed('[TOOL_CALLS]', '', _mistral_body),
    forced='[TOOL_CALLS]{calls}',
    markers=('[ARGS]', '[CALL_ID]'),
  ),
  'phi': _PHI,
  # The published template of Phi-4-mini lists tools but writes no calls.
  'phi_by_tools': dataclasses.replace(_PHI, template_marks=('<|/tool|>',)),
  'functools': ToolCallFormat(
    template_marks=('functools[',),
    openings=('functools',),
    read=_enclosed('functools', '', _json_body),
    forced='functools{calls}',
  ),
  'qwen_coder': ToolCallFormat(
    template_marks=('<function=',),
    openings=('<tool_call>', '<function='),
    read=_read_tool_call_or_function,
    forced='<tool_call>\n{call}',
    closing=f'\n{_END_TOOL_CALL}',
    markers=(_END_TOOL_CALL,),
  ),
  'hermes': ToolCallFormat(  # GLM-4.5 too
    template_marks=('<tool_call>',),
    openings=('<tool_call>',),
    read=_read_tool_call,
    forced='<tool_call>\n{call}',
    closing=f'\n{_END_TOOL_CALL}',
    markers=(_END_TOOL_CALL, '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>'),
  ),
  'glm4': ToolCallFormat(template_marks=('.metadata',), read=_read_named_answer, forced='{name}\n{arguments}'),
  'llama': ToolCallFormat(
    template_marks=(), openings=('<|python_tag|>',), read=_markup, forced='{call}', key='parameters'
  ),
}
JSON_ANSWER = ToolCallFormat(template_marks=(), read=_read_json_answer, forced='{call}', key='parameters')


def tool_call_format(template: ChatTemplate) -> ToolCallFormat:
  """Returns the first format of the table that matches a chat template; the last, Llama's, matches every template."""
  return next(
    call_format for call_format in TOOL_CALL_FORMATS.values() if all(map(template.mentions, call_format.template_marks))
  )
