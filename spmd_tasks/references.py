"""Resolves names of code in a config, `module:name`, to the code, which strangers may have named.

    load_reference('my_lab.rewards:score', directories)

A reference is resolved only to a function or class that is defined in a module below one of the directories, or that an
installed package registers under its whole name:

    [project.entry-points."spmd_tasks.functions"]
    score = "their_lab.rewards:score"

The directories are those of the user's own command: where the experiment's own code was imported from,
--experiment_path and, if the user named the experiment, the current directory. Python's own modules, this package and
other installed packages do not count, although they may be installed below one of the directories.
"""

from collections.abc import Iterable, Sequence
import functools
import importlib
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
import importlib.util
import os
from pathlib import Path
import site
import sys
import sysconfig
from typing import Any

from spmd_tasks.errors import UserError

ENTRY_POINTS = 'spmd_tasks.functions'  # the group

_SCHEMES = ('stdlib', 'platstdlib', 'purelib', 'platlib')
_INSTALLED = {
  Path(place).resolve()
  for place in (*map(sysconfig.get_path, _SCHEMES), *site.getsitepackages(), site.getusersitepackages())
}


def load_reference(reference: str, directories: Sequence[Path]) -> Any:
  """Returns what `module:name` names.

  Raises a UserError: it is not of this form, it is neither below the directories nor registered, or it is defined in a
  module that is neither.
  """
  check_reference(reference, directories)
  module, _, name = reference.partition(':')
  value = getattr(importlib.import_module(module), name)
  defined_in = _module_of(value)
  if not is_registered(reference) and not (defined_in and is_below(defined_in, directories)):
    raise UserError(
      f'{reference} is defined in {defined_in or "no module"}, which is not code of your own: name a function of your '
      'own that calls it.'
    )
  return value


def check_reference(reference: str, directories: Sequence[Path]) -> None:
  """Raises a UserError if `load_reference` would not import the module of a reference; imports nothing."""
  module, _, name = reference.partition(':')
  if not all(part.isidentifier() for part in (*module.split('.'), name)):
    raise UserError(f'{reference!r} is not a reference: write module:name.')
  if is_registered(reference):
    return
  top = module.partition('.')[0]
  _make_importable(top, directories)
  if is_below(module, directories):
    return
  if top in sys.stdlib_module_names or top == 'spmd_tasks':
    raise UserError(
      f'{reference} names code of {"spmd_tasks" if top == "spmd_tasks" else "Python itself"}, which a config may not '
      'name: name a function of your own that calls it.'
    )
  if is_below(top, directories):
    raise UserError(f'{reference} is in no file below {place_of(top)}, where {top} is: correct the name of the module.')
  places = ', '.join(dict.fromkeys(map(str, directories))) or 'no directory'
  raise UserError(
    f'{reference} is not below a directory of this command ({places}), and no installed package registers it: '
    f'{remedy(top)}.'
  )


def is_registered(reference: str) -> bool:
  """Whether an installed package registers a reference."""
  return any(point.value == reference for point in metadata.entry_points(group=ENTRY_POINTS))


def remedy(top: str) -> str:
  """What a user can do who trusts the code of a top-level module that a config names."""
  place = place_of(top)
  if place is None:
    return f'add --experiment_path DIR, the directory that holds {top}'
  return f'if you trust the code in {place}, add --experiment_path {place}'


def place_of(top: str) -> Path | None:
  """The directory from which a top-level module might be imported, for a message; only file names are looked at."""
  for directory in map(Path, (os.curdir, *sys.path)):
    if _holds(directory, top):
      return directory.resolve()
  return None


def is_below(module_name: str, directories: Iterable[Path]) -> bool:
  """Whether the files of a module, and of the packages around it, all lie below one of the directories.

  What is installed below a directory, such as in the virtual environment of a project, is not a part of it.
  """
  parts = module_name.split('.')
  if parts[0] in sys.stdlib_module_names or parts[0] == 'spmd_tasks':
    return False
  directories, locations = list(directories), None
  for end in range(1, len(parts) + 1):
    spec = _find_spec('.'.join(parts[:end]), locations)
    if spec is None:
      return False
    if spec.has_location and spec.origin is not None:  # otherwise it is built in, or a package without a file to run
      if not any(_is_part(Path(spec.origin).resolve(), directory) for directory in directories):
        return False
    elif not spec.submodule_search_locations:
      return False
    locations = spec.submodule_search_locations
  return True


def directories_of(cls: type) -> list[Path]:
  """The directories of the modules of a class and its bases; of an installed package that package's alone."""
  places = []
  for module_name in dict.fromkeys(base.__module__ for base in cls.__mro__):
    top = module_name.partition('.')[0]
    directory = import_root(module_name)
    if directory is None or top in sys.stdlib_module_names or top == 'spmd_tasks':
      continue
    places.append(part_of(directory, top))
  return list(dict.fromkeys(places))


def part_of(directory: Path, top: str) -> Path:
  """Returns a directory of modules; of one of installed packages the package or file of the module `top` alone."""
  if not is_installed(directory):
    return directory
  return directory / (top if (directory / top).is_dir() else f'{top}.py')


def is_installed(directory: Path) -> bool:
  """Whether installed packages, or Python's own modules, are in a directory."""
  return directory in _INSTALLED


def import_root(module_name: str) -> Path | None:
  """The directory of sys.path from which a module was imported; None for one without a file."""
  module = sys.modules.get(module_name)
  if module_name == '__main__' or getattr(module, '__file__', None) is None:
    return None
  depth = module_name.count('.') + hasattr(module, '__path__')
  return Path(str(module.__file__)).resolve().parents[depth]  # type: ignore[union-attr]


def _is_part(file: Path, directory: Path) -> bool:
  if not file.is_relative_to(directory):
    return False
  return all(directory.is_relative_to(place) for place in _INSTALLED if file.is_relative_to(place))


def _module_of(value: Any) -> str | None:
  """The module in which a function or class, or the function under a `partial`, is defined; of an object, its class."""
  while isinstance(value, functools.partial):
    value = value.func
  return getattr(value, '__module__', None)


def _make_importable(top: str, directories: Sequence[Path]) -> None:
  """Puts the directory that holds a module at the end of sys.path, unless the module is found already."""
  if _find_spec(top, None) is None:
    sys.path += [str(directory) for directory in directories if _holds(directory, top)][:1]
    importlib.invalidate_caches()


def _holds(directory: Path, top: str) -> bool:
  return (directory / f'{top}.py').is_file() or (directory / top).is_dir()


def _find_spec(name: str, locations: Iterable[str] | None) -> ModuleSpec | None:
  """The spec of a module in the package of these locations; unlike importlib.util's, the package is not imported."""
  try:
    if name in sys.modules or '.' not in name:
      return importlib.util.find_spec(name)
    # By its last part: of a package without an __init__.py in another one, the finder would look for the outer one.
    return PathFinder.find_spec(name.rpartition('.')[2], list(locations or ()))
  except (ImportError, ValueError, AttributeError):
    return None
