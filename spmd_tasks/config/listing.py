"""Lists the registered experiments for --list, from their source: neither JAX nor an experiment is imported."""

import ast
from collections.abc import Iterator
import importlib
import importlib.util
from pathlib import Path

from spmd_tasks.experiments import DIRECTORY, is_own_module, modules_of_others


def _is_register(decorator: ast.expr) -> bool:
  return (isinstance(decorator, ast.Name) and decorator.id == 'register') or (
    isinstance(decorator, ast.Attribute) and decorator.attr == 'register'
  )


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
    if isinstance(node, ast.ClassDef) and any(_is_register(decorator) for decorator in node.decorator_list):
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
