"""Compiles and renders chat templates as Hugging Face's transformers does, within limits of time and size.

A template comes with a model, from strangers. Jinja's sandbox keeps it from Python's internals, but not from loops
without end or from texts that fill the memory. So each loop turn and each call looks at the clock, operators that make
large values look at sizes first, and the text is counted as it grows.
"""

from collections.abc import Mapping
import contextvars
import datetime
import functools
import json
import re
import time
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_LIMIT_S = 5.0
_MAX_SIZE = 16_000_000  # characters of a text, items of a list, bits of an integer
_MAX_EXPONENT = 4096
_MAX_WIDTH = 100_000
_WIDE_FORMAT = re.compile(r'[%{][^%{}]*?(?:\d{6}|\*)')
_SIZED_FILTERS = ('batch', 'center', 'format', 'indent', 'slice')  # these take a width or a number of items
_deadline = contextvars.ContextVar('deadline', default=float('inf'))
_now: contextvars.ContextVar[datetime.datetime | None] = contextvars.ContextVar('now', default=None)
_marks: contextvars.ContextVar['_Marks | None'] = contextvars.ContextVar('marks', default=None)


class RefusedError(Exception):
  """A template called raise_exception."""


class LimitError(Exception):
  """A template takes too long or makes something too large."""


class MarkError(Exception):
  """A template writes a `{% generation %}` block into a macro or a variable, so that its place is not known."""


class _Marks:
  """Collects the places where `{% generation %}` blocks write while a template is rendered."""

  def __init__(self):
    self.position = 0  # characters written so far
    self.found: list[tuple[int, str]] = []  # where a block begins, and its text


def render_template(
  template: jinja2.Template, variables: Mapping[str, Any], now: datetime.datetime | None = None
) -> str:
  """The text of a template that `compile_template` made. `now` is the time for `strftime_now`; None: the clock's.

  Raises:
    RefusedError, LimitError: see there.
    Exception: whatever else a template may raise.
  """
  return _render(template, variables, now)[0]


def render_marked(
  template: jinja2.Template, variables: Mapping[str, Any], now: datetime.datetime | None = None
) -> tuple[str, list[tuple[int, int]]]:
  """Renders as `render_template`; also returns the (start, end) characters of `{% generation %}` blocks, in order.

  Raises:
    MarkError: a block's place in the text is not known.
  """
  text, marks = _render(template, variables, now)
  for start, written in marks.found:
    if text[start : start + len(written)] != written:
      raise MarkError
  return text, [(start, start + len(written)) for start, written in marks.found if written]


def _render(
  template: jinja2.Template, variables: Mapping[str, Any], now: datetime.datetime | None
) -> tuple[str, _Marks]:
  marks = _Marks()
  resets: list[tuple[contextvars.ContextVar[Any], contextvars.Token[Any]]]
  resets = [(_deadline, _deadline.set(time.monotonic() + _LIMIT_S)), (_marks, _marks.set(marks)), (_now, _now.set(now))]
  try:
    pieces = []
    for piece in template.generate(**variables):
      marks.position += len(piece)
      _check_size(marks.position)
      pieces.append(piece)
    return ''.join(pieces), marks
  finally:
    for variable, token in resets:
      variable.reset(token)


