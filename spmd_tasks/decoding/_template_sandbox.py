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


class RefusedError(Exception):
  """A template called raise_exception."""


class LimitError(Exception):
  """A template takes too long or makes something too large."""


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
  """The text of a template that `compile_template` made.

  Raises:
    RefusedError, LimitError: see there.
    Exception: whatever else a template may raise.
  """
  reset = _deadline.set(time.monotonic() + _LIMIT_S)
  try:
    pieces, size = [], 0
    for piece in template.generate(**variables):
      size += len(piece)
      _check_size(size)
      pieces.append(piece)
    return ''.join(pieces)
  finally:
    _deadline.reset(reset)


@functools.cache
def compile_template(source: str) -> jinja2.Template:
  """Compiles a template; raises a jinja2.TemplateSyntaxError."""
  environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
  environment.filters['tojson'] = _to_json
  environment.filters.update({name: _bounded(environment.filters[name]) for name in _SIZED_FILTERS})
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda format: datetime.datetime.now().strftime(format)
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
    return caller()


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
