"""Reads saved configs, checks their form, and formats them.

    {"experiment": "lm.StdlibTiny", "overrides": {"num_layers": 4}, "config": {"num_layers": 4, ...}}

`config` has every field by its path, including defaults, encoded as in encoding.py. A file may have been edited by
hand, so its form is checked first.
"""

from collections.abc import Mapping
import json
from typing import Any

from etils import epath

from spmd_tasks.config.encoding import one_line, show
from spmd_tasks.config.registry import current_symbol
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path, read_text
from spmd_tasks.signatures import why_unsigned

_MAX_DEPTH = 50


class SavedConfig(dict[str, Any]):
  """A saved config from a file.

  Attributes:
    path: the file.
    why_unsigned: why the config does not count as written by this user for the directory of the file, or ''.
  """

  def __init__(self, saved: Mapping[str, Any], path: epath.PathLike):
    super().__init__(checked_config(saved))
    self.path = path
    self.why_unsigned = why_unsigned(saved, absolute_path(path).parent)


def read_saved_config(path: epath.PathLike, *, remedy: str = 'Give the config.json of a job_log_dir.') -> SavedConfig:
  """Reads a saved config, such as <job_log_dir>/config.json.

  Raises a UserError if the file is not one; if it cannot be read, the message ends with `remedy`.
  """
  try:
    saved = json.loads(read_text(absolute_path(path)))
  except (OSError, ValueError, RecursionError) as error:
    reason = getattr(error, 'strerror', None) or error  # without the path
    raise UserError(f'config {path} cannot be read: {reason}. {remedy}') from error
  try:
    return SavedConfig(saved, path)
  except UserError as error:
    raise UserError(f'config {path}: {error}') from error


def checked_config(saved: Any) -> dict[str, Any]:
  """Returns `saved` with current names. Raises a UserError if it does not have the form of `to_json`."""
  if not isinstance(saved, Mapping) or not {'experiment', 'overrides', 'config'} <= set(saved):
    remedy = 'give the config.json of a job_log_dir'
    if isinstance(saved, Mapping) and 'model_type' in saved:
      remedy = "to run a model's folder, use --exp hf.Model --set model=FOLDER"
    raise UserError(f"not a saved config, which has 'experiment', 'overrides' and 'config': {remedy}.")
  if not isinstance(saved['experiment'], str):
    raise UserError(f"not a saved config: its 'experiment' must be a name, not {_shorten(saved['experiment'])}.")
  for part in ('overrides', 'config'):
    if not isinstance(saved[part], Mapping):
      raise UserError(f'not a saved config: its {part!r} must be an object, not {_shorten(saved[part])}.')
    for path, value in saved[part].items():
      if not _is_encoded(value, _MAX_DEPTH):
        raise UserError(
          f'not a saved config: {one_line(path)} in its {part!r} is {_shorten(value)}, which encodes no value: give '
          'the unedited config.json of a job_log_dir, and change fields by --set.'
        )
  config = {path: _with_current_symbol(value) for path, value in saved['config'].items()}
  environment = saved.get('environment')
  return {**saved, 'config': config, 'environment': environment if isinstance(environment, Mapping) else {}}


def _with_current_symbol(value: Any) -> Any:
  """Returns the encoded value with the current name of its class."""
  match value:
    case {'symbol': symbol}:
      return {**value, 'symbol': current_symbol(symbol)}
  return value


def format_config(saved: Mapping[str, Any]) -> str:
  """Returns sorted `path = value` lines: the experiment's fields, then its parts, each class before its fields."""
  config, parts = saved['config'], ('task', 'train_input', 'eval_inputs', 'decode_inputs')
  own = sorted(path for path in config if path.split('.')[0] not in parts)
  others = sorted((path for path in config if path.split('.')[0] in parts), key=lambda path: path.split('.'))
  lines = [f'experiment = {saved["experiment"]}'] + [
    f'{one_line(path)} = {show(config[path])}' for path in own + others
  ]
  return '\n'.join(lines) + '\n'


def _is_encoded(value: Any, depth: int) -> bool:
  """Returns whether a value has the form of `encode` or `encode_field`, nested at most `depth` deep."""
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


def _shorten(value: Any, limit: int = 80) -> str:
  text = repr(value)
  return text if len(text) <= limit else f'{text[:limit]}...'
