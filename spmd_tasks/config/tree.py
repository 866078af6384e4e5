"""Reads and changes a config as a tree of named fields: Fiddle configs, dataclasses, Linen modules, dicts and tuples.

A node has fields; every other value is a leaf. A dict or tuple is a node if it contains nodes, and otherwise a leaf
(`--set` can still set the keys of a dict). A path joins field names, keys and indices by dots.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
import dataclasses
import functools
import inspect
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

UNSET = types.SimpleNamespace()  # the value of a field without a default that was not set
DROP = types.SimpleNamespace()  # as a change: drop this key of a dict
_NOT_FIELDS_OF_MODULES = ('parent', 'name')  # Linen's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
  """One field of a node: its value, default or UNSET, and its annotation."""

  value: Any
  annotation: Any = Any


def copy_config(root: Any) -> Any:
  """Copies Fiddle configs and containers, but not leaves; a shared config stays shared."""

  def copy(value: Any, state: daglish.State) -> Any:
    return state.map_children(value) if state.is_traversable(value) else value

  return daglish.MemoizedTraversal.run(copy, root)


def without_foreign_configs(root: Any) -> Any:
  """Wraps the `unbuilt_configs` of extensions so that `fdl.build` leaves them unbuilt.

  Praxis's configs, for example, contain templates that Praxis itself builds later.
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
  """Returns whether a value has fields."""
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
      raise UserError(f'{path} has no value: set it in the experiment, or --set {path}=...')


def check_numbers(root: Any, prefix: str = '') -> None:
  """Raises a UserError for seeds of more than 32 bits, and for dtypes of this package's classes that are not floats."""
  cls = fdl.get_callable(root) if isinstance(root, fdl.Buildable) else type(root)
  is_ours = isinstance(root, Mapping | tuple | list) or (cls.__module__ or '').startswith('spmd_tasks.')
  for name, field in fields_of(root).items():
    value, path = field.value, f'{prefix}{name}'
    if is_node(value):
      check_numbers(value, f'{path}.')
    if is_ours and name == 'dtype' and field.annotation is Any and not _is_compute_dtype(value):
      raise UserError(
        f'{path} = {value} is not a dtype of activations: set float32, bfloat16 or float16 (float64 with '
        'JAX_ENABLE_X64=1).'
      )
    is_seed = name == 'seed' or name.endswith('_seed')
    if is_seed and isinstance(value, int) and not 0 <= value < 2**32:
      raise UserError(f'{path} = {value} must be in [0, {2**32:,}).')


def _is_compute_dtype(dtype: Any) -> bool:
  """Returns whether JAX can compute activations in a dtype: a float dtype that it does not truncate."""
  if dtype is None or dtype is UNSET:
    return True
  try:
    return jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.canonicalize_dtype(dtype) == jnp.dtype(dtype)
  except TypeError:  # not a dtype
    return False


def apply_changes(node: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
  """Returns `node` with the values at some paths replaced; changes Fiddle configs in place, and copies other nodes.

  All fields of a built object change together, so that the checks of its class see all changes.
  """
  if () in changes:
    return changes[()]
  fields = fields_of(node)
  by_field: dict[str, dict[tuple[str, ...], Any]] = {}
  for (name, *rest), value in changes.items():
    by_field.setdefault(name, {})[tuple(rest)] = value
  return _replace(node, {name: apply_changes(fields[name].value, below) for name, below in by_field.items()})


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
  """Returns the resolved annotations; {} if one of them cannot be resolved, such as a type-checking import."""
  is_plain_class = isinstance(target, type) and not dataclasses.is_dataclass(target)
  try:
    return typing.get_type_hints(getattr(target, '__init__') if is_plain_class else target)  # noqa: B009
  except (NameError, TypeError, AttributeError):
    return {}


def _check_reach(node: Any, path: str, built: str | None) -> None:
  """Raises a UserError for configs below `node` inside a built object (of class `built`), where Fiddle finds none."""
  if isinstance(node, fdl.Buildable) and built is not None:
    raise UserError(
      f'{path} is a config inside a built {built}, so it would never be built: make the {built} a fdl.Config as well.'
    )
  if not isinstance(node, fdl.Buildable) and type(node) not in (dict, list, tuple):
    built = type(node).__name__
  if is_node(node):
    for name, field in fields_of(node).items():
      _check_reach(field.value, f'{path}.{name}' if path else name, built)
