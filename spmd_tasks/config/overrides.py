"""Reads `path=value` overrides as typed values; for an unknown path the error lists the nearest names."""

from collections.abc import Sequence
import difflib
from typing import Any

from spmd_tasks.config.encoding import encode_field, show
from spmd_tasks.config.tree import UNSET, Field, fields_of, is_node, walk
from spmd_tasks.config.values import describe_type, example_of, is_of_type, parse_value, type_of_field
from spmd_tasks.errors import UserError

Path = tuple[str, ...]


def split_override(override: str) -> tuple[Path, str]:
  """Splits `path=value` into the path's names and the text of the value.

  Raises:
    UserError: the override has another form.
  """
  path, equals, text = override.partition('=')
  if not equals or not all(path.strip().split('.')):
    raise UserError(f'{_shorten(override)!r} is not an override: write path=value, for example num_train_steps=100.')
  return tuple(path.strip().split('.')), text.strip()


def parse_override(root: Any, path: Path, text: str) -> Any:
  """Returns the value that `text` denotes for the field of `root` at `path`.

  Raises:
    UserError: the path does not exist, or the text is not a value of the field's type.
  """
  field = find_field(root, path)
  name = '.'.join(path)
  present = None if field.value is UNSET else field.value
  kind = type_of_field(path[-1], field.annotation, None if is_node(present) else present)
  if is_node(present):
    if text == 'None' and kind is not Any and is_of_type(None, kind):
      return None
    fields = [f'{name}.{child}' for child in fields_of(present)]
    remedy = f'set one of its fields: {_list(fields)}' if fields else "change that in the experiment's code"
    raise UserError(
      f'{name}={_shorten(text)} cannot be set: {name} is a {_shorten(show(encode_field(present)))}; {remedy}.'
    )
  try:
    return parse_value(text, kind)
  except ValueError:
    example = example_of(kind)
  now = '' if field.value is UNSET else f' (now {_shorten(show(encode_field(field.value)))})'
  if example is None:
    raise UserError(
      f'{name}={_shorten(text)} cannot be set from the command line: {name}{now} takes a {describe_type(kind)}: change '
      "that in the experiment's code."
    )
  kind = describe_type(kind)
  raise UserError(f'{name}={_shorten(text)} is not of type {kind}{now}: write for example {name}={example}')


def find_field(root: Any, path: Path) -> Field:
  """Returns the field of `root` at `path`.

  Raises:
    UserError: the path does not exist; the message lists the nearest names.
  """
  node, field = root, None
  for depth, name in enumerate(path):
    fields = fields_of(node)
    if name not in fields:
      raise _unknown_path(root, path, depth, list(fields))
    field = fields[name]
    node = field.value
  assert field is not None
  return field


def _unknown_path(root: Any, path: Path, depth: int, names: Sequence[str]) -> UserError:
  parent = '.'.join(path[:depth])
  prefix = f'{parent}.' if parent else ''
  full = _shorten('.'.join(path))
  if not names and show(encode_field(find_field(root, path[:depth]).value)).startswith('optax:GradientTransformation'):
    return UserError(
      f'unknown config path {full!r}: {parent} is an optax optimizer that is built already, without fields: give '
      'fdl.Config(optax.adam, learning_rate=1e-3) in place of optax.adam(1e-3), and its arguments can be set.'
    )
  if not names:
    return UserError(f'unknown config path {full!r}: {parent} has no fields of its own; set {parent}=... itself.')
  near = [prefix + name for name in difflib.get_close_matches(path[depth], names, n=3, cutoff=0.5)]
  if not near:  # The name exists elsewhere: `learning_rate` as `task.learner.learning_rate`.
    known = [known for known, _ in walk(root)]
    last = difflib.get_close_matches(path[-1], {name.rpartition('.')[2] for name in known}, n=1, cutoff=0.8)
    near = [name for name in known if name.rpartition('.')[2] in last][:3]
  where = parent or 'the experiment'
  choice = f'Nearest: {", ".join(near)}.' if near else f'It has {_list(names)}.'
  return UserError(f'unknown config path {full!r}: {where} has no {_shorten(path[depth])!r}. {choice}')


def _shorten(text: str, limit: int = 80) -> str:
  return text if len(text) <= limit else f'{text[:limit]}...'


def _list(names: Sequence[str], limit: int = 12) -> str:
  return ', '.join(names[:limit]) + (', ...' if len(names) > limit else '')