@functools.cache
def compile_template(source: str) -> jinja2.Template:
  """Compiles a template; raises a jinja2.TemplateSyntaxError."""
  environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
  environment.filters['tojson'] = _to_json
  environment.filters.update({name: _bounded(environment.filters[name]) for name in _SIZED_FILTERS})
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda format: (_now.get() or datetime.datetime.now()).strftime(format)
  environment.globals['namespace'] = _Namespace
  environment.globals['dict'] = _MakeDict()
  return environment.from_string(source)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """Jinja's sandbox, with limits."""

  intercepted_binops = frozenset(('+', '*', '**', '%'))

  def _parse(self, source, name, filename):
    return _AddChecks().visit(super()._parse(source, name, filename)).set_environment(self)

  def call(__self, __context, __obj, *args, **kwargs):  # noqa: N805 (Jinja's names, so that arguments may be `self`)
    _check_time()
    owner = getattr(__obj, '__self__', None)
    if isinstance(owner, str):  # as in 'x'.ljust(10**9) and '{:>1000000000}'.format(1)
      _check_widths(*args, *kwargs.values(), form=owner if 'format' in __obj.__name__ else None)
    return super().call(__context, __obj, *args, **kwargs)

  def call_binop(self, context, operator, left, right):
    is_sized = hasattr(left, '__len__') or hasattr(right, '__len__')
    if operator == '%':
      _check_widths(form=left)
    elif operator == '**':
      if isinstance(right, int) and right > _MAX_EXPONENT:
        raise LimitError(f'it has an exponent above {_MAX_EXPONENT}')
      _check_size(_size(left) * (right if isinstance(right, int) else 1))
    elif operator == '*' and is_sized:
      _check_size(_count(left) * _count(right))
    else:
      _check_size(_size(left) + _size(right))
    return super().call_binop(context, operator, left, right)

  @staticmethod
  def turn() -> None:
    """Called at each turn of a loop; `call` looks at the clock."""

  @staticmethod
  def join(values) -> str:
    """The operator ~."""
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return ''.join(texts)


class _AddChecks(jinja2.visitor.NodeTransformer):
  """Makes a template call the two methods above."""

  def visit_For(self, node):  # noqa: N802
    self.generic_visit(node)
    node.body.insert(0, nodes.ExprStmt(_call_method('turn'), lineno=node.lineno))
    return node

  def visit_Concat(self, node):  # noqa: N802
    self.generic_visit(node)
    return _call_method('join', nodes.List(node.nodes)).set_lineno(node.lineno)


def _call_method(name, *arguments):
  return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class _GenerationBlock(jinja2.ext.Extension):
  """Accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's tokens for training."""

  tags = {'generation'}

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return nodes.CallBlock(self.call_method('text_of'), [], [], body).set_lineno(line)

  def text_of(self, caller) -> str:
    text = caller()
    if (marks := _marks.get()) is not None:
      marks.found.append((marks.position, text))
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


class _MakeDict:
  """The function `dict`, which is no class whose attributes lead elsewhere."""

  def __call__(self, *args, **kwargs):
    return dict(*args, **kwargs)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Replaces Jinja's own filter, which escapes the characters of HTML."""
  _check_widths(indent)
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(sentence: str) -> NoReturn:
  raise RefusedError(sentence)


def _bounded(function):
  @functools.wraps(function)  # keeps Jinja's marks
  def bounded(*args, **kwargs):
    _check_widths(*args, *kwargs.values(), form=args[0] if function.__name__ == 'do_format' else None)
    return function(*args, **kwargs)

  return bounded


def _check_name(name: Any) -> None:
  if isinstance(name, str) and name.startswith('_'):
    raise jinja2.exceptions.SecurityError(f'a namespace has no attribute {name!r}: names begin with a letter')


def _check_time() -> None:
  if time.monotonic() > _deadline.get():
    raise LimitError(f'it takes more than {_LIMIT_S:g} s')


def _check_widths(*values: Any, form: Any = None) -> None:
  """Refuses large numbers among arguments, and large widths in a format string."""
  is_wide = isinstance(form, str) and _WIDE_FORMAT.search(form)
  if is_wide or any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
    raise LimitError(f'it formats a text with a width above {_MAX_WIDTH:,}')


def _check_size(size: int) -> None:
  if size > _MAX_SIZE:
    raise LimitError(f'it makes something larger than {_MAX_SIZE:,}')


def _size(value: Any) -> int:
  return len(value) if hasattr(value, '__len__') else value.bit_length() if isinstance(value, int) else 0


def _count(value: Any) -> int:
  return value if isinstance(value, int) else _size(value)
