"""Resolves a saved config with the current code: `resolved = from_json(saved, ['seed=1'])`.

Saved values replace the code's current defaults. A field that was added since has its default. A field that was removed
must have been off (None or False).

A config.json may come from a stranger, and importing a module runs it. So a name in a file imports only modules

* of this package, of an installed package that an extension names, or registered by an entry point,
* below a directory of --experiment_path,
* below the directories from which the job's own command imported, if this user signed the config (`own_directories`).

This is decided without importing anything. Modules that are imported already may be used as well. The same rules hold
for functions that a config names (references.py), also in overrides of a saved config.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import enum
from importlib import metadata
import json
import os
from pathlib import Path
import sys
from typing import Any

import fiddle as fdl
from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np

from spmd_tasks import references, signatures
from spmd_tasks.config import registry
from spmd_tasks.config.encoding import encode_field, one_line, show, symbol_of
from spmd_tasks.config.refusals import describe_type
from spmd_tasks.config.resolution import (
  PARTS,
  TIMEOUTS,
  ConfigPath,
  Prepare,
  ResolvedConfig,
  adapted,
  build_experiment,
  modules_in,
  parts_of,
  resolve_changed,
)
from spmd_tasks.config.saved_config import SavedConfig, checked_config
from spmd_tasks.config.tree import DROP, UNSET, apply_changes, is_node, walk
from spmd_tasks.config.values import is_dtype, is_of_type, unwrap
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import MESH_FIELDS
from spmd_tasks.experiments import is_own_module, modules_by_entry_point
from spmd_tasks.extensions import extensions

# Removed classes by the symbols that saved configs of earlier versions have, and what to write instead.
_REMOVED = {
  'spmd_tasks.learning:Sgd': "fdl.Config(FromOptax, factory=optax.sgd, learning_rate=..., arguments={'momentum': 0.9})",
  'spmd_tasks.learning:Lion': 'fdl.Config(FromOptax, factory=optax.lion, learning_rate=...)',
}


def from_json(
  saved: Mapping[str, Any],
  overrides: Sequence[str] = (),
  experiment_path: Sequence[str | os.PathLike[str]] = (),
  prepare: Prepare | None = None,
) -> ResolvedConfig:
  """Resolves the config that `to_json` saved, with overrides. `prepare` and `experiment_path` are as in `resolve`.

  The file decides neither what is imported nor what is called: the experiment and the functions that the file or an
  override names must obey the rules above, and other classes and functions come from the experiment's own code.

  Raises a UserError: the JSON is not a saved config, the experiment may not be imported, a saved path no longer exists,
  a value has another type than its field, or the code now has another class, function or object at a path.
  """
  own, why_not = own_directories(saved) if isinstance(saved, SavedConfig) else ([], '')
  directories = registry.add_to_search_path(experiment_path) + own
  saved = checked_config(saved)
  cls = get_saved(saved['experiment'], directories, why_not)

  def check(changes: dict[ConfigPath, Any]) -> dict[ConfigPath, Any]:
    for path, value in changes.items():
      for name in modules_in(path, value):
        _check_module(name, '.'.join(path), directories, why_not)
    return changes

  def timeouts() -> dict[str, Any]:
    return {name: decode(saved['config'][name]) for name in TIMEOUTS if name in saved['config']}

  cls = adapted(cls, timeouts, prepare)
  config = fdl.Config(cls)
  part_values = {path: value for path, value in saved['config'].items() if path.split('.')[0] in PARTS}
  fields = {path: value for path, value in saved['config'].items() if path not in part_values}
  experiment_values = cls.current_fields(fields)
  config = apply_changes(config, check(_changes_to(config, experiment_values)))
  for name in MESH_FIELDS:
    if name in experiment_values:  # even if it equals the default, as the class's layout may set another value
      setattr(config, name, decode(experiment_values[name]))
  _unset_fields_of_layout(cls, config)
  as_saved = build_experiment(cls, config)
  if prepare is not None:
    prepare(as_saved)
  changes = check(_changes_to(parts_of(as_saved, config.__arguments__), part_values))
  return resolve_changed(
    cls,
    config,
    changes,
    overrides,
    earlier=cls.current_fields(saved['overrides']),
    check=check,
    code_directories=[*directories, *references.directories_of(cls)],
  )


def _unset_fields_of_layout(cls: type, config: fdl.Config) -> None:
  """Unsets the mesh fields that equal the values from `mesh`, so that overrides of `mesh` have an effect."""
  values = {name: getattr(config, name) for name in MESH_FIELDS if name in config.__arguments__}
  # Other saved fields may fit the saved mesh only, such as a number of microbatches that fits its stages.
  for kept in ((), ('ici_mesh_shape', 'dcn_mesh_shape'), MESH_FIELDS):
    for name, value in values.items():
      if name in kept:
        setattr(config, name, value)
      elif name in config.__arguments__:
        delattr(config, name)
    with contextlib.suppress(UserError):
      experiment = build_experiment(cls, config)
      break
  else:
    return  # the fields contradict each other, whatever the mesh: the caller raises the error
  for name, value in values.items():
    if getattr(experiment, name) != value:
      setattr(config, name, value)


def _changes_to(root: Any, saved: Mapping[str, Any]) -> dict[ConfigPath, Any]:
  """Returns the changes that give `root` the saved values."""
  current = dict(walk(root))
  changes: dict[ConfigPath, Any] = {}
  refused = []
  for path, value in saved.items():
    if isinstance(value, dict) and (replacement := _REMOVED.get(value.get('symbol', ''))):
      raise UserError(
        f'the saved config has {show(value)} at {path}, a class that was removed: write {replacement} in the '
        'experiment and run it with --exp and --accept_config_changes.'
      )
    if path not in current:
      if value is None or value is False:  # a field of an older version that was off
        continue
      refused.append(f'{one_line(path)} (saved as {show(value)}) no longer exists')
      continue
    field = current[path]
    now = None if field.value is UNSET else encode_field(field.value)
    if field.value is not UNSET and json.dumps(now, sort_keys=True) == json.dumps(value, sort_keys=True):
      continue  # compared as text: 1, 1.0 and True are different values
    key = tuple(path.split('.'))
    keys_now, keys = (set(node.get('keys', ())) if isinstance(node, dict) else set() for node in (now, value))
    if keys and keys <= keys_now:
      changes |= {(*key, name): DROP for name in keys_now - keys}
      continue
    try:
      decoded = decode(value, field.value)
    except ValueError:
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
      continue
    kind = unwrap(field.annotation)
    if path in PARTS or (is_node(field.value) and kind is Any and decoded is not None):
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
    elif (isinstance(field.value, fdl.Buildable) or is_of_type(field.value, kind)) and not is_of_type(decoded, kind):
      refused.append(f'{path} is {show(value)} and should be of type {describe_type(kind)}')
    else:
      changes[key] = decoded
  if refused:
    raise UserError(
      f'the saved config does not fit the current code: {"; ".join(refused)}. Run it with the code that saved it, or '
      'start a new run.'
    )
  return changes


def decode(encoded: Any, current: Any = None) -> Any:
  """Decodes a value that `encode` encoded.

  Args:
    encoded: the JSON.
    current: the current value of the field, which decides the class of enums, dicts and dtypes.

  Raises a UserError for a function, a class, an enum of another class or an object.
  """
  if isinstance(encoded, list):
    return tuple(decode(item) for item in encoded)
  if not isinstance(encoded, dict):
    return encoded
  match encoded:
    case {'float': text}:
      return float(text)
    case {'list': items}:
      return [decode(item) for item in items]
    case {'dict': items}:
      values = {key: decode(item) for key, item in items.items()}
      return FrozenDict(values) if isinstance(current, FrozenDict) else values
    case {'dtype': name} if is_dtype(getattr(jnp, name, None)):
      return jnp.dtype(name) if isinstance(current, np.dtype) else getattr(jnp, name)
    case {'enum': symbol, 'name': name} if isinstance(current, enum.Enum) and symbol == symbol_of(type(current)):
      if name in type(current).__members__:
        return type(current)[name]
  raise UserError(f'{show(encoded)} cannot be decoded from JSON.')


def _check_module(name: str, path: str, directories: Sequence[Path], why_not: str) -> None:
  """Raises a UserError for a module, or a reference to a function, that a file alone may not import."""
  because = f' ({why_not})' if why_not else ''
  if ':' in name:
    try:
      references.check_reference(name, directories)
    except UserError as error:
      raise UserError(f'{path}: a saved config alone never decides what is imported{because}: {error}') from error
  elif not may_be_imported(name, (), directories):
    raise UserError(
      f'the saved config names the module {name} at {path}, and a file alone never decides what is imported{because}: '
      f'{references.remedy(name.partition(".")[0])}.'
    )


def get_saved(name: str, directories: Sequence[Path] = (), why_not: str = '') -> type:
  """Returns the experiment class that a saved config names.

  Args:
    name: a name from `name_of`.
    directories: modules below them may be imported as well.
    why_not: why the directories in the config are not among them, for the message.

  Raises a UserError: as `registry.get`; or the module is neither registered nor below `directories`.
  """
  if (cls := registry.known(name)) is not None:
    return cls
  module_name, _ = registry.split_name(name)
  registered = registry.registered_modules()
  if not is_own_module(module_name) and module_name not in modules_by_entry_point():
    top = module_name.partition('.')[0]
    for module in sorted(registered):
      if module.partition('.')[0] == top:  # importing it may import `module_name`, such as with a base class
        registry.import_module(name, module)
    if not may_be_imported(module_name, registered, directories):
      because = f' ({why_not})' if why_not else ''
      raise UserError(
        f'the saved config names the experiment {name}, which is not registered, and a file alone never decides what '
        f'is imported{because}: {references.remedy(top)} (in Python, import {module_name} first).'
      )
  return registry.find_class(name, is_typed=False)


def own_directories(saved: SavedConfig) -> tuple[list[Path], str]:
  """Returns the directories of modules in a config.json that this user signed, or [] and why they do not count."""
  origins = saved.get('origin', [])
  origins = [origins] if isinstance(origins, str) else origins
  if not isinstance(origins, list) or not origins or not all(isinstance(origin, str) for origin in origins):
    return [], ''
  if saved.why_unsigned:
    return [], f'the directories in {saved.path} do not count, because {saved.why_unsigned}'
  own = [Path(origin) for origin in origins]
  try:
    for directory in own:
      if not registry.is_origin(directory):
        return [], f'{directory}, where its modules were, is no longer a directory'
      for path in (directory, *_packages_in(directory, saved)):
        if why := signatures.why_writable_by_others(path):
          return [], why
  except OSError as error:
    return [], f'{error.filename}: {error.strerror}'
  registry.add_to_search_path([directory for directory in own if not references.is_installed(directory)])
  return [references.part_of(directory, saved['experiment'].partition('.')[0]) for directory in own], ''


def _packages_in(directory: Path, saved: Mapping[str, Any]) -> Iterable[Path]:
  """Yields the packages of the experiment's module below a directory, and the Python files in them."""
  parts = saved['experiment'].split('.')
  for depth in range(1, len(parts)):
    folder = directory.joinpath(*parts[:depth])
    if folder.is_dir():
      yield from (folder, *sorted(folder.glob('*.py')))


def may_be_imported(module_name: str, registered: Iterable[str], directories: Sequence[Path]) -> bool:
  """Returns whether a file may import a module.

  Args:
    module_name: its name, such as `package.module`.
    registered: the modules of entry points.
    directories: absolute paths, below which modules may be imported.
  """
  if module_name in sys.modules or module_name in registered or module_name.startswith('spmd_tasks.'):
    return True
  return references.is_below(module_name, [*directories, *_installed_path(module_name.partition('.')[0])])


def _installed_path(top: str) -> list[Path]:
  """Returns the installed path of the package `top` if an extension lets configs name its modules; else [].

  A folder of the same name elsewhere on the search path does not count.
  """
  if any(top in extension.packages for extension in extensions()):
    with contextlib.suppress(metadata.PackageNotFoundError):
      return [Path(str(metadata.distribution(top).locate_file(top))).resolve()]
  return []
