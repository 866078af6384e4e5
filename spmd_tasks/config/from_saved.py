"""Resolves a saved config to one of today, as `resolve` does a name: `resolved = from_json(saved, ['seed=1'])`.

Saved values replace the code's defaults of today. A field that the code added since then has its default.

A config.json may come from anyone, and importing a module runs it. So the name in a file imports only
* what is part of this package, of an installed package that a wing names, or registered by an entry point,
* modules whose files lie below a directory of --experiment_path, and
* those of the directory that the job was begun from, if the job's directory is this user's own (`own_directory`).
A module that the process has imported already is only looked up. Nothing is imported to find that out.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import enum
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
import importlib.util
import json
import os
import pathlib
import stat
import sys
from typing import Any

import fiddle as fdl
from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np

from spmd_tasks.config import registry
from spmd_tasks.config.encoding import encode_field, show, symbol_of
from spmd_tasks.config.refusals import describe_type
from spmd_tasks.config.resolution import (
  PARTS,
  TIMEOUTS,
  Path,
  Prepare,
  ResolvedConfig,
  adapted,
  build_experiment,
  parts_of,
  resolve_changed,
)
from spmd_tasks.config.saved_config import SavedConfig, checked_config
from spmd_tasks.config.tree import DROP, UNSET, apply_changes, is_node, walk
from spmd_tasks.config.values import is_dtype, is_of_type, unwrap
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import MESH_FIELDS
from spmd_tasks.experiments import is_own_module, modules_of_others
from spmd_tasks.wings import kinds, wings


def from_json(
  saved: Mapping[str, Any],
  overrides: Sequence[str] = (),
  experiment_path: Sequence[str | os.PathLike[str]] = (),
  prepare: Prepare | None = None,
) -> ResolvedConfig:
  """Resolves the config that `to_json` saved, with further overrides. `prepare`: as in `resolve`.

  The file decides neither what is imported nor what is called: its experiment is registered, imported already, in a
  module below `experiment_path`, or where this user's own job found it (`own_directory`), and every class and function
  comes from the experiment's own code.

  Raises a UserError: the experiment may not be imported; the JSON is not a saved config, a saved path does not exist
  any more, a value is not of its field's type, or the code now has another class, function or object at a path.
  """
  why_not = ''
  if isinstance(saved, SavedConfig) and not experiment_path:
    own, why_not = own_directory(saved.path, saved)
    experiment_path = [] if own is None else [own]
  saved = checked_config(saved)
  cls = get_saved(saved['experiment'], experiment_path, why_not)

  def timeouts() -> dict[str, Any]:
    return {name: decode(saved['config'][name]) for name in TIMEOUTS if name in saved['config']}

  cls = adapted(cls, timeouts, prepare)
  config = fdl.Config(cls)
  of_parts = {path: value for path, value in saved['config'].items() if path.split('.')[0] in PARTS}
  of_experiment = {path: value for path, value in saved['config'].items() if path not in of_parts}
  config = apply_changes(config, _refuse_modules(_changes_to(config, of_experiment), experiment_path))
  for name in MESH_FIELDS:
    if name in of_experiment:  # also a value that equals the bare default: the class's layout may give another one
      setattr(config, name, decode(of_experiment[name]))
  _leave_mesh_to_its_layout(cls, config)
  as_saved = build_experiment(cls, config)
  if prepare is not None:
    prepare(as_saved)
  changes = _refuse_modules(_changes_to(parts_of(as_saved), of_parts), experiment_path)
  return resolve_changed(cls, config, changes, overrides, saved['overrides'], None)


def _leave_mesh_to_its_layout(cls: type, config: fdl.Config) -> None:
  """Unsets the mesh fields that equal the values from `mesh`, so that overrides of `mesh` have an effect."""
  given = {name: getattr(config, name) for name in MESH_FIELDS if name in config.__arguments__}
  for name in given:
    delattr(config, name)
  filled = build_experiment(cls, config)
  for name, value in given.items():
    if getattr(filled, name) != value:
      setattr(config, name, value)


def _changes_to(root: Any, saved: Mapping[str, Any]) -> dict[Path, Any]:
  """Returns the changes that give `root` the saved values."""
  present = dict(walk(root))
  changes: dict[Path, Any] = {}
  refused = []
  for path, value in saved.items():
    if path not in present:
      refused.append(f'{path} (saved as {show(value)}) does not exist any more')
      continue
    field = present[path]
    now = None if field.value is UNSET else encode_field(field.value)
    if field.value is not UNSET and json.dumps(now, sort_keys=True) == json.dumps(value, sort_keys=True):
      continue  # compared as text: 1, 1.0 and True are different values
    key = tuple(path.split('.'))
    keys_now, keys = (set(each.get('keys', ())) if isinstance(each, dict) else set() for each in (now, value))
    if keys and keys <= keys_now:
      changes |= {(*key, name): DROP for name in keys_now - keys}
      continue
    try:
      decoded = decode(value, field.value)
    except ValueError:
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
      continue
    kind = unwrap(field.annotation)
    if is_node(field.value) and kind is Any and (decoded is not None or path in PARTS):
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
    elif is_of_type(field.value, kind) and not is_of_type(decoded, kind):
      refused.append(f'{path} is {show(value)} and should be of type {describe_type(kind)}')
    else:
      changes[key] = decoded
  if refused:
    raise UserError(
      f'the saved config does not fit the code of today: {"; ".join(refused)}. Run it with the code that saved it, or '
      'start a new run.'
    )
  return changes


def decode(encoded: Any, present: Any = None) -> Any:
  """The value that `encode` encoded; `present` is the value at the same place now, whose kind of dict or dtype is kept.

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
      return FrozenDict(values) if isinstance(present, FrozenDict) else values
    case {'dtype': name} if is_dtype(getattr(jnp, name, None)):
      return jnp.dtype(name) if isinstance(present, np.dtype) else getattr(jnp, name)
    case {'enum': symbol, 'name': name} if isinstance(present, enum.Enum) and symbol == symbol_of(type(present)):
      if name in type(present).__members__:
        return type(present)[name]
  raise UserError(f'{show(encoded)} cannot be read back from JSON.')


