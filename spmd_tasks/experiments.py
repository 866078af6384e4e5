"""Finds registered experiments: ours, which this module makes importable, and the ones of other packages.

`spmd_tasks.experiments.lm` is experiments/lm.py of the repository. This module acts as a package: its `__path__` is the
directory experiments/ of a checkout, or `_experiments` beside this file in an installed wheel. So a user's own package
may be called `experiments`. (The class Experiment is in experiment.py.)
"""

import functools
from importlib import metadata
from pathlib import Path
import sys

ENTRY_POINTS = 'spmd_tasks.experiments'  # the group of entry points of other packages

_HERE = Path(__file__).parent
DIRECTORY = next((path for path in (_HERE / '_experiments', _HERE.parent / 'experiments') if path.is_dir()), _HERE)
__path__ = [str(DIRECTORY)]


def modules_by_entry_point() -> dict[str, list[str]]:
  """Returns the modules that other packages register by entry points, by entry point name."""
  return _modules_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)  # it reads every installed package, and each command calls it several times
def _modules_on(path: tuple[str, ...]) -> dict[str, list[str]]:
  del path  # the key of the cache: importlib.metadata searches sys.path
  modules: dict[str, list[str]] = {}
  for point in metadata.entry_points(group=ENTRY_POINTS):
    if point.value not in modules.setdefault(point.name, []):
      modules[point.name].append(point.value)
  return modules


def is_own_module(module_name: str) -> bool:
  """Returns whether a module, such as `lm`, is one of our experiments."""
  return (DIRECTORY / f'{module_name}.py').is_file()
