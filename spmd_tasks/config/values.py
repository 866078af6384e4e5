"""Parses the text of `--set path=value` as a value of the field's type, and checks saved values.

The type is the field's annotation. If that is `Any` or cannot be resolved, the type of the current value is used.
pydantic checks values against types; this file adds how values are written as text. No text is ever evaluated as code.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import enum
import functools
import inspect
import operator
import types
import typing
from typing import Annotated, Any, Literal, Never, Union

import jax.numpy as jnp
import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter

NONE = type(None)
_UNKNOWN_TYPES = (Any, object, inspect.Parameter.empty)


class DtypeName(str):
  """The type of a field that holds the name of a dtype, such as `dtype: str = 'float32'`."""


class _Text(str):
  """A text to parse; other values, including plain strings, are only checked."""


def parse_value(text: str, kind: Any) -> Any:
  """Parses a text as a value of type `kind`.

  bool `true`; int `4`, `1_000`, `1e6`; float `1e-3`, `inf`; str bare or quoted; `None`; tuples `1,2`, `(1, 2)`,
  `[1, 2]` or `4,`; enums, literals and dtypes by name; mappings as Python literals.

  Raises a ValueError: the text is not a value of the type. The message is not for users; the caller knows the path.
  """
  return TypeAdapter(_parser_type(kind)).validate_python(_Text(text.strip()))


def is_of_type(value: Any, kind: Any) -> bool:
  """Returns whether a field of a type may have a value; an int counts as a float, and a list as a tuple."""
  try:
    TypeAdapter(_parser_type(kind)).validate_python(value)
  except ValueError:
    return False
  return True


def type_of_field(name: str, annotation: Any, current: Any) -> Any:
  """Returns the type by which a field's text is parsed."""
  if is_dtype(current):
    return np.dtype
  is_named_dtype = name == 'dtype' or name.endswith('_dtype')
  if is_named_dtype and isinstance(current, str):
    return DtypeName
  kind = unwrap(annotation)
  if kind is not Any:
    return kind
  if isinstance(current, (tuple, list)):
    kinds = {type(item) for item in current}
    item = kinds.pop() if len(kinds) == 1 else Any
    return types.GenericAlias(type(current), (item,) if isinstance(current, list) else (item, ...))
  if current is not None:
    return type(current)
  return np.dtype | None if is_named_dtype else Any


def unwrap(kind: Any) -> Any:
  """Returns the type behind Annotated, NewType and aliases; Any for an unknown type."""
  if typing.get_origin(kind) in (Annotated, typing.Final):
    return unwrap(typing.get_args(kind)[0])
  if isinstance(kind, typing.NewType):
    return unwrap(kind.__supertype__)
  if type(kind).__name__ == 'TypeAliasType':
    return unwrap(kind.__value__)
  if kind in _UNKNOWN_TYPES or isinstance(kind, (str, typing.TypeVar, typing.ForwardRef)):
    return Any
  return NONE if kind is None else kind


def is_dtype(value: Any) -> bool:
  """Returns whether a value is a dtype: `np.dtype('float32')`, `np.float32` or `jnp.bfloat16`."""
  if isinstance(value, np.dtype) or type(value) is type(jnp.float32):
    return True
  return isinstance(value, type) and issubclass(value, np.generic)


def _parser_type(kind: Any, has_str_alternative: bool = False) -> Any:
  """Returns the type for pydantic, which parses a `_Text` at every level and checks other values strictly."""
  kind = unwrap(kind)
  if typing.get_origin(kind) in (Union, types.UnionType):
    return _parser_union(kind)
  read, _ = LEAVES.get(kind, (_refuse, None))
  checked: Any = Annotated[Any, AfterValidator(functools.partial(_check, kind=kind))]
  if kind in (bool, int, float, str):
    checked = Annotated[kind, Strict()]
  elif choices := choices_of(kind):
    read = functools.partial(_read_choice, choices)
  elif is_sequence(kind):
    read = functools.partial(_split, needs_comma=has_str_alternative)
    items = tuple(item if item is ... else _parser_type(item) for item in item_types(kind))
    checked = types.GenericAlias(list, items[:1]) if is_a(kind, list) else types.GenericAlias(tuple, items)
  elif is_a(kind, Mapping):
    read = functools.partial(_read_literal, kind=dict)
    checked = types.GenericAlias(Mapping, tuple(map(_parser_type, key_and_item_types(kind))))
  return Annotated[checked, BeforeValidator(lambda value: read(value) if isinstance(value, _Text) else value)]


def _parser_union(kind: Any) -> Any:
  """Orders the members from the narrowest to the widest, because almost every text is a str."""
  order = (NONE, bool, int, float)

  def width(member: Any) -> int:
    if member in order:
      return order.index(member)
    return 5 if is_sequence(member) else 6 if member is str else 7 if member is Any else 4

  members = sorted(dict.fromkeys(map(unwrap, typing.get_args(kind))), key=width)
  union = functools.reduce(operator.or_, [_parser_type(member, str in members) for member in members])
  return Annotated[union, Field(union_mode='left_to_right')] if len(members) > 1 else union