def _refuse_modules(changes: dict[Path, Any], experiment_path: Sequence[str | os.PathLike[str]]) -> dict[Path, Any]:
  """Returns the changes, or raises a UserError for a module in them that a file alone must not have imported."""
  fields = {name for wing in wings() for name in wing.fields_of_modules}
  for path, names in changes.items():
    for name in names if path[-1] in fields and isinstance(names, tuple | list) else ():
      if not may_be_imported(name, (), registry.add_to_search_path(experiment_path)):
        raise UserError(
          f'the saved config names the module {name} at {".".join(path)}, and a file alone never decides what is '
          f'imported: {remedy(name.partition(".")[0])}.'
        )
  return changes


def get_saved(
  name: str,
  experiment_path: Sequence[str | os.PathLike[str]] = (),
  why_not: str = '',
) -> type:
  """The experiment class of a name in a saved config, which alone never decides what is imported.

  Args:
    name: as `name_of` gave it.
    experiment_path: directories whose modules may be imported, too; they are put in front of sys.path.
    why_not: why the directory that the config names is not one of them, for the message.

  Raises a UserError: as `registry.get`; or the name's module is neither registered nor below `experiment_path`.
  """
  directories = registry.add_to_search_path(experiment_path)
  if (cls := registry.known(name)) is not None:
    return cls
  module_name, _ = registry.split_name(name)
  registered = registry.registered_modules()
  if not is_own_module(module_name) and module_name not in modules_of_others():
    top = module_name.partition('.')[0]
    for module in sorted(registered):
      if module.partition('.')[0] == top:  # importing it may import the module of a base class, which has this name
        registry.import_module(name, module)
    if not may_be_imported(module_name, registered, directories):
      because = f' (the directory that it names does not count: {why_not})' if why_not else ''
      raise UserError(
        f'the saved config names the experiment {name}, which is not registered, and a file alone never decides what '
        f'is imported{because}: {remedy(top)} (in Python, import {module_name} first).'
      )
  return registry.find_class(name, is_typed=False)


def remedy(top: str) -> str:
  """What a user can do who trusts the code of a top-level module that a saved config names."""
  place = place_of(top)
  if place is None:
    return f'add --experiment_path DIR, the directory that holds {top}'
  return f'if you trust the code in {place}, add --experiment_path {place}'


