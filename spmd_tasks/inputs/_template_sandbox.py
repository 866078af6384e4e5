"""Compiles and renders chat templates as Hugging Face's transformers does: the program that _template_process.py runs.

A template comes with a model, from strangers. Jinja's sandbox keeps it from Python's internals; the limits of this
process bound its time and its memory, whatever filters, methods and operators it uses. The program imports nothing of
this package, so that it starts in a moment; and not transformers, which takes seconds to import, and torch with it more
than the memory that a template may take. Nor can that be told the date, or does it see that a block is in a macro.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import pickle
import re
import resource
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

_LIMIT_S, _MEMORY_MIB = 5, 512  # of CPU time, for one text
if __name__ == '__main__':
  _LIMIT_S, _MEMORY_MIB = int(sys.argv[1]), int(sys.argv[2])
  sys.path += sys.argv[3:]  # where jinja2 is

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
import jinja2.sandbox  # noqa: E402
import jinja2.utils  # noqa: E402

_MAX_CHARS = 16_000_000
_MAX_CHARS_OF_ERROR = 1000
_HEADER_BYTES = 8  # the size of the request that follows
_CONTROLS = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029]+')


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


_rendering = _Rendering()


def answer(source: str, jobs: list[tuple[dict[str, Any], datetime.datetime | None]]) -> Any:
  """Renders a template once for each job (its variables, and the time for `strftime_now`); without any it compiles.

  Returns:
    For each job the text, and the (start, end) characters of its `{% generation %}` blocks, in order; None where a
    block is in a macro or a variable, so that its place is not known. Or an object that says why there is no text: its
    `kind` is 'syntax', 'refused', 'failed' or 'limit', its `line` the template's, its `sentence` says what is wrong.
  """
  kind = 'syntax'
  try:
    template = _compile(source)
    kind = 'failed'
    return [_render(template, *job) for job in jobs]
  except Exception as error:  # a template is a program, which may raise anything
    kinds = {_RefusedError: 'refused', _LimitError: 'limit', MemoryError: 'limit'}
    line: int | None = _line_of(error)
    said: Any = error
    if isinstance(error, jinja2.TemplateSyntaxError):
      line, said = error.lineno, error.message
    return {'kind': kinds.get(type(error), kind), 'line': line, 'sentence': _sentence(said)}


def _sentence(error: Any) -> str:
  if isinstance(error, MemoryError):
    return f'it needs more than {_MEMORY_MIB} MiB of memory'
  if isinstance(error, RecursionError):
    return f'it is nested too deeply ({error})'
  return _CONTROLS.sub(' ', str(error)[:_MAX_CHARS_OF_ERROR]) or type(error).__name__


def _render(
  template: jinja2.Template, variables: dict[str, Any], now: datetime.datetime | None
) -> tuple[str, list[tuple[int, int]] | None]:
  global _rendering
  _rendering = _Rendering(now)
  pieces = []
  for piece in template.generate(**variables):
    _rendering.num_chars += len(piece)
    if _rendering.num_chars > _MAX_CHARS:
      raise _LimitError(f'it writes more than {_MAX_CHARS:,} characters')
    pieces.append(piece)
  text, marks = ''.join(pieces), _rendering.marks
  are_known = all(text.startswith(written, start) for start, written in marks)
  return text, [(start, start + len(written)) for start, written in marks if written] if are_known else None


@functools.lru_cache(32)
def _compile(source: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda format: (_rendering.now or datetime.datetime.now()).strftime(format)
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
    _rendering.marks.append((_rendering.num_chars, text))
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


def _refuse(sentence: str) -> NoReturn:
  raise _RefusedError(sentence)


def _check_name(name: Any) -> None:
  if isinstance(name, str) and name.startswith('_'):
    raise jinja2.exceptions.SecurityError(f'a namespace has no attribute {name!r}: names begin with a letter')


def _line_of(error: BaseException) -> int | None:
  """The line of the template in which an error was raised: Jinja puts the template's lines into tracebacks."""
  places = traceback.walk_tb(error.__traceback__)
  return next((line for frame, line in [*places][::-1] if frame.f_code.co_filename == '<template>'), None)


def main() -> None:
  """Answers messages from stdin, each pickled arguments of `answer`, with lines of JSON on stdout until stdin ends."""
  # Signals for the whole job end the process that waits for the text, and this one after it.
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  for limit, size in ((resource.RLIMIT_AS, _MEMORY_MIB << 20), (resource.RLIMIT_CORE, 0)):
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system has none
      resource.setrlimit(limit, (size, size))
  given, made = sys.stdin.buffer, sys.stdout.buffer
  reply: Any = []
  while True:
    # Not json's own escapes, which are slower, and which would join two halves of a surrogate pair.
    made.write(json.dumps(reply, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n')
    made.flush()
    is_last = isinstance(reply, dict) and reply['kind'] == 'limit'  # what is left of the memory may be in pieces
    if is_last or len(header := given.read(_HEADER_BYTES)) < _HEADER_BYTES:
      return
    try:
      source, jobs = pickle.loads(given.read(int.from_bytes(header)))
      # At this much CPU time the process ends, also in a call that does not return to Python.
      cpu_s = math.ceil(time.process_time()) + _LIMIT_S * max(1, len(jobs))
      resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
      reply = answer(source, jobs)
    except MemoryError as error:  # before anything was rendered
      reply = {'kind': 'limit', 'line': None, 'sentence': _sentence(error)}


if __name__ == '__main__':
  main()