def _check(value: Any, kind: Any) -> Any:
  """Checks dtypes, instances, and choices, because pydantic accepts True for Literal[1]."""
  cls = typing.get_origin(kind) or kind
  if choices := choices_of(kind):
    is_one = any(type(value) is type(choice) and value == choice for choice in choices)
  elif kind is np.dtype:
    is_one = is_dtype(value)
  elif kind is DtypeName:
    is_one = isinstance(value, str) and is_dtype(getattr(jnp, value, None))
  elif cls is Any or not isinstance(cls, type):
    is_one = True
  else:
    is_one = not getattr(cls, '_is_protocol', False) and isinstance(value, cls)
  return value if is_one else _refuse(value)


def _refuse(value: Any) -> Never:
  raise ValueError(f'{value} is not a value of the type')


def _read_bool(text: str) -> bool:
  return _read_choice((True, False), text.capitalize())


def _read_int(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    value = float(text)
    return int(value) if value.is_integer() and '.' not in text else _refuse(text)


def _read_str(text: str) -> str:
  if text == 'None':  # nearly always means the value None, which this field does not accept
    _refuse(text)
  return _read_literal(text, str) if text[:1] in ('"', "'") else str(text)


def _read_choice(choices: Sequence[Any], text: str) -> Any:
  for choice in choices:
    if text in (name_of(choice), repr(choice)):
      return choice
  return _refuse(text)


def _read_literal(text: str, kind: type) -> Any:
  try:
    value = ast.literal_eval(text)
  except (SyntaxError, MemoryError, RecursionError):
    _refuse(text)
  return value if isinstance(value, kind) else _refuse(text)


def _read_untyped(text: str) -> Any:
  for read in (LEAVES[NONE][0], _read_bool, int, float):
    try:
      return read(text)
    except ValueError:
      pass
  try:
    items = _split(text, needs_comma=True)
  except ValueError:
    return _read_str(text)
  return tuple(map(_read_untyped, items))


def _split(text: str, *, needs_comma: bool) -> list[_Text]:
  """Returns the items of `1,2`, `(1, 2)` or `[1, 2]`, and of `1` unless a comma or bracket is needed."""
  items = _split_at_commas(text)
  if len(items) == 1 and text[:1] in ('(', '[') and text[-1] == _CLOSER_OF[text[0]]:
    items = _split_at_commas(text[1:-1])
  elif len(items) == 1 and needs_comma:
    _refuse(text)
  if not items[-1].strip():
    items.pop()
  return [_Text(item.strip()) for item in items]


def _split_at_commas(text: str) -> list[str]:
  """Splits at commas outside of brackets and quotes."""
  items, closers, quote = [''], '', ''
  for char in text:
    if quote:
      quote = quote.replace(char, '')
    elif char in '\'"' and items[-1].rstrip()[-1:] in ('', *'([{:,'):  # not an apostrophe in a word
      quote = char
    elif char in _CLOSER_OF:
      closers += _CLOSER_OF[char]
    elif char == closers[-1:]:
      closers = closers[:-1]
    elif char in ')]}':
      _refuse(text)
    elif char == ',' and not closers:
      items.append('')
      continue
    items[-1] += char
  return _refuse(text) if closers or quote else items


def item_types(kind: Any) -> tuple[Any, ...]:
  """Returns the types of a sequence's items; one type and `...` if the sequence may have any length."""
  args = typing.get_args(kind)
  return args if args and is_a(kind, tuple) else (args[0] if args else Any, ...)


def key_and_item_types(kind: Any) -> tuple[Any, ...]:
  args = typing.get_args(kind)
  return args if len(args) == 2 else (Any, Any)


def choices_of(kind: Any) -> tuple[Any, ...]:
  if typing.get_origin(kind) is Literal:
    return typing.get_args(kind)
  return tuple(kind) if is_a(kind, enum.Enum) else ()


def name_of(choice: Any) -> str:
  return choice.name if isinstance(choice, enum.Enum) else str(choice)


def is_sequence(kind: Any) -> bool:
  return is_a(kind, Sequence) and not is_a(kind, str)


def is_a(kind: Any, base: type) -> bool:
  cls = typing.get_origin(kind) or kind
  return isinstance(cls, type) and issubclass(cls, base)


_CLOSER_OF = {'(': ')', '[': ']', '{': '}'}

LEAVES: dict[Any, tuple[Callable[[str], Any], str]] = {  # by type: a function that parses a text, and an example
  Any: (_read_untyped, '1'),
  NONE: (lambda text: _read_choice((None,), text), 'None'),
  bool: (_read_bool, 'true'),
  int: (_read_int, '4'),
  float: (float, '1e-3'),
  str: (_read_str, 'some_text'),
  np.dtype: (lambda text: getattr(jnp, text, None), 'bfloat16'),
  DtypeName: (str, 'bfloat16'),
}