def own_directory(config_path: str | os.PathLike[str], saved: Mapping[str, Any]) -> tuple[pathlib.Path | None, str]:
  """Returns the directory of modules that a config.json names, if this user made both, else None; and why not.

  As ssh does with its files: all must belong to this user (or root) and be writable by nobody else, with the
  directories around them. The job's directory must be the one in which the config was written, not a copy: a stranger's
  archive, unpacked, belongs to the user too.
  """
  job_log_dir, named, mark = pathlib.Path(config_path).absolute().parent, saved.get('origin'), saved.get('mark')
  if not isinstance(named, str) or not isinstance(mark, int) or not pathlib.Path(named).is_absolute():
    return None, ''
  directory = pathlib.Path(named)
  folders = [
    directory.joinpath(*saved['experiment'].split('.')[:depth]) for depth in range(saved['experiment'].count('.'))
  ]
  try:
    if job_log_dir.stat().st_ino != mark:  # as programs/job_directory.py wrote it
      return None, f'{job_log_dir} is a copy, or was made on another machine'
    for path in (pathlib.Path(config_path), job_log_dir, *folders):
      if not path.exists() and path != directory:
        continue  # a module's name
      for each in (path, *sorted(path.glob('*.py') if path in folders else ())):
        if why := _why_unsafe(each):
          return None, why
  except OSError as error:
    return None, f'{error.filename}: {error.strerror}'
  top = saved['experiment'].partition('.')[0]
  has_module = any(map(os.path.exists, (directory / top, directory / f'{top}.py')))
  return directory, '' if has_module else f'{directory} has no {top}'


def _why_unsafe(path: pathlib.Path) -> str:
  """Returns why others could change a file or directory; an empty text if they cannot."""
  resolved = path.resolve(strict=True)
  for each in (resolved, *resolved.parents):
    status = each.stat()
    if status.st_uid not in (os.geteuid(), 0):
      return f'{each} belongs to another user'
    is_shared = each != resolved and status.st_mode & stat.S_ISVTX  # such as /tmp, where others cannot replace it
    if status.st_mode & 0o022 and not is_shared:
      return f'others may write to {each}: chmod go-w {each}'
  return ''


def may_be_imported(module_name: str, registered: Iterable[str], directories: Sequence[pathlib.Path]) -> bool:
  """Whether a name in a file may have this module imported.

  Args:
    module_name: such as `package.module`.
    registered: the modules of entry points.
    directories: absolute paths.
  """
  if module_name in sys.modules or module_name in registered or module_name.startswith('spmd_tasks.'):
    return True
  return _lies_below(module_name, [*directories, *_installed_place(module_name.partition('.')[0])])


def _installed_place(top: str) -> list[pathlib.Path]:
  """Returns where `top` was installed if it is a package whose experiments a wing runs; else an empty list.

  A folder of that name elsewhere on the search path is another one.
  """
  if any(top in kind.packages for kind in kinds()):
    with contextlib.suppress(metadata.PackageNotFoundError):
      return [pathlib.Path(str(metadata.distribution(top).locate_file(top))).resolve()]
  return []


def place_of(top: str) -> pathlib.Path | None:
  """The directory from which a top-level module might be imported, for a message; only file names are looked at."""
  for directory in map(pathlib.Path, (os.curdir, *sys.path)):
    if (directory / f'{top}.py').is_file() or (directory / top).is_dir():
      return directory.resolve()
  return None


def _lies_below(module_name: str, directories: Sequence[pathlib.Path]) -> bool:
  """Whether the files of a module, and of the packages around it, all lie below one of the directories."""
  locations = None
  parts = module_name.split('.')
  for end in range(1, len(parts) + 1):
    spec = _find_spec('.'.join(parts[:end]), locations)
    if spec is None:
      return False
    if spec.has_location and spec.origin is not None:  # otherwise it is built in, or a package without a file to run
      file = pathlib.Path(spec.origin).resolve()
      if not any(file.is_relative_to(directory) for directory in directories):
        return False
    elif not spec.submodule_search_locations:
      return False
    locations = spec.submodule_search_locations
  return True


def _find_spec(name: str, locations: Iterable[str] | None) -> ModuleSpec | None:
  """The spec of a module in the package of these locations; unlike importlib.util's, the package is not imported."""
  try:
    if name in sys.modules or '.' not in name:
      return importlib.util.find_spec(name)
    # By its last part: of a package without an __init__.py in another one, the finder would look for the outer one.
    return PathFinder.find_spec(name.rpartition('.')[2], list(locations or ()))
  except (ImportError, ValueError, AttributeError):
    return None
