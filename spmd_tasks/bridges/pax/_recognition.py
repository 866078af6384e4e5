"""Recognizes modules that need Praxis before they are imported, by their source; so that nothing else has the shims."""

import ast
from collections.abc import Iterator
import functools
from importlib.machinery import PathFinder
import importlib.util
from pathlib import Path
import sysconfig

import spmd_tasks

_INSTALLED = (sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))
_NOT_A_USERS = tuple(Path(place).resolve() for place in (*_INSTALLED, *spmd_tasks.__path__))


def prepare_import(module: str) -> None:
  """Installs the shims if a module, or one of the same author that it imports, imports Praxis or Paxml.

  Their sources are read, and nothing is imported. The same author's are modules of the same package, and those that are
  neither Python's nor installed nor ours. Names of this bridge that need Praxis install the shims by themselves.
  """
  top, seen, waiting = module.partition('.')[0], set(), [module]
  while waiting:
    name = waiting.pop()
    if name.partition('.')[0] in ('praxis', 'paxml'):
      from spmd_tasks.bridges.pax._shims import install_shims  # imports JAX

      install_shims()
      return
    for path, package in _sources(name):
      is_own = name.partition('.')[0] == top or not any(path.is_relative_to(place) for place in _NOT_A_USERS)
      if is_own and path not in seen:
        seen.add(path)
        waiting += _imported_by(path, package)


def _sources(module: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
  """Yields the source files of the packages around a module, and its own, each with the package that it is in."""
  locations: list[str] = []
  parts = tuple(module.split('.'))
  for number, part in enumerate(parts):
    try:  # importlib.util asks all finders, those of editable installs too, but imports the packages around a module
      spec = PathFinder.find_spec(part, locations) if number else importlib.util.find_spec(part)
    except (ImportError, ValueError):
      return
    if spec is None:  # a name in the module before
      return
    if spec.origin and spec.origin.endswith('.py'):
      yield Path(spec.origin).resolve(), parts[: number + (spec.submodule_search_locations is not None)]
    locations = list(spec.submodule_search_locations or ())


@functools.cache
def _imported_by(path: Path, package: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the dotted names that a source file imports, wherever it does; none if it cannot be read as Python."""
  try:
    tree = ast.parse(path.read_bytes())
  except (OSError, SyntaxError, ValueError):
    return ()  # importing it says what is wrong
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      around = package[: len(package) - node.level + 1] if node.level else ()
      base = '.'.join([*around, *([node.module] if node.module else [])])
      names += [f'{base}.{alias.name}' for alias in node.names]
  return tuple(names)
