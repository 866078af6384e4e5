"""Decides which modules a saved config may import: registered ones, and those below directories that the user named.

A config.json may come from anyone, and importing a module runs it. So the name in a file imports only
* what is part of this package, of an installed package that a wing names, or registered by an entry point,
* modules whose files lie below a directory of --experiment_path, and
* those of the directory that the job was begun from, if the job's directory is this user's own (`own_directory`).
A module that the process has imported already is only looked up. Nothing is imported to find that out.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
import importlib.util
import os
from pathlib import Path
import stat
import sys
from typing import Any

from spmd_tasks.wings import kinds


def own_directory(config_path: str | os.PathLike[str], saved: Mapping[str, Any]) -> tuple[Path | None, str]:
  """Returns the directory of modules that a config.json names, if this user made both; else None and why not.

  As ssh does with its files: all must belong to this user (or root) and be writable by nobody else, with the
  directories around them. The job's directory must be the one in which the config was written, not a copy: a stranger's
  archive, unpacked, belongs to the user too.
  """
  job_log_dir, named, mark = Path(config_path).absolute().parent, saved.get('origin'), saved.get('mark')
  if not isinstance(named, str) or not isinstance(mark, int) or not Path(named).is_absolute():
    return None, ''
  directory = Path(named)
  folders = [
    directory.joinpath(*saved['experiment'].split('.')[:depth]) for depth in range(saved['experiment'].count('.'))
  ]
  try:
    if job_log_dir.stat().st_ino != mark:  # as programs/job_directory.py wrote it
      return None, f'{job_log_dir} is a copy, or was made on another machine'
    for path in (Path(config_path), job_log_dir, *folders):
      if not path.exists() and path != directory:
        continue  # a module's name
      for each in (path, *sorted(path.glob('*.py') if path in folders else ())):
        if why := _why_unsafe(each):
          return None, why
  except OSError as error:
    return None, f'{error.filename}: {error.strerror}'
  return directory, ''


def _why_unsafe(path: Path) -> str:
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


def may_be_imported(module_name: str, registered: Iterable[str], directories: Sequence[Path]) -> bool:
  """Whether a name in a file may have this module imported.

  Args:
    module_name: such as `package.module`.
    registered: the modules of entry points.
    directories: absolute paths.
  """
  if module_name in sys.modules or module_name in registered or module_name.startswith('spmd_tasks.'):
    return True
  return _lies_below(module_name, [*directories, *_installed_place(module_name.partition('.')[0])])


def _installed_place(top: str) -> list[Path]:
  """Returns where `top` was installed if it is a package whose experiments a wing runs; else an empty list.

  A folder of that name elsewhere on the search path is another one.
  """
  if any(top in kind.packages for kind in kinds()):
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
