"""Recognizes experiment modules that import Praxis, from their source, so that only these run with the shims."""

import ast
from collections.abc import Iterator
import functools
from importlib.machinery import PathFinder
import importlib.util
from pathlib import Path
import sysconfig

import spmd_tasks

_INSTALLED = (sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))
_NOT_USER_CODE = tuple(Path(place).resolve() for place in (*_INSTALLED, *spmd_tasks.__path__))


def prepare_import(module: str) -> None:
  """Installs the shims if a module, or user code that it imports, imports Praxis or Paxml.

  Reads sources and imports nothing. User code is everything in the module's package, and modules that belong neither to
  Python nor to an installed package nor to this one.
  """
  top, seen, pending = module.partition('.')[0], set(), [module]
  while pending:
    name = pending.pop()
    if name.partition('.')[0] in ('praxis', 'paxml'):
      from spmd_tasks.bridges.pax._shims import install_shims  # imports JAX

      install_shims()
      return
    for path, package in _sources(name):
      is_user_code = name.partition('.')[0] == top or not any(path.is_relative_to(place) for place in _NOT_USER_CODE)
      if is_user_code and path not in seen:
        seen.add(path)
        pending += _imported_names(path, package)


def _sources(module: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
  """Yields the source files of a module and its parent packages, each with the package that contains it."""
  locations: list[str] = []
  parts = tuple(module.split('.'))
  for number, part in enumerate(parts):
    try:  # find_spec also supports editable installs, but would import the parents of a submodule
      spec = PathFinder.find_spec(part, locations) if number else importlib.util.find_spec(part)
    except (ImportError, ValueError):
      return
    if spec is None:  # not a module, but a name in one
      return
    if spec.origin and spec.origin.endswith('.py'):
      yield Path(spec.origin).resolve(), parts[: number + (spec.submodule_search_locations is not None)]
    locations = list(spec.submodule_search_locations or ())


@functools.cache
def _imported_names(path: Path, package: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the dotted names that a source file imports anywhere; none if it cannot be parsed."""
  try:
    tree = ast.parse(path.read_bytes())
  except (OSError, SyntaxError, ValueError):
    return ()  # the import will raise a better error
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      parents = package[: len(package) - node.level + 1] if node.level else ()
      base = '.'.join([*parents, *([node.module] if node.module else [])])
      names += [f'{base}.{alias.name}' for alias in node.names]
  return tuple(names)
