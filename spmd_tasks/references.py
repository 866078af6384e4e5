"""Loads functions that a config names as `module:name`, although a stranger may have written the config.

    load_reference('my_lab.rewards:score', directories)

A reference is loaded only if the function or class is defined in a module below one of the directories, or if an
installed package registers the whole reference:

    [project.entry-points."spmd_tasks.functions"]
    score = "their_lab.rewards:score"

The directories come from the user's own command: the directory of the experiment's code, --experiment_path and, if the
user named the experiment, the current directory. Python's own modules, this package and other installed packages are
excluded, even if they are installed below one of the directories.
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
  """Returns the function or class that `module:name` names.

  Raises a UserError: the reference has another form, it is neither below the directories nor registered, or the object
  is defined elsewhere.
  """
  check_reference(reference, directories)
  module, _, name = reference.partition(':')
  value = getattr(importlib.import_module(module), name)
  defined_in = _module_of(value)
  if not is_registered(reference) and not (defined_in and is_below(defined_in, directories)):
    raise UserError(
      f'{reference} is defined in {defined_in or "no module"}, which is not your own code: name a function of your own '
      'that calls it.'
    )
  return value


def check_reference(reference: str, directories: Sequence[Path]) -> None:
  """Raises a UserError if `load_reference` would refuse to import the module of a reference; imports nothing."""
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
    raise UserError(f'{reference} names no file below {place_of(top)}, where {top} is: correct the name of the module.')
  places = ', '.join(dict.fromkeys(map(str, directories))) or 'none'
  raise UserError(
    f'{reference} is not below the directories of this command ({places}), and no installed package registers it: '
    f'{remedy(top)}.'
  )


def is_registered(reference: str) -> bool:
  """Returns whether an installed package registers a reference."""
  return any(point.value == reference for point in metadata.entry_points(group=ENTRY_POINTS))


def remedy(top: str) -> str:
  """Returns the remedy for a user who trusts the top-level module that a config names."""
  place = place_of(top)
  if place is None:
    return f'add --experiment_path DIR, the directory of {top}'
  return f'if you trust the code in {place}, add --experiment_path {place}'


def place_of(top: str) -> Path | None:
  """Returns the directory of a top-level module, by file names alone, for a message."""
  for directory in map(Path, (os.curdir, *sys.path)):
    if _holds(directory, top):
      return directory.resolve()
  return None


def is_below(module_name: str, directories: Iterable[Path]) -> bool:
  """Returns whether the files of a module, and of its parent packages, are below one of the directories.

  Packages installed below a directory, such as in a project's virtual environment, do not count.
  """
  parts = module_name.split('.')
  if parts[0] in sys.stdlib_module_names or parts[0] == 'spmd_tasks':
    return False
  directories, locations = list(directories), None
  for end in range(1, len(parts) + 1):
    spec = _find_spec('.'.join(parts[:end]), locations)
    if spec is None:
      return False
    if spec.has_location and spec.origin is not None:  # otherwise it is built in, or a namespace package
      if not any(_is_part(Path(spec.origin).resolve(), directory) for directory in directories):
        return False
    elif not spec.submodule_search_locations:
      return False
    locations = spec.submodule_search_locations
  return True


def directories_of(cls: type) -> list[Path]:
  """Returns the directories of the modules of a class and its bases; for an installed package, only the package's."""
  places = []
  for module_name in dict.fromkeys(base.__module__ for base in cls.__mro__):
    top = module_name.partition('.')[0]
    directory = import_root(module_name)
    if directory is None or top in sys.stdlib_module_names or top == 'spmd_tasks':
      continue
    places.append(part_of(directory, top))
  return list(dict.fromkeys(places))


def part_of(directory: Path, top: str) -> Path:
  """Returns a directory of modules; if packages are installed there, only the package or file of the module `top`."""
  if not is_installed(directory):
    return directory
  return directory / (top if (directory / top).is_dir() else f'{top}.py')


def is_installed(directory: Path) -> bool:
  """Returns whether a directory holds installed packages or Python's own modules."""
  return directory in _INSTALLED


def import_root(module_name: str) -> Path | None:
  """Returns the directory of sys.path from which a module was imported; None for a module without a file."""
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
  """Returns the module that defines a function or class, the function of a `partial`, or the class of an object."""
  while isinstance(value, functools.partial):
    value = value.func
  return getattr(value, '__module__', None)


def _make_importable(top: str, directories: Sequence[Path]) -> None:
  """Appends the directory of a module to sys.path, unless the module can be imported already."""
  if _find_spec(top, None) is None:
    sys.path += [str(directory) for directory in directories if _holds(directory, top)][:1]
    importlib.invalidate_caches()


def _holds(directory: Path, top: str) -> bool:
  return (directory / f'{top}.py').is_file() or (directory / top).is_dir()


def _find_spec(name: str, locations: Iterable[str] | None) -> ModuleSpec | None:
  """Returns the spec of a module in a package with these locations; importlib.util would import the package."""
  try:
    if name in sys.modules or '.' not in name:
      return importlib.util.find_spec(name)
    # By its last part: for a whole name in a namespace package, the finder would search for the outer package.
    return PathFinder.find_spec(name.rpartition('.')[2], list(locations or ()))
  except (ImportError, ValueError, AttributeError):
    return None
