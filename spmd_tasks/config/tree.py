"""Reads and changes a config as a tree of named fields: Fiddle configs, dataclasses, Linen modules, dicts and tuples.

A node has fields; every other value is a leaf. A dict or tuple that contains nodes is a node, any other one is a leaf
(`--set` reaches the keys of a dict leaf all the same). A path joins field names, keys and indices by dots.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
import dataclasses
import functools
import inspect
import math
import types
import typing
from typing import Any

import fiddle as fdl
from fiddle import daglish
from flax import linen as nn
from flax.core import FrozenDict
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import extensions

UNSET = types.SimpleNamespace()  # a parameter without a default that has no value yet
DROP = types.SimpleNamespace()  # as a change: leave this key of a dict out
_NOT_FIELDS_OF_MODULES = ('parent', 'name')  # Linen's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
  """One field of a node: the value that was set, else the default, else UNSET; and the annotation."""

  value: Any
  annotation: Any = Any


def copy_config(root: Any) -> Any:
  """Copies the Fiddle configs and containers but not the leaves; a config that occurs twice is copied once."""

  def copy(value: Any, state: daglish.State) -> Any:
    return state.map_children(value) if state.is_traversable(value) else value

  return daglish.MemoizedTraversal.run(copy, root)


def without_foreign_configs(root: Any) -> Any:
  """Returns a config in which `fdl.build` leaves configs that an extension names as they are: their owner builds them.

  Those of Praxis hold templates, which it leaves unbuilt and Fiddle would build.
  """
  packages = {package for extension in extensions() for package in extension.unbuilt_configs}

  def wrap(value: Any, state: daglish.State) -> Any:
    if isinstance(value, fdl.Buildable) and type(value).__module__.partition('.')[0] in packages:
      return fdl.Config(_unbuilt(value))
    return state.map_children(value) if state.is_traversable(value) else value

  return daglish.MemoizedTraversal.run(wrap, root)


def _unbuilt(config: fdl.Buildable) -> Callable[[], fdl.Buildable]:
  return lambda: config


def is_node(value: Any) -> bool:
  """Tells whether a value has fields of its own."""
  if isinstance(value, fdl.Buildable) or _is_dataclass(value):
    return True
  if isinstance(value, Mapping):
    return any(is_node(item) for item in value.values())
  return type(value) in (list, tuple) and any(is_node(item) for item in value)


def fields_of(node: Any) -> dict[str, Field]:
  """Returns the fields of a node, or the keys of a dict leaf, by name; {} for any other leaf."""
  if isinstance(node, fdl.Buildable):
    return _fields_of_buildable(node)
  if _is_dataclass(node):
    cls: Any = type(node)
    hints = _type_hints(cls)
    names = [field.name for field in dataclasses.fields(node) if field.init]
    if isinstance(node, nn.Module):
      names = [name for name in names if name not in _NOT_FIELDS_OF_MODULES]
    return {name: Field(value=getattr(node, name), annotation=hints.get(name, Any)) for name in names}
  if isinstance(node, Mapping):
    return {str(key): Field(value=item) for key, item in node.items()}
  if is_node(node):
    return {str(index): Field(value=item) for index, item in enumerate(node)}
  return {}


def walk(root: Any, prefix: str = '') -> Iterator[tuple[str, Field]]:
  """Yields (path, field) of all nodes and leaves below `root`, parents first."""
  for name, field in fields_of(root).items():
    path = f'{prefix}{name}'
    yield path, field
    if is_node(field.value):
      yield from walk(field.value, f'{path}.')


def check_buildable(root: Any) -> None:
  """Raises a UserError if Fiddle would not build a config inside `root`, or if a field has no value."""
  _check_reach(root, '', None)
  for path, field in walk(root):
    if field.value is UNSET:
      raise UserError(f'{path} has no value and no default: give it one in the experiment, or --set {path}=...')


def check_numbers(root: Any, prefix: str = '') -> None:
  """Raises a UserError for numbers that nothing can compute with: nan, integers that int32 and uint32 seeds lack.

  Integers of classes that are not of this package, such as a user's own model, may be of any size.
  """
  cls = fdl.get_callable(root) if isinstance(root, fdl.Buildable) else type(root)
  is_counted = isinstance(root, Mapping | tuple | list) or (cls.__module__ or '').startswith('spmd_tasks.')
  for name, field in fields_of(root).items():
    value, path = field.value, f'{prefix}{name}'
    if is_node(value):
      check_numbers(value, f'{path}.')
    if isinstance(value, float) and math.isnan(value):
      raise UserError(f'{path} = nan is no number to compute with: set another one.')
    if is_counted and name == 'dtype' and field.annotation is Any and not _computes(value):
      raise UserError(
        f'{path} = {value} is no dtype to compute in: set float32, bfloat16 or float16 (float64 with JAX_ENABLE_X64=1).'
      )
    is_seed = name == 'seed' or name.endswith('_seed')
    if is_seed and isinstance(value, int) and not 0 <= value < 2**32:
      raise UserError(f'{path} = {value} must be in [0, {2**32:,}), as random numbers are drawn from 32 bits.')
    is_32_bits = is_counted and not is_seed and not name.endswith('_bytes')
    if isinstance(value, int) and is_32_bits and abs(value) >= 2**31:
      raise UserError(f'{path} = {value} must be less than {2**31:,}, which is what JAX counts with: lower it.')


def _computes(dtype: Any) -> bool:
  """Whether activations may have a dtype: JAX has it as it is, and it is of real numbers, not of integers."""
  if dtype is None or dtype is UNSET:
    return True
  try:
    return jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.canonicalize_dtype(dtype) == jnp.dtype(dtype)
  except TypeError:  # it is none
    return False


def apply_changes(node: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
  """Returns `node` with the values at the given paths replaced; Fiddle configs change in place, other nodes are copied.

  All fields of one built object change together, so that the checks of its class see all changes.
  """
  if () in changes:
    return changes[()]
  fields = fields_of(node)
  grouped: dict[str, dict[tuple[str, ...], Any]] = {}
  for (name, *rest), value in changes.items():
    grouped.setdefault(name, {})[tuple(rest)] = value
  return _replace(node, {name: apply_changes(fields[name].value, below) for name, below in grouped.items()})


def _replace(node: Any, new: Mapping[str, Any]) -> Any:
  if not new:
    return node
  if isinstance(node, fdl.Buildable):
    for name, value in new.items():
      setattr(node, name, value)
    return node
  if isinstance(node, nn.Module):
    return node.clone(**new)
  if _is_dataclass(node):
    return dataclasses.replace(node, **new)
  if isinstance(node, Mapping):
    items = {key: new.get(str(key), item) for key, item in node.items()}
    items = {key: item for key, item in items.items() if item is not DROP}
    return FrozenDict(items) if isinstance(node, FrozenDict) else items
  return type(node)(new.get(str(index), item) for index, item in enumerate(node))


def _is_dataclass(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields_of_buildable(node: fdl.Buildable) -> dict[str, Field]:
  target, arguments = fdl.get_callable(node), dict(node.__arguments__)
  hints = _type_hints(target)
  if not all(isinstance(key, str) for key in arguments):
    raise UserError(f'the config of {target.__qualname__} has positional arguments: pass them by name.')
  declared = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
  factories: dict[str, Any] = {field.name: field.default_factory for field in declared}
  is_module = isinstance(target, type) and issubclass(target, nn.Module)
  fields = {}
  for name, parameter in _signature(target).parameters.items():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      continue
    if name in arguments:
      value = arguments.pop(name)
    elif is_module and name in _NOT_FIELDS_OF_MODULES:
      continue
    elif factories.get(name, dataclasses.MISSING) is not dataclasses.MISSING:
      value = factories[name]()
    else:
      value = UNSET if parameter.default is parameter.empty else parameter.default
    fields[name] = Field(value=value, annotation=hints.get(name, parameter.annotation))
  return fields | {name: Field(value=value) for name, value in arguments.items()}


_signature = functools.cache(inspect.signature)


@functools.cache
def _type_hints(target: Hashable) -> dict[str, Any]:
  """Returns the resolved annotations; {} if one of them names a type that only type checkers import."""
  is_plain_class = isinstance(target, type) and not dataclasses.is_dataclass(target)
  try:
    return typing.get_type_hints(getattr(target, '__init__') if is_plain_class else target)  # noqa: B009
  except (NameError, TypeError, AttributeError):
    return {}


def _check_reach(node: Any, path: str, built: str | None) -> None:
  """Checks below `node`; `built` names the object around `node` in which Fiddle does not search for configs."""
  if isinstance(node, fdl.Buildable) and built is not None:
    raise UserError(
      f'{path} is a config inside a {built}, where it would never be built: make that a fdl.Config (or a dict) as well.'
    )
  if not isinstance(node, fdl.Buildable) and type(node) not in (dict, list, tuple):
    built = type(node).__name__
  if is_node(node):
    for name, field in fields_of(node).items():
      _check_reach(field.value, f'{path}.{name}' if path else name, built)
