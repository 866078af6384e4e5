"""Renders chat templates in Jinja's sandbox, with the variables, filters and whitespace rules of transformers.

    [(text, spans)] = render(source, [(variables, None)])

Templates come with model folders and are not trusted: Jinja's immutable sandbox hides Python's internals from them, and
the length of the text is limited. transformers itself is not used: it takes seconds to import, accepts no date, and
does not detect a `{% generation %}` block in a macro.
"""

from collections.abc import Mapping, Sequence
import contextvars
import dataclasses
import datetime
import functools
import json
import re
import traceback
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils

from spmd_tasks.errors import UserError

_MAX_CHARS = 16_000_000
_MAX_CHARS_OF_ERROR = 1000
_CONTROLS = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029]+')

Spans = list[tuple[int, int]]
Job = tuple[Mapping[str, Any], datetime.datetime | None]


class _RefusedError(Exception):
  """A template called raise_exception."""


class _LimitError(Exception):
  """A template writes too long a text."""


@dataclasses.dataclass
class _Rendering:
  """The state of one rendering."""

  now: datetime.datetime | None = None  # the time for `strftime_now`; None: the current time
  num_chars: int = 0  # written so far
  marks: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # (start, text) of `{% generation %}` blocks


_rendering: contextvars.ContextVar[_Rendering] = contextvars.ContextVar('rendering')


def render(source: str, jobs: Sequence[Job] = ()) -> list[tuple[str, Spans | None]]:
  """Renders a template once for each job, (variables, the time for `strftime_now` or None for the current time).

  Without jobs the template is only compiled.

  Returns for each job the text, and the (start, end) characters of its `{% generation %}` blocks in order; None instead
  if a block is in a macro or a variable, so that its position is unknown.

  Raises a UserError if the template is not valid Jinja, refuses the messages, fails, or writes too long a text.
  """
  try:
    template = _compile(source)
  except Exception as error:  # a template is a program and may raise anything
    raise UserError(f'the chat template is not valid Jinja{_line_of(error)}: {_message_of(error)}.') from error
  try:
    return [_render(template, variables, now) for variables, now in jobs]
  except _RefusedError as error:
    raise UserError(f'the chat template refuses the messages: {_message_of(error)}') from error
  except _LimitError as error:
    raise UserError(f'the chat template {error}: use a simpler template, or shorter messages.') from error
  except Exception as error:
    raise UserError(f'the chat template fails{_line_of(error)} for these messages: {_message_of(error)}.') from error


def _message_of(error: Exception) -> str:
  """Returns the message of an error on one line, without a final period."""
  message = error.message if isinstance(error, jinja2.TemplateSyntaxError) else str(error)
  if isinstance(error, RecursionError):
    message = f'it is nested too deeply ({error})'
  return _CONTROLS.sub(' ', (message or '')[:_MAX_CHARS_OF_ERROR]).rstrip('.') or type(error).__name__


def _line_of(error: Exception) -> str:
  """Returns the line of the template that raised an error; Jinja's tracebacks have the template's lines."""
  if isinstance(error, jinja2.TemplateSyntaxError):
    return f' in line {error.lineno}'
  frames = traceback.walk_tb(error.__traceback__)
  lines = [line for frame, line in frames if frame.f_code.co_filename == '<template>']
  return f' in line {lines[-1]}' if lines else ''


def _render(
  template: jinja2.Template, variables: Mapping[str, Any], now: datetime.datetime | None
) -> tuple[str, Spans | None]:
  rendering = _Rendering(now)
  context = contextvars.copy_context()
  context.run(_rendering.set, rendering)
  pieces, stream = [], template.generate(**variables)
  while (piece := context.run(next, stream, None)) is not None:
    rendering.num_chars += len(piece)
    if rendering.num_chars > _MAX_CHARS:
      raise _LimitError(f'writes more than {_MAX_CHARS:,} characters')
    pieces.append(piece)
  text, marks = ''.join(pieces), rendering.marks
  are_in_place = all(text.startswith(block, start) for start, block in marks)
  return text, [(start, start + len(block)) for start, block in marks if block] if are_in_place else None


@functools.lru_cache(32)
def _compile(source: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = _strftime_now
  environment.globals['namespace'] = _Namespace
  environment.globals['dict'] = lambda *args, **named: dict(*args, **named)  # the class has attributes, such as `mro`
  return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
  """Accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's tokens for training."""

  tags = {'generation'}

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.CallBlock(self.call_method('text_of'), [], [], body).set_lineno(line)

  def text_of(self, caller) -> str:
    text = caller()
    rendering = _rendering.get()
    rendering.marks.append((rendering.num_chars, text))
    return text


class _Namespace(jinja2.utils.Namespace):
  """Jinja's namespace without attributes that begin with an underscore."""

  def __init__(*args, **kwargs):  # without a parameter self, like Jinja's, so that an attribute may have this name
    self, *positional = args
    attributes = dict(*positional, **kwargs)
    for name in attributes:
      _check_name(name)
    jinja2.utils.Namespace.__init__(self, attributes)

  def __setitem__(self, name, value):
    _check_name(name)
    super().__setitem__(name, value)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Replaces Jinja's own filter, which escapes characters for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
  return (_rendering.get().now or datetime.datetime.now()).strftime(format)


def _refuse(message: str) -> NoReturn:
  raise _RefusedError(message)


def _check_name(name: Any) -> None:
  if isinstance(name, str) and name.startswith('_'):
    raise jinja2.exceptions.SecurityError(f'attribute {name!r} of a namespace must not begin with an underscore')
