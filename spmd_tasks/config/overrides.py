"""Reads `path=value` overrides as typed values; for an unknown path the error lists the nearest names."""

from typing import Any

from spmd_tasks.config.tree import UNSET, Field, fields_of, is_node
from spmd_tasks.config.values import is_of_type, parse_value, type_of_field
from spmd_tasks.errors import UserError

Path = tuple[str, ...]


def split_override(override: str) -> tuple[Path, str]:
  """Splits `path=value` into the path's names and the text of the value. Raises a UserError for another form."""
  path, equals, text = override.partition('=')
  if not equals or not all(path.strip().split('.')):
    raise UserError(f'{override[:80]!r} is not an override: write path=value, for example num_train_steps=100.')
  return tuple(path.strip().split('.')), text.strip()


def parse_override(root: Any, path: Path, text: str) -> Any:
  """Returns the value that `text` denotes for the field of `root` at `path`, or raises a UserError with the remedy."""
  field = find_field(root, path)
  name = '.'.join(path)
  present = None if field.value is UNSET else field.value
  kind = type_of_field(path[-1], field.annotation, None if is_node(present) else present)
  if is_node(present):
    if text == 'None' and kind is not Any and is_of_type(None, kind):
      return None
    from spmd_tasks.config.refusals import refuse_node

    refuse_node(present, name, text)
  try:
    return parse_value(text, kind)
  except ValueError:
    from spmd_tasks.config.refusals import refuse_value

    refuse_value(field, kind, name, text)


def find_field(root: Any, path: Path) -> Field:
  """Returns the field of `root` at `path`. Raises a UserError with the nearest names if there is none."""
  node, field = root, None
  for depth, name in enumerate(path):
    fields = fields_of(node)
    if name not in fields:
      from spmd_tasks.config.refusals import refuse_path

      refuse_path(root, node, path, depth)
    field = fields[name]
    node = field.value
  assert field is not None
  return field
