"""Command-line text to a typed value; nothing is ever evaluated.

The type is the field's annotation or, where that says nothing (`Any`, unresolvable), the present value's.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
import enum
import inspect
import types
import typing
from typing import Any, Literal, Union

import jax.numpy as jnp
import numpy as np

_NONE = type(None)
_SAYS_NOTHING = (Any, object, inspect.Parameter.empty)


class DtypeName(str):
  """The type of a field that holds a dtype by its name, as `dtype: str = 'float32'` does."""


class TypeMismatchError(Exception):
  """The text is no value of the type; the caller, who knows the config path, says so to the user."""


def parse_value(text: str, kind: Any) -> Any:
  """The value of type `kind` (see `type_of_field`) that a text denotes.

  bool `true`; int `4`, `1_000`, `1e6`; float `1e-3`, `inf`; str bare or quoted; `None`; tuples `1,2`, `(1, 2)`,
  `[1, 2]` or `4,`; enums, literals and dtypes by name; mappings as Python literals.

  Raises:
    TypeMismatchError: the text is no value of the type.
  """
  text, kind = text.strip(), _unwrap(kind)
  if kind is Any:
    return _parse_untyped(text)
  if kind in _SCALARS:
    return _SCALARS[kind][0](text)
  if _is_union(kind):
    return _parse_union(text, typing.get_args(kind))
  if _is_literal(kind):
    items = typing.get_args(kind)
    return _pick(text, [(str(item), item) for item in items] + [(repr(item), item) for item in items])
  if _is_enum(kind):
    return _pick(text, ((member.name, member) for member in kind))
  if _is_sequence(kind):
    return _parse_sequence(text, kind)
  if _is_mapping(kind):
    value = _literal(text)
    if isinstance(value, dict):
      return value
  raise TypeMismatchError


def type_of_field(name: str, annotation: Any, present: Any) -> Any:
  """The type by which a field's text is read."""
  if is_dtype(present):
    return np.dtype
  is_named_dtype = name == 'dtype' or name.endswith('_dtype')
  if is_named_dtype and isinstance(present, str):
    return DtypeName
  kind = _unwrap(annotation)
  if kind is not Any:
    return kind
  if present is not None:
    return _type_of_value(present)
  return np.dtype | None if is_named_dtype else Any


def is_settable(kind: Any) -> bool:
  """False where no text but `None` is a value of the type: functions, classes, objects."""
  kind = _unwrap(kind)
  if _is_union(kind):
    return any(is_settable(member) for member in typing.get_args(kind) if member is not _NONE)
  return (
    kind is Any or kind in _SCALARS or _is_literal(kind) or _is_enum(kind) or _is_sequence(kind) or _is_mapping(kind)
  )


def is_dtype(value: Any) -> bool:
  """Whether a value is a dtype: `np.dtype('float32')`, `np.float32` or `jnp.bfloat16`."""
  if isinstance(value, np.dtype) or type(value) is type(jnp.float32):
    return True
  return isinstance(value, type) and issubclass(value, np.generic)


def describe_type(kind: Any) -> str:
  """A type as a person writes it: `int`, `tuple[int, ...]`, `int | None`."""
  kind = _unwrap(kind)
  if kind in _SCALARS:
    return _SCALARS[kind][1]
  if _is_union(kind):
    return ' | '.join(dict.fromkeys(map(describe_type, typing.get_args(kind))))
  if _is_literal(kind):
    return f'one of {", ".join(map(str, typing.get_args(kind)))}'
  if _is_enum(kind):
    return f'one of {", ".join(member.name for member in kind)}'
  if isinstance(kind, type) and typing.get_origin(kind) is None:
    return kind.__qualname__
  return str(kind).replace('typing.', '').replace('collections.abc.', '')


def example_of(kind: Any) -> str:
  """A text that `parse_value` accepts for the type."""
  kind = _unwrap(kind)
  if kind in _SCALARS:
    return _SCALARS[kind][2]
  if _is_union(kind):
    return example_of(next(member for member in typing.get_args(kind) if is_settable(member)))
  if _is_literal(kind):
    return str(typing.get_args(kind)[0])
  if _is_enum(kind):
    return next(iter(kind)).name
  if _is_sequence(kind):
    items = _item_types(kind, 2)
    return ','.join(f'({text})' if ',' in text else text for text in map(example_of, items))
  return "{'key': 1}" if _is_mapping(kind) else '1'


def _parse_union(text: str, members: tuple[Any, ...]) -> Any:
  """The first member, from the narrowest to the widest, that the text is a value of."""
  is_listed = text[:1] in ('(', '[') or len(_split(text)) > 1

  def width(kind: Any) -> int:
    kind = _unwrap(kind)
    order = (_NONE, bool, int, float)
    if kind in order:
      return order.index(kind)
    if _is_sequence(kind):
      return 5 if is_listed or str not in members else 8
    return 7 if kind is str else 9 if kind is Any else 4

  for member in sorted(members, key=width):
    try:
      return parse_value(text, member)
    except TypeMismatchError:
      pass
  raise TypeMismatchError


