"""Raises the errors about wrong overrides, with the nearest names, readable types and examples."""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import types
import typing
from typing import Any, NoReturn, Union

import numpy as np

from spmd_tasks.config.encoding import encode_field, show
from spmd_tasks.config.tree import UNSET, Field, fields_of, is_node, walk
from spmd_tasks.config.values import (
  LEAVES,
  NONE,
  DtypeName,
  choices_of,
  is_a,
  is_sequence,
  item_types,
  key_and_item_types,
  name_of,
  parse_value,
  unwrap,
)
from spmd_tasks.errors import UserError


def refuse_node(node: Any, name: str, text: str) -> NoReturn:
  """Raises the UserError for an override of a node of the config, which has fields."""
  fields = [f'{name}.{child}' for child in fields_of(node)]
  remedy = f'set one of its fields: {_list(fields)}' if fields else "change that in the experiment's code"
  raise UserError(f'{name}={_shorten(text)} cannot be set: {name} is a {_shorten(show(encode_field(node)))}; {remedy}.')


def refuse_value(field: Field, kind: Any, name: str, text: str) -> NoReturn:
  """Raises the UserError for a text that is not a value of the field's type."""
  example, described = example_of(kind), describe_type(kind)
  if isinstance(field.value, tuple) and all(type(item) is int for item in field.value):
    example = ','.join(map(str, field.value)) or example  # has the right length, such as one size per mesh axis
  now = '' if field.value is UNSET else f' (now {_shorten(show(encode_field(field.value)))})'
  if example is None:
    raise UserError(
      f'{name}={_shorten(text)} cannot be set from the command line: {name}{now} takes a {described}: change that in '
      "the experiment's code."
    )
  raise UserError(f'{name}={_shorten(text)} is not of type {described}{now}: write for example {name}={example}')


def refuse_path(root: Any, node: Any, path: Sequence[str], depth: int) -> NoReturn:
  """Raises the UserError for a path of `root` whose name at `depth` is not a field of `node`, the object there."""
  names = list(fields_of(node))
  parent = '.'.join(path[:depth])
  prefix = f'{parent}.' if parent else ''
  unknown = f'unknown config path {_shorten(".".join(path))!r}'
  close = difflib.get_close_matches(path[depth][:100], names, n=3, cutoff=0.5)
  optimizer = _built_optimizer(node, parent) if depth else None
  if optimizer and not difflib.get_close_matches(path[depth][:100], close, cutoff=0.75):
    from spmd_tasks.learning.from_optax import built_optimizer_error  # imports optax, as the optimizer has

    own = [f"the experiment's {path[-1]}"] if path[-1] in fields_of(root) else []
    raise UserError(f'{unknown}: {built_optimizer_error(optimizer, *own)}')
  if not names:
    encoded = encode_field(node)
    is_value = not isinstance(encoded, dict) or not {'symbol', 'object'} & encoded.keys()
    remedy = f'set {parent}=... itself' if is_value else 'set a field of the experiment that makes it'
    raise UserError(f'{unknown}: {parent} has no fields of its own; {remedy}.{_if_built(root, path)}')
  # The name may exist below or elsewhere, such as `learning_rate` as `task.learner.optimizer.learning_rate`.
  near = [known for known, _ in walk(node, prefix) if known.endswith(f'.{path[depth]}')][:3]
  near = near or [prefix + name for name in close]
  if not near:
    known = [known for known, _ in walk(root)]
    last = difflib.get_close_matches(path[-1][:100], {name.rpartition('.')[2] for name in known}, n=1, cutoff=0.8)
    near = [name for name in known if name.rpartition('.')[2] in last][:3]
  owner = parent or 'the experiment'
  choice = f'Nearest: {", ".join(near)}.' if near else f'It has {_list(names)}.{_if_built(root, path)}'
  raise UserError(f'{unknown}: {owner} has no {_shorten(path[depth])!r}. {choice}')


def _built_optimizer(node: Any, path: str) -> str | None:
  """Returns the path of a built optax optimizer that is `node`, at `path`, or one of its fields."""
  for name, field in [(path, Field(value=node)), *walk(node, f'{path}.')]:
    name = name.removesuffix('.factory')  # of the FromOptax in which a Learner wraps it
    is_leaf = name.count('.') <= path.count('.') + 1 and not is_node(field.value)
    if is_leaf and 'optax:GradientTransformation' in show(encode_field(field.value)):
      return name
  return None


def _if_built(root: Any, path: Sequence[str]) -> str:
  """Returns a sentence if the path is in a built part, inside which Fiddle configs are no longer configs."""
  part = fields_of(root).get(path[0]) if len(path) > 2 else None
  if part is None or not dataclasses.is_dataclass(part.value):
    return ''
  fix = f'return fdl.Config({type(part.value).__name__}, ...)'
  return f' {path[0]}() returns a built object: to set arguments of the functions that make its fields, {fix}.'


def describe_type(kind: Any) -> str:
  """Returns a type as it is written in code: `int`, `tuple[int, ...]`, `int | None`."""
  kind = unwrap(kind)
  if typing.get_origin(kind) in (Union, types.UnionType):
    return ' | '.join(dict.fromkeys(map(describe_type, typing.get_args(kind))))
  if choices := choices_of(kind):
    return f'one of {", ".join(map(name_of, choices))}'
  if kind in (NONE, np.dtype, DtypeName):
    return 'None' if kind is NONE else 'dtype'
  if isinstance(kind, type) and typing.get_origin(kind) is None:
    return kind.__qualname__
  return str(kind).replace('typing.', '').replace('collections.abc.', '')


def example_of(kind: Any) -> str | None:
  """Returns a text that `parse_value` accepts; None for functions, classes and objects, which no text denotes."""
  kind = unwrap(kind)
  if typing.get_origin(kind) in (Union, types.UnionType):
    examples = [example_of(member) for member in typing.get_args(kind) if member is not NONE]
    return next((example for example in examples if example is not None), None)
  if choices := choices_of(kind):
    return name_of(choices[0])
  if is_sequence(kind):
    items = item_types(kind)
    texts = [example_of(item) or 'None' for item in (items[:1] * 2 if items[-1] is ... else items)]
    return ','.join(f'({text})' if ',' in text else text for text in texts)
  if is_a(kind, Mapping):
    item = key_and_item_types(kind)[1]
    return f"{{'key': {parse_value(example_of(item) or 'None', item)!r}}}"
  return LEAVES[kind][1] if kind in LEAVES else None


def _shorten(text: str) -> str:
  return text if len(text) <= 80 else f'{text[:80]}...'


def _list(names: Sequence[str]) -> str:
  return ', '.join(names[:12]) + (', ...' if len(names) > 12 else '')
