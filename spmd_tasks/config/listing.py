"""Lists the registered experiments, from their source: neither JAX nor an experiment is imported. For --list, and to
name those that are most like an unknown one.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
import difflib
import importlib
import importlib.util
import os
from pathlib import Path
import pkgutil
import sys

from spmd_tasks.experiments import DIRECTORY, is_own_module, modules_of_others


def list_experiments() -> list[tuple[str, str]]:
  """(name, first line of the docstring) of every registered experiment, ours first; nothing is imported."""
  found: dict[str, str] = {}
  for path in sorted(DIRECTORY.glob('*.py')):
    found.update(_registered_in(path, path.stem))
  for name, modules in sorted(modules_of_others().items()):
    for module in sorted(modules):
      source = _source_of(module)
      if source is None:
        found[f'{name}.*'] = f'cannot be listed: the source of {module}, an entry point, is not found'
        continue
      try:
        found.update(_registered_in(source, name if len(modules) == 1 and not is_own_module(name) else module))
      except (OSError, SyntaxError, ValueError) as error:  # one broken package must not hide the others
        found[f'{name}.*'] = f'cannot be listed: {source}, an entry point, cannot be read ({error})'
  return list(found.items())


def _registered_in(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
  """(name, first line of the docstring) of every class with @register in a source file."""
  for node in ast.parse(path.read_text(encoding='utf-8'), filename=str(path)).body:
    names = [getattr(each, 'attr', getattr(each, 'id', '')) for each in getattr(node, 'decorator_list', ())]
    if isinstance(node, ast.ClassDef) and 'register' in names:
      yield f'{prefix}.{node.name}', (ast.get_docstring(node) or '').partition('\n')[0]


def _source_of(module: str) -> Path | None:
  """A module's source file, found without importing the packages around it."""
  top, *rest = module.split('.')
  try:
    spec = importlib.util.find_spec(top)
  except (ImportError, ValueError):
    return None
  if spec is None:
    return None
  if not rest:
    return Path(spec.origin) if spec.origin and Path(spec.origin).suffix == '.py' else None
  below = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
  files = [file for path in below for file in (path.with_suffix('.py'), path / '__init__.py')]
  return next((file for file in files if file.is_file()), None)


def unknown_sentence(name: str, near: Sequence[str], registered: Iterable[str]) -> str:
  """Says that there is no experiment of a name: `near` are the nearest ones; if empty, they are looked for."""
  module = name.removeprefix('./').removesuffix('.py').replace('.py:', '.').replace(':', '.').replace('/', '.')
  is_file = module != name and module[:1] != '.' and module.isprintable()
  if is_file or os.path.isfile(f'{name}.py'):  # a file, no module, or a module alone
    near = [f'{module}.CLASS' if name.endswith('.py') or '.' not in module else module]
  near = [*near] or _nearest(name, sorted({each for each, _ in list_experiments()} | set(registered)))
  nearest = f' Nearest: {", ".join(near)}.' if near else ''
  return (
    f'unknown experiment {name!r}.{nearest} Use a registered name (--list shows them) or package.module.Class, '
    'importable from here, from the current directory or from --experiment_path DIR.'
  )


def with_other_part(name: str, index: int) -> list[str]:
  """The name with the nearest modules that exist in place of a part that does not; the parts before it are imported."""
  parts = name.split('.')
  around = sys.modules['.'.join(parts[:index])] if index else None
  modules = pkgutil.iter_modules([str(Path.cwd())] if around is None else getattr(around, '__path__', []))
  siblings = [module.name for module in modules] + ['spmd_tasks'] * (index == 0)
  near = difflib.get_close_matches(parts[index], siblings, n=2, cutoff=0.6)
  return ['.'.join((*parts[:index], each, *parts[index + 1 :])) for each in near]


def _nearest(name: str, known: Sequence[str]) -> list[str]:
  """The known names that are most like a wrong one: in all, else of the module most like its own, else by class."""
  module, _, cls = name.rpartition('.')

  def likeness(other: str) -> float:
    return difflib.SequenceMatcher(None, cls, other.rpartition('.')[2]).ratio()

  modules = difflib.get_close_matches(module, sorted({each.rpartition('.')[0] for each in known}), n=1, cutoff=0.6)
  if modules and modules != [module]:
    return sorted((each for each in known if each.rpartition('.')[0] == modules[0]), key=likeness, reverse=True)[:3]
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  near = near or sorted((each for each in known if likeness(each) >= 0.8), key=likeness, reverse=True)[:3]
  return near or difflib.get_close_matches(name, known, n=3, cutoff=0.3)  # not very near, but names that exist
