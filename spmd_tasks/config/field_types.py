"""What a field of a config may hold: its type, as words and as an example, and whether a value is of it.

The type is the field's annotation or, where that says nothing (`Any`, unresolvable), the present value's.
"""

from collections.abc import Mapping, Sequence
import enum
import inspect
import types
import typing
from typing import Any, Literal, Union

import jax.numpy as jnp
import numpy as np

NONE = type(None)
_SAYS_NOTHING = (Any, object, inspect.Parameter.empty)


class DtypeName(str):
  """The type of a field that holds a dtype by its name, as `dtype: str = 'float32'` does."""


# type: (its name, an example)
_SCALARS: dict[Any, tuple[str, str]] = {
  NONE: ('None', 'None'),
  bool: ('bool', 'true'),
  int: ('int', '4'),
  float: ('float', '1e-3'),
  str: ('str', 'some_text'),
  np.dtype: ('dtype', 'bfloat16'),
  DtypeName: ('dtype', 'bfloat16'),
}


def type_of_field(name: str, annotation: Any, present: Any) -> Any:
  """The type by which a field's text is read."""
  if is_dtype(present):
    return np.dtype
  is_named_dtype = name == 'dtype' or name.endswith('_dtype')
  if is_named_dtype and isinstance(present, str):
    return DtypeName
  kind = unwrap(annotation)
  if kind is not Any:
    return kind
  if present is not None:
    return _type_of_value(present)
  return np.dtype | None if is_named_dtype else Any


def is_settable(kind: Any) -> bool:
  """False where no text but `None` is a value of the type: functions, classes, objects."""
  kind = unwrap(kind)
  if is_union(kind):
    return any(is_settable(member) for member in typing.get_args(kind) if member is not NONE)
  return kind is Any or kind in _SCALARS or is_literal(kind) or is_enum(kind) or is_sequence(kind) or is_mapping(kind)


def is_dtype(value: Any) -> bool:
  """Whether a value is a dtype: `np.dtype('float32')`, `np.float32` or `jnp.bfloat16`."""
  if isinstance(value, np.dtype) or type(value) is type(jnp.float32):
    return True
  return isinstance(value, type) and issubclass(value, np.generic)


def is_of_type(value: Any, kind: Any) -> bool:
  """Whether a plain value may stand in a field of the type: also an int where a float is wanted, a list for a tuple."""
  kind = unwrap(kind)
  if kind is Any:
    return True
  if is_union(kind):
    return any(is_of_type(value, member) for member in typing.get_args(kind))
  if is_literal(kind):
    return any(type(value) is type(item) and value == item for item in typing.get_args(kind))
  if kind in (bool, int):
    return type(value) is kind
  if kind is float:
    return type(value) in (int, float)
  if kind is np.dtype:
    return is_dtype(value)
  if kind is DtypeName:
    return isinstance(value, str) and is_dtype(getattr(jnp, value, None))
  if is_sequence(kind):
    if not isinstance(value, (tuple, list)):
      return False
    kinds = item_types(kind, len(value))
    return len(kinds) == len(value) and all(map(is_of_type, value, kinds))
  if is_mapping(kind):
    _, item_kind = typing.get_args(kind) or (Any, Any)
    return isinstance(value, Mapping) and all(is_of_type(item, item_kind) for item in value.values())
  cls = typing.get_origin(kind) or kind
  if not isinstance(cls, type):
    return True
  return not getattr(cls, '_is_protocol', False) and isinstance(value, cls)


def describe_type(kind: Any) -> str:
  """A type as a person writes it: `int`, `tuple[int, ...]`, `int | None`."""
  kind = unwrap(kind)
  if kind in _SCALARS:
    return _SCALARS[kind][0]
  if is_union(kind):
    return ' | '.join(dict.fromkeys(map(describe_type, typing.get_args(kind))))
  if is_literal(kind):
    return f'one of {", ".join(map(str, typing.get_args(kind)))}'
  if is_enum(kind):
    return f'one of {", ".join(member.name for member in kind)}'
  if isinstance(kind, type) and typing.get_origin(kind) is None:
    return kind.__qualname__
  return str(kind).replace('typing.', '').replace('collections.abc.', '')


def example_of(kind: Any) -> str:
  """A text that `parse_value` accepts for the type."""
  kind = unwrap(kind)
  if kind in _SCALARS:
    return _SCALARS[kind][1]
  if is_union(kind):
    return example_of(next(member for member in typing.get_args(kind) if is_settable(member)))
  if is_literal(kind):
    return str(typing.get_args(kind)[0])
  if is_enum(kind):
    return next(iter(kind)).name
  if is_sequence(kind):
    items = item_types(kind, 2)
    return ','.join(f'({text})' if ',' in text else text for text in map(example_of, items))
  return "{'key': 1}" if is_mapping(kind) else '1'


def item_types(kind: Any, num_items: int) -> tuple[Any, ...]:
  args = typing.get_args(kind)
  if (typing.get_origin(kind) or kind) is tuple and args and args[-1] is not Ellipsis:
    return () if args == ((),) else args
  return (args[0] if args else Any,) * num_items


def _type_of_value(value: Any) -> Any:
  if isinstance(value, (tuple, list)):
    kinds = {type(item) for item in value}
    item = kinds.pop() if len(kinds) == 1 else Any
    return types.GenericAlias(type(value), (item,) if isinstance(value, list) else (item, ...))
  return type(value)


def unwrap(kind: Any) -> Any:
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
      return NONE if kind is None else kind


def is_union(kind: Any) -> bool:
  return typing.get_origin(kind) in (Union, types.UnionType)


def is_literal(kind: Any) -> bool:
  return typing.get_origin(kind) is Literal


def is_enum(kind: Any) -> bool:
  return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_subclass(kind: Any, base: type) -> bool:
  origin = typing.get_origin(kind) or kind
  return isinstance(origin, type) and issubclass(origin, base)


def is_sequence(kind: Any) -> bool:
  return _is_subclass(kind, Sequence) and not _is_subclass(kind, str)


def is_mapping(kind: Any) -> bool:
  return _is_subclass(kind, Mapping)
