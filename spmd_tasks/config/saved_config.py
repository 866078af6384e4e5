"""The form of a saved config, which is checked before anything is made of a file that somebody may have edited.

    {"experiment": "lm.StdlibTiny", "overrides": {"num_layers": 4}, "config": {"num_layers": 4, ...}}

Values are those of encoding.py.
"""

from collections.abc import Mapping
from typing import Any

from spmd_tasks.errors import UserError

_MAX_DEPTH = 50


def check_saved_config(saved: Any) -> None:
  """Returns if `saved` has the form that `resolve.to_json` gives.

  Raises:
    UserError: it has not; the message says where.
  """
  if not isinstance(saved, Mapping) or not {'experiment', 'overrides', 'config'} <= set(saved):
    raise UserError("this is no saved config: it must be an object with 'experiment', 'overrides' and 'config'.")
  if not isinstance(saved['experiment'], str):
    raise UserError(f"this is no saved config: its 'experiment' must be a name, not {_shown(saved['experiment'])}.")
  for part in ('overrides', 'config'):
    if not isinstance(saved[part], Mapping):
      raise UserError(f'this is no saved config: its {part!r} must be an object, not {_shown(saved[part])}.')
    for path, value in saved[part].items():
      if not _is_encoded(value, _MAX_DEPTH):
        raise UserError(
          f'this is no saved config: {path} in its {part!r} is {_shown(value)}, which stands for no value: give the '
          'config.json of a job_log_dir as it was written, and change settings by --set.'
        )


def _is_encoded(value: Any, depth: int) -> bool:
  """Whether it is what `encoding.encode` or `encode_field` gives, nested at most `depth` deep."""
  if value is None or isinstance(value, (bool, int, float, str)):
    return True
  if depth == 0:
    return False

  def are_encoded(items: list[Any] | Mapping[str, Any]) -> bool:
    values = items.values() if isinstance(items, Mapping) else items
    return all(_is_encoded(item, depth - 1) for item in values)

  match value:
    case list():
      return are_encoded(value)
    case {'float': 'inf' | '-inf' | 'nan'}:
      return True
    case {'list': list() as items} | {'dict': dict() as items}:
      return are_encoded(items)
    case {'dtype': str()} | {'enum': str(), 'name': str()}:
      return True
    case {'object': str()}:
      return isinstance(value.get('repr', ''), str)
    case {'symbol': str()}:
      keys = value.get('keys', [])
      are_names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
      details = [value.get('closure', {}), value.get('partial', {})]
      return are_names and all(isinstance(items, Mapping) and are_encoded(items) for items in details)
  return False


def _shown(value: Any, limit: int = 80) -> str:
  text = repr(value)
  return text if len(text) <= limit else f'{text[:limit]}...'
