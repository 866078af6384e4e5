"""Lists the registered experiments from their source, without importing JAX, and suggests names for unknown ones."""

import ast
from collections.abc import Iterable, Iterator, Sequence
import difflib
import importlib
import importlib.util
import os
from pathlib import Path
import pkgutil
import sys

from spmd_tasks.experiments import DIRECTORY, is_own_module, modules_by_entry_point

_MAX_NAME_CHARS = 100  # the search for similar names takes time quadratic in the length


def list_experiments() -> list[tuple[str, str]]:
  """Returns (name, first line of the docstring) of every registered experiment, ours first; imports nothing."""
  lines: dict[str, str] = {}
  for path in sorted(DIRECTORY.glob('*.py')):
    lines.update(_registered_in(path, path.stem))
  for name, modules in sorted(modules_by_entry_point().items()):
    for module in sorted(modules):
      source = _source_of(module)
      if source is None:
        lines[f'{name}.*'] = f'cannot be listed: the source of {module}, an entry point, is not found'
        continue
      try:
        lines.update(_registered_in(source, name if len(modules) == 1 and not is_own_module(name) else module))
      except (OSError, SyntaxError, ValueError) as error:  # one broken package must not hide the others
        lines[f'{name}.*'] = f'cannot be listed: {source}, an entry point, cannot be read ({error})'
  return list(lines.items())


def _registered_in(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
  """Yields (name, first line of the docstring) of every class with @register in a source file."""
  for node in ast.parse(path.read_text(encoding='utf-8'), filename=str(path)).body:
    decorators = getattr(node, 'decorator_list', ())
    names = [getattr(decorator, 'attr', getattr(decorator, 'id', '')) for decorator in decorators]
    if isinstance(node, ast.ClassDef) and 'register' in names:
      yield f'{prefix}.{node.name}', (ast.get_docstring(node) or '').partition('\n')[0]


def _source_of(module: str) -> Path | None:
  """Returns a module's source file, without importing its parent packages."""
  top, *rest = module.split('.')
  try:
    spec = importlib.util.find_spec(top)
  except (ImportError, ValueError):
    return None
  if spec is None:
    return None
  if not rest:
    return Path(spec.origin) if spec.origin and Path(spec.origin).suffix == '.py' else None
  paths = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
  files = [file for path in paths for file in (path.with_suffix('.py'), path / '__init__.py')]
  return next((file for file in files if file.is_file()), None)


def unknown_sentence(name: str, near: Sequence[str], registered: Iterable[str]) -> str:
  """Returns the error for an unknown name, with the nearest names: `near`, or else among `registered` and the list."""
  path = name.removeprefix(f'{os.getcwd()}/')
  directory, path = os.path.split(path) if path.startswith('/') and '.py' in path else ('', path)
  name, path = name[:_MAX_NAME_CHARS], path[:_MAX_NAME_CHARS]
  module = path.removeprefix('./').removesuffix('.py').replace('.py:', '.').replace(':', '.').replace('/', '.')
  is_file = module != path and module[:1] != '.' and module.isprintable()
  lacks_class = path.endswith('.py') or os.path.isfile(f'{path}.py')
  if is_file or lacks_class:  # the path of a file, or a module without a class
    near = [f'{module}.CLASS' if lacks_class else module]
    near = [f'{near[0]} with --experiment_path {directory}'] if directory else near
  near = [*near] or _nearest(name, sorted({listed for listed, _ in list_experiments()} | set(registered)))
  nearest = f' Nearest: {", ".join(near)}.' if near else ''
  return (
    f'unknown experiment {name!r}.{nearest} Use a registered name (--list shows them) or package.module.Class, '
    'importable from here, from the current directory or from --experiment_path DIR.'
  )


def with_other_part(name: str, index: int) -> list[str]:
  """Replaces the part at `index`, a module that does not exist, by the nearest existing ones."""
  parts = name.split('.')
  parent = sys.modules['.'.join(parts[:index])] if index else None
  modules = pkgutil.iter_modules([str(Path.cwd())] if parent is None else getattr(parent, '__path__', []))
  siblings = [module.name for module in modules] + ['spmd_tasks'] * (index == 0)
  near = difflib.get_close_matches(parts[index][:_MAX_NAME_CHARS], siblings, n=2, cutoff=0.6)
  return ['.'.join((*parts[:index], sibling, *parts[index + 1 :])) for sibling in near]


def _nearest(name: str, known: Sequence[str]) -> list[str]:
  """Returns the known names most similar to a wrong one: of the nearest module, else as a whole, else by class."""
  module, _, cls = name.rpartition('.')

  def module_of(other: str) -> str:
    return other.rpartition('.')[0]

  def likeness(other: str) -> float:
    return difflib.SequenceMatcher(None, cls, other.rpartition('.')[2]).ratio()

  modules = difflib.get_close_matches(module, sorted(set(map(module_of, known))), n=1, cutoff=0.6)
  if modules and modules != [module]:
    return sorted((other for other in known if module_of(other) == modules[0]), key=likeness, reverse=True)[:3]
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  near = near or sorted((other for other in known if likeness(other) >= 0.8), key=likeness, reverse=True)[:3]
  return near or difflib.get_close_matches(name, known, n=3, cutoff=0.3)  # not very similar, but existing
