"""Where registered experiments are: ours, which this module makes importable, and those of other packages.

`spmd_tasks.experiments.lm` is experiments/lm.py of the repository. This module acts as a package: its `__path__` is the
directory experiments/ of a checkout, or `_experiments` beside this file in an installed wheel. So a user's own package
`experiments` and ours never meet. (experiment.py is something else: the class Experiment.)
"""

import functools
from importlib import metadata
from pathlib import Path
import sys

ENTRY_POINTS = 'spmd_tasks.experiments'  # the group by which other packages register theirs

_HERE = Path(__file__).parent
DIRECTORY = next((path for path in (_HERE / '_experiments', _HERE.parent / 'experiments') if path.is_dir()), _HERE)
__path__ = [str(DIRECTORY)]


def modules_of_others() -> dict[str, list[str]]:
  """The modules that other packages register by entry points, by their names there."""
  return _modules_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)  # every command asks several times, and hundreds of installed packages are looked into
def _modules_on(path: tuple[str, ...]) -> dict[str, list[str]]:
  del path  # where entry points are looked for
  modules: dict[str, list[str]] = {}
  for point in metadata.entry_points(group=ENTRY_POINTS):
    if point.value not in modules.setdefault(point.name, []):
      modules[point.name].append(point.value)
  return modules


def is_own_module(module_name: str) -> bool:
  """Whether it is the name of a file of our experiments, such as `lm`."""
  return (DIRECTORY / f'{module_name}.py').is_file()
