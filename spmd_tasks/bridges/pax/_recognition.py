"""Recognizes experiments of Pax and modules that need Praxis, before they are imported; imports nothing of Pax itself.

prepare_import('my_lab.experiments')       # installs the shims if that module, or one of its own, imports Praxis
is_pax_experiment(my_lab.experiments.Mine)
"""

import ast
from collections.abc import Iterator
import functools
from importlib.machinery import PathFinder
from pathlib import Path
import sys
import sysconfig

import spmd_tasks
from spmd_tasks.bridges.pax._shims import install_shims

_NEED_SHIMS = ('praxis', 'paxml')
_BRIDGE = 'spmd_tasks.bridges.pax'
_INSTALLED = (sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))
_NOT_A_USERS = tuple(Path(place).resolve() for place in (*_INSTALLED, *spmd_tasks.__path__))


def prepare_import(module: str) -> None:
  """Installs the shims if a module, or one of the same author that it imports, imports Praxis, Paxml or this package.

  Their sources are read, and nothing is imported. The same author's are modules of the same package, and those that are
  neither Python's nor installed nor ours. One that is imported already has what it needs.
  """
  if module in sys.modules:
    return
  top, seen, waiting = module.partition('.')[0], set(), [module]
  while waiting:
    name = waiting.pop()
    if name.partition('.')[0] in _NEED_SHIMS or name == _BRIDGE or name.startswith(f'{_BRIDGE}.'):
      install_shims()
      return
    for path in _sources(name):
      is_own = name.partition('.')[0] == top or not any(path.is_relative_to(place) for place in _NOT_A_USERS)
      if is_own and path not in seen:
        seen.add(path)
        waiting += _imported_by(path, name)


def is_pax_experiment(value: object) -> bool:
  """Tells whether a value is the class of a Pax experiment."""
  base = sys.modules.get('paxml.base_experiment')  # without it no class can be one of its
  return base is not None and isinstance(value, type) and issubclass(value, base.BaseExperiment)


def _sources(module: str) -> Iterator[Path]:
  """Yields the source files of a module and of the packages around it; nothing for modules without a source."""
  locations, parts = None, module.split('.')
  for end in range(1, len(parts) + 1):
    try:
      spec = PathFinder.find_spec('.'.join(parts[:end]) if end == 1 else parts[end - 1], locations)
    except (ImportError, ValueError):
      return
    if spec is None:  # a name in the module before
      return
    if spec.origin and spec.origin.endswith('.py'):
      yield Path(spec.origin).resolve()
    locations = list(spec.submodule_search_locations or ())
    if not locations:
      return


@functools.cache
def _imported_by(path: Path, module: str) -> tuple[str, ...]:
  """Returns the dotted names that a source file imports, wherever it does; none if it cannot be read as Python."""
  try:
    tree = ast.parse(path.read_bytes())
  except (OSError, SyntaxError, ValueError):
    return ()  # importing it says what is wrong
  names = []
  package = module.split('.') if path.name == '__init__.py' else module.split('.')[:-1]
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      around = package[: len(package) - node.level + 1] if node.level else []
      base = '.'.join([*around, *([node.module] if node.module else [])])
      names += [f'{base}.{alias.name}' for alias in node.names]
  return tuple(names)
