"""Command-line text to a typed value; nothing is ever evaluated."""

import ast
from collections.abc import Callable, Iterable
import typing
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd_tasks.config.field_types import (
  NONE,
  DtypeName,
  is_dtype,
  is_enum,
  is_literal,
  is_mapping,
  is_sequence,
  is_union,
  item_types,
  unwrap,
)


class TypeMismatchError(Exception):
  """The text is no value of the type; the caller, who knows the config path, says so to the user."""


def parse_value(text: str, kind: Any) -> Any:
  """The value of type `kind` (see field_types.py) that a text denotes.

  bool `true`; int `4`, `1_000`, `1e6`; float `1e-3`, `inf`; str bare or quoted; `None`; tuples `1,2`, `(1, 2)`,
  `[1, 2]` or `4,`; enums, literals and dtypes by name; mappings as Python literals.

  Raises:
    TypeMismatchError: the text is no value of the type.
  """
  text, kind = text.strip(), unwrap(kind)
  if kind is Any:
    return _parse_untyped(text)
  if kind in _SCALARS:
    return _SCALARS[kind](text)
  if is_union(kind):
    return _parse_union(text, typing.get_args(kind))
  if is_literal(kind):
    items = typing.get_args(kind)
    return _pick(text, [(str(item), item) for item in items] + [(repr(item), item) for item in items])
  if is_enum(kind):
    return _pick(text, ((member.name, member) for member in kind))
  if is_sequence(kind):
    return _parse_sequence(text, kind)
  if is_mapping(kind):
    value = _literal(text)
    if isinstance(value, dict):
      return value
  raise TypeMismatchError


def _parse_union(text: str, members: tuple[Any, ...]) -> Any:
  """The first member, from the narrowest to the widest, that the text is a value of."""
  is_listed = text[:1] in ('(', '[') or len(_split(text)) > 1

  def width(kind: Any) -> int:
    kind = unwrap(kind)
    order = (NONE, bool, int, float)
    if kind in order:
      return order.index(kind)
    if is_sequence(kind):
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
  kinds = item_types(kind, len(texts))
  if len(kinds) != len(texts):
    raise TypeMismatchError
  items = [parse_value(item, item_kind) for item, item_kind in zip(texts, kinds)]
  return items if (typing.get_origin(kind) or kind) is list else tuple(items)


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


_SCALARS: dict[Any, Callable[[str], Any]] = {
  NONE: _parse_none,
  bool: _parse_bool,
  int: _parse_int,
  float: _parse_float,
  str: _parse_str,
  np.dtype: _parse_dtype,
  DtypeName: _parse_dtype_name,
}
