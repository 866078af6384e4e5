"""Renders chat templates in Jinja's sandbox, with the variables, filters and whitespace rules of transformers.

    [(text, spans)] = render(source, [(variables, None)])

A template comes with a model's folder. Jinja's immutable sandbox keeps it from Python's internals, and the text that it
writes has a limit. transformers itself is not used: it takes seconds to import, cannot be told the date, and does not
detect a `{% generation %}` block in a macro.
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
  """A template makes too large a text."""


@dataclasses.dataclass
class _Rendering:
  """What is known while a template is rendered."""

  now: datetime.datetime | None = None  # for `strftime_now`; None: the clock's
  num_chars: int = 0  # written so far
  marks: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # where a `{% generation %}` begins, its text


_rendering: contextvars.ContextVar[_Rendering] = contextvars.ContextVar('rendering')


def render(source: str, jobs: Sequence[Job] = ()) -> list[tuple[str, Spans | None]]:
  """Renders a template once for each job: its variables, and the time for `strftime_now` (None: the clock's).

  Without jobs the template is only compiled.

  Returns for each job the text, and the (start, end) characters of its `{% generation %}` blocks, in order; None if a
  block is in a macro or a variable, so that its place is not known.

  Raises a UserError: the template is not valid Jinja, refuses the messages, fails, or writes too long a text.
  """
  try:
    template = _compile(source)
  except Exception as error:  # a template is a program, which may raise anything
    raise UserError(f'the chat template is not valid Jinja{_line_of(error)}: {_sentence(error)}.') from error
  try:
    return [_render(template, variables, now) for variables, now in jobs]
  except _RefusedError as error:
    raise UserError(f'the chat template refuses the messages: {_sentence(error)}') from error
  except _LimitError as error:
    raise UserError(f'the chat template is stopped: {error}: use a simpler template, or shorter messages.') from error
  except Exception as error:
    raise UserError(
      f'the chat template fails{_line_of(error)} for these messages: {_sentence(error).rstrip(".")}.'
    ) from error


def _sentence(error: Exception) -> str:
  said = error.message if isinstance(error, jinja2.TemplateSyntaxError) else str(error)
  if isinstance(error, RecursionError):
    said = f'it is nested too deeply ({error})'
  return _CONTROLS.sub(' ', (said or '')[:_MAX_CHARS_OF_ERROR]).rstrip('.') or type(error).__name__


def _line_of(error: Exception) -> str:
  """The line of the template in which an error was raised: Jinja puts the template's lines into tracebacks."""
  if isinstance(error, jinja2.TemplateSyntaxError):
    return f' in line {error.lineno}'
  places = [*traceback.walk_tb(error.__traceback__)]
  lines = [line for frame, line in places if frame.f_code.co_filename == '<template>']
  return f' in line {lines[-1]}' if lines else ''


def _render(
  template: jinja2.Template, variables: Mapping[str, Any], now: datetime.datetime | None
) -> tuple[str, Spans | None]:
  rendering = _Rendering(now)
  context = contextvars.copy_context()
  context.run(_rendering.set, rendering)
  pieces, generated = [], template.generate(**variables)
  while (piece := context.run(next, generated, None)) is not None:
    rendering.num_chars += len(piece)
    if rendering.num_chars > _MAX_CHARS:
      raise _LimitError(f'it writes more than {_MAX_CHARS:,} characters')
    pieces.append(piece)
  text, marks = ''.join(pieces), rendering.marks
  are_known = all(text.startswith(written, start) for start, written in marks)
  return text, [(start, start + len(written)) for start, written in marks if written] if are_known else None


@functools.lru_cache(32)
def _compile(source: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda format: (_rendering.get().now or datetime.datetime.now()).strftime(
    format
  )
  environment.globals['namespace'] = _Namespace
  environment.globals['dict'] = lambda *args, **named: dict(*args, **named)  # not the class, whose attributes lead on
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
  """Jinja's namespace, without names that begin with an underscore."""

  def __init__(*args, **kwargs):  # as Jinja's, so that an attribute may be called self
    self, *given = args
    attributes = dict(*given, **kwargs)
    for name in attributes:
      _check_name(name)
    jinja2.utils.Namespace.__init__(self, attributes)

  def __setitem__(self, name, value):
    _check_name(name)
    super().__setitem__(name, value)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Replaces Jinja's own filter, which escapes the characters of HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
  return (_rendering.get().now or datetime.datetime.now()).strftime(format)


def _refuse(sentence: str) -> NoReturn:
  raise _RefusedError(sentence)


def _check_name(name: Any) -> None:
  if isinstance(name, str) and name.startswith('_'):
    raise jinja2.exceptions.SecurityError(f'a namespace has no attribute {name!r}: names begin with a letter')
