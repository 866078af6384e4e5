"""Decides which modules a saved config may import: registered ones, and those below directories that the user named.

A config.json may come from anyone, and importing a module runs it. So the name in a file imports only
* what is part of this package or of an installed Paxml or Praxis, or registered by an entry point, and
* modules whose files lie below a directory of --experiment_path.
A module that the process has imported already is only looked up. Nothing is imported to find that out.
"""

from collections.abc import Iterable, Sequence
import contextlib
import importlib
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
import importlib.util
import os
from pathlib import Path
import sys

from spmd_tasks.errors import UserError


def add_to_search_path(directories: Iterable[str | os.PathLike[str]]) -> list[Path]:
  """Puts directories in front of sys.path, the first one first; returns them as absolute paths.

  Raises:
    UserError: there is no such directory.
  """
  resolved = []
  for directory in directories:
    path = Path(directory).expanduser()
    if not path.is_dir():
      raise UserError(f'--experiment_path {directory} is not a directory: name the one that holds your modules.')
    resolved.append(path.resolve())
  missing = [str(path) for path in resolved if str(path) not in sys.path]
  if missing:
    sys.path[:0] = missing
    importlib.invalidate_caches()
  return resolved


def may_be_imported(module_name: str, registered: Iterable[str], directories: Sequence[Path]) -> bool:
  """Whether a name in a file may have this module imported.

  Args:
    module_name: such as `package.module`.
    registered: the modules of entry points.
    directories: what `add_to_search_path` returned.
  """
  if module_name in sys.modules or module_name in registered or module_name.startswith('spmd_tasks.'):
    return True
  return _lies_below(module_name, [*directories, *_installed_bridges(module_name.partition('.')[0])])


def _installed_bridges(top: str) -> list[Path]:
  """Returns where `top` was installed if it is Paxml or Praxis, whose experiments run here; else an empty list.

  A folder of that name elsewhere on the search path is another one.
  """
  if top in ('paxml', 'praxis'):
    with contextlib.suppress(metadata.PackageNotFoundError):
      return [Path(str(metadata.distribution(top).locate_file(top))).resolve()]
  return []


def place_of(top: str) -> Path | None:
  """The directory from which a top-level module might be imported, for a message; only file names are looked at."""
  for directory in map(Path, (os.curdir, *sys.path)):
    if (directory / f'{top}.py').is_file() or (directory / top).is_dir():
      return directory.resolve()
  return None


def _lies_below(module_name: str, directories: Sequence[Path]) -> bool:
  """Whether the files of a module, and of the packages around it, all lie below one of the directories."""
  locations = None
  parts = module_name.split('.')
  for end in range(1, len(parts) + 1):
    spec = _find_spec('.'.join(parts[:end]), locations)
    if spec is None:
      return False
    if spec.has_location and spec.origin is not None:  # otherwise it is built in, or a package without a file to run
      file = Path(spec.origin).resolve()
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