def _parse_sequence(text: str, kind: Any) -> Any:
  if text[:1] in ('(', '[') and text[-1:] == {'(': ')', '[': ']'}[text[0]] and _closes_at_end(text):
    text = text[1:-1]
  texts = _split(text)
  item_types = _item_types(kind, len(texts))
  if len(item_types) != len(texts):
    raise TypeMismatchError
  items = [parse_value(item, item_type) for item, item_type in zip(texts, item_types)]
  return items if (typing.get_origin(kind) or kind) is list else tuple(items)


def _item_types(kind: Any, num_items: int) -> tuple[Any, ...]:
  args = typing.get_args(kind)
  if (typing.get_origin(kind) or kind) is tuple and args and args[-1] is not Ellipsis:
    return () if args == ((),) else args
  return (args[0] if args else Any,) * num_items


def _split(text: str) -> list[str]:
  """The text at its top-level commas; a trailing comma ends the last item."""
  parts, depth, quote, start = [], 0, '', 0
  for i, char in enumerate(text):
    if quote:
      quote = '' if char == quote else quote
    elif char in '\'"':
      quote = char
    elif char in '([{':
      depth += 1
    elif char in ')]}':
      depth -= 1
    elif char == ',' and depth == 0:
      parts.append(text[start:i])
      start = i + 1
  parts.append(text[start:])
  if not parts[-1].strip():
    parts.pop()
  return [part.strip() for part in parts]


def _closes_at_end(text: str) -> bool:
  """Whether the opening bracket is closed by the last character: true of `(1,2)`, not of `(1),(2)`."""
  depth = 0
  for i, char in enumerate(text):
    depth += (char in '([') - (char in ')]')
    if depth == 0:
      return i == len(text) - 1
  return False


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    raise TypeMismatchError from None


def _parse_untyped(text: str) -> Any:
  for parse in (_parse_none, _parse_bool, int, float):
    try:
      return parse(text)
    except (TypeMismatchError, ValueError):
      pass
  if text[:1] in ('(', '[') or len(_split(text)) > 1:
    return _parse_sequence(text, tuple)
  return _parse_str(text)


def _parse_none(text: str) -> None:
  if text != 'None':
    raise TypeMismatchError


def _parse_bool(text: str) -> bool:
  return _pick(text.lower(), (('true', True), ('false', False)))


def _parse_int(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    value = _parse_float(text)
    if '.' in text or not value.is_integer():
      raise TypeMismatchError from None
    return int(value)


def _parse_float(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise TypeMismatchError from None


def _parse_str(text: str) -> str:
  if text == 'None':  # nearly always meant as the value None, which this field does not take
    raise TypeMismatchError
  if text[:1] in ('"', "'"):
    value = _literal(text)
    if not isinstance(value, str):
      raise TypeMismatchError
    return value
  return text


def _parse_dtype(text: str) -> Any:
  value = getattr(jnp, text, None)
  if not is_dtype(value):
    raise TypeMismatchError
  return value


def _parse_dtype_name(text: str) -> str:
  _parse_dtype(text)
  return text


def _pick(text: str, choices: Iterable[tuple[str, Any]]) -> Any:
  for name, value in choices:
    if text == name:
      return value
  raise TypeMismatchError


# type: (parser, its name, an example)
_SCALARS: dict[Any, tuple[Any, str, str]] = {
  _NONE: (_parse_none, 'None', 'None'),
  bool: (_parse_bool, 'bool', 'true'),
  int: (_parse_int, 'int', '4'),
  float: (_parse_float, 'float', '1e-3'),
  str: (_parse_str, 'str', 'some_text'),
  np.dtype: (_parse_dtype, 'dtype', 'bfloat16'),
  DtypeName: (_parse_dtype_name, 'dtype', 'bfloat16'),
}


def _type_of_value(value: Any) -> Any:
  if isinstance(value, (tuple, list)):
    kinds = {type(item) for item in value}
    item = kinds.pop() if len(kinds) == 1 else Any
    return types.GenericAlias(type(value), (item,) if isinstance(value, list) else (item, ...))
  return type(value)


def _unwrap(kind: Any) -> Any:
  """The type behind Annotated, NewType and aliases; Any for what says nothing."""
  while True:
    if typing.get_origin(kind) in (typing.Annotated, typing.Final):
      kind = typing.get_args(kind)[0]
    elif isinstance(kind, typing.NewType):
      kind = kind.__supertype__
    elif type(kind).__name__ == 'TypeAliasType':
      kind = kind.__value__
    elif kind in _SAYS_NOTHING or isinstance(kind, (str, typing.TypeVar, typing.ForwardRef)):
      return Any
    else:
      return _NONE if kind is None else kind


def _is_union(kind: Any) -> bool:
  return typing.get_origin(kind) in (Union, types.UnionType)


def _is_literal(kind: Any) -> bool:
  return typing.get_origin(kind) is Literal


def _is_enum(kind: Any) -> bool:
  return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_subclass(kind: Any, base: type) -> bool:
  origin = typing.get_origin(kind) or kind
  return isinstance(origin, type) and issubclass(origin, base)


def _is_sequence(kind: Any) -> bool:
  return _is_subclass(kind, Sequence) and not _is_subclass(kind, str)


def _is_mapping(kind: Any) -> bool:
  return _is_subclass(kind, Mapping)
