"""Checks the structure of the code: rows, faces, circles, and where TensorFlow and Fiddle are allowed."""

import ast
from collections.abc import Iterator
import functools
import graphlib
import os
from pathlib import Path
import subprocess
import sys
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'spmd_tasks'

# Top row first: the extensions, then the core. Parts of the first two rows may import one another; others may not.
ROWS = (
  ('planning', 'serving', 'tuning', 'verification', 'replay', 'evaluation', 'bridges'),
  ('main', 'command', 'experiments', 'recipes', 'config', 'flags', 'flag_hints', 'loading', 'modes'),
  ('programs',),
  ('experiment',),
  ('decoding',),
  ('runtime',),
  ('checkpoints',),
  ('learning', 'inputs', 'layers', 'distributed'),
  ('sharding',),
  ('store_files', 'signatures'),
  ('files', 'frozen_fields'),
  ('storage_problems',),
  ('append_objects',),
  ('stores',),
  ('hub',),
  ('extensions', 'references'),
  ('activity', 'errors', 'sigterm', 'streams', 'xla_flags'),
  ('exit_codes', 'lazy_exports', 'interrupt', 'user_code'),
)
EXTENSIONS = ROWS[0]
ROW_OF_PART = {part: row for row, parts in enumerate(ROWS) for part in parts}
MAY_IMPORT_FIDDLE = {'main', 'command', 'config', 'experiments', 'recipes', 'loading', *EXTENSIONS}


class Import(NamedTuple):
  """One imported dotted name; `lazy` if it is inside a function."""

  name: str
  line: int
  lazy: bool


def modules() -> list[Path]:
  return sorted(PACKAGE.rglob('*.py'))


def dotted_name(path: Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
  return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[Import]:
  """Every name that the file imports, relative ones resolved; `from a import b` gives `a.b`."""
  nodes: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
  for node, lazy in nodes:  # which grows on the way
    if isinstance(node, ast.Import):
      yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      parts = dotted_name(path).split('.')
      package = '.'.join(parts[: len(parts) + (path.name == '__init__.py') - node.level]) if node.level else ''
      base = '.'.join(part for part in (package, node.module) if part)
      yield from (Import(f'{base}.{alias.name}', node.lineno, lazy) for alias in node.names)
    inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    children = (
      child for name in ('body', 'orelse', 'finalbody', 'handlers', 'cases') for child in getattr(node, name, ())
    )
    nodes += [(child, inside) for child in children]


@functools.cache
def all_imports() -> list[tuple[Path, Import]]:
  return [(path, found) for path in modules() for found in imports(path)]


def part_of(name: str) -> str | None:
  """The part of the house in a dotted name of ours: `spmd_tasks.runtime.task` -> `runtime`."""
  parts = name.split('.')
  return parts[1] if parts[0] == 'spmd_tasks' and len(parts) > 1 else None


def may_import(importer: str, imported: str) -> bool:
  above, below = ROW_OF_PART[importer], ROW_OF_PART[imported]
  return importer == imported or below > above or above == below <= 1  # extensions, and the top of the core


def test_every_module_belongs_to_a_row():
  homeless = [
    str(p.relative_to(ROOT)) for p in modules() if part_of(dotted_name(p)) not in {*ROW_OF_PART, '__main__', None}
  ]
  assert not homeless, 'give these a row in ROWS'


def test_rows_import_only_rows_below_them():
  wrong = []
  for path, found in all_imports():
    importer, imported = part_of(dotted_name(path)), part_of(found.name)
    if imported is None or importer in (None, '__main__'):  # the package's own face imports from all rows, lazily
      continue
    if imported not in ROW_OF_PART or not may_import(importer, imported):
      wrong.append(f'{path.relative_to(ROOT)}:{found.line} imports {found.name}')
  assert not wrong, '\n'.join(wrong)


def test_the_core_names_no_extension():
  """Not even in a text that is imported later: extensions are found by entry points alone."""
  wrong = []
  for path in modules():
    if part_of(dotted_name(path)) in EXTENSIONS:
      continue
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
    texts = [(node.lineno, node.value) for node in nodes if isinstance(node.value, str) and ' ' not in node.value]
    named = [(line, text) for line, text in texts if part_of(text.partition(':')[0]) in EXTENSIONS]
    wrong += [f'{path.relative_to(ROOT)}:{line} names {text}' for line, text in named]
  assert not wrong, '\n'.join(wrong)


def test_only_the_top_row_knows_fiddle():
  wrong = [
    f'{path.relative_to(ROOT)}:{found.line}'
    for path, found in all_imports()
    if found.name.split('.')[0] == 'fiddle' and part_of(dotted_name(path)) not in MAY_IMPORT_FIDDLE
  ]
  assert not wrong, '\n'.join(wrong)


def test_tensorflow_is_imported_inside_functions_only():
  wrong = [
    f'{path.relative_to(ROOT)}:{found.line} imports {found.name}'
    for path, found in all_imports()
    if not found.lazy and found.name.split('.')[0] in {'tensorflow', 'tensorflow_datasets'}
  ]
  assert not wrong, '\n'.join(wrong)


def public_names(package: str) -> set[str]:
  """The names that a package's face imports lazily, or its `__all__`, read from its source; empty for a module."""
  path = ROOT / package.replace('.', '/') / '__init__.py'
  for node in tree_of(path).body if path.exists() else ():
    if isinstance(node, ast.With):
      return {alias.name for statement in node.body for alias in statement.names}
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
      return set(ast.literal_eval(node.value))
  return set()


def test_other_packages_import_a_public_name_from_the_face():
  faces = {dotted_name(path.parent / '__init__.py') for path in modules() if path.name == '__init__.py'}
  wrong = []
  for path, found in all_imports():
    module, _, name = found.name.rpartition('.')
    package = next((p for p in accumulated(module, reverse=True) if p in faces), 'spmd_tasks')
    if part_of(package) in (None, part_of(dotted_name(path))) or module == package:
      continue
    if name in public_names(package):
      wrong.append(f'{path.relative_to(ROOT)}:{found.line} imports {found.name}: import {name} from {package}')
    elif any(part.startswith('_') for part in module.split('.')):
      wrong.append(f'{path.relative_to(ROOT)}:{found.line} imports {found.name}, which is private to {package}')
  assert not wrong, '\n'.join(wrong)


def test_no_module_imports_itself_by_way_of_others():
  names = {dotted_name(path): path for path in modules()}
  # A name that a face imports is that of the inner file; a lazy face imports it from there when it is asked for.
  defined: dict[str, str] = {}
  for path, found in all_imports():
    if path.name == '__init__.py':
      defined.setdefault(f'{dotted_name(path)}.{found.name.rpartition(".")[2]}', found.name)
  graph: dict[str, set[str]] = {name: set() for name in names}
  for path, found in all_imports():
    importer = dotted_name(path)
    inner = defined.get(found.name, found.name)
    imported = next((name for name in accumulated(inner, reverse=True) if name in names), None)
    # A package's face imports its inner files; `spmd_tasks` itself is the face of everything.
    if imported not in (None, importer, 'spmd_tasks') and importer != 'spmd_tasks':
      graph[importer].add(imported)
  graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def accumulated(name: str, *, reverse: bool = False) -> list[str]:
  """`a.b.c` -> [`a`, `a.b`, `a.b.c`]."""
  parts = name.split('.')
  names = ['.'.join(parts[:end]) for end in range(1, len(parts) + 1)]
  return names[::-1] if reverse else names


def importers_of_pax() -> set[Path]:
  """The modules that import Praxis or Paxml, and with them TensorFlow, by themselves or through others of these."""
  eager = [(path, f'{found.name}.') for path, found in all_imports() if not found.lazy and path.name != '__init__.py']
  found: set[Path] = set()
  while True:
    names = ('praxis.', 'paxml.', *(f'{dotted_name(path)}.' for path in found))
    more = {path for path, name in eager if name.startswith(names)}
    if more <= found:
      return found
    found |= more


def test_every_module_imports_without_tensorflow_and_the_lower_rows_without_fiddle():
  """In one fresh process. Warnings are errors where a module of ours is to blame; dependencies keep theirs. The
  start of a training job imports neither Orbax nor TensorStore, which takes a second or more.
  """
  left_out = importers_of_pax()
  names = [dotted_name(path) for path in modules() if path.name != '__main__.py' and path not in left_out]
  top = [name for name in names if part_of(name) in MAY_IMPORT_FIDDLE]
  lower = [name for name in names if name not in top]
  program = f"""
import importlib, sys, warnings
warnings.filterwarnings('error', module=r'spmd_tasks\\b')
def import_all(names, banned):
  for name in names:
    importlib.import_module(name)
    for package in banned:
      assert package not in sys.modules, f'{{name}} imports {{package}}'
start = ['spmd_tasks.programs.train', 'spmd_tasks.bridges.pax._checkpoints']
import_all(start, ['tensorflow', 'orbax', 'tensorstore'])
import_all({lower!r}, ['tensorflow', 'fiddle'])
import_all({top!r}, ['tensorflow'])
"""
  done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert done.returncode == 0, done.stderr


_FIRST_STEP = """
import sys
from spmd_tasks import main
flags = '--exp lm.StdlibTiny --mode train --job_log_dir job --num_fake_devices 8 --num_train_steps 2'
flags += ' --set num_layers=1 --set batch_size=8 --set seq_len=32'
code = main.run(flags.split())
names = ('pyarrow', 'starlette', 'uvicorn', 'tensorflow', 'praxis', 'transformers')
print(code, *(name for name in names if name in sys.modules), *map(type, sys.meta_path))
"""


def test_no_function_is_longer_than_120_lines():
  functions = (node for path in modules() for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))
  assert not [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 120]


@pytest.mark.slow
def test_a_first_training_step_imports_no_heavy_library(tmp_path):
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  done = subprocess.run(
    [sys.executable, '-c', _FIRST_STEP], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
  )
  code, *others = done.stdout.split(maxsplit=1)
  assert code == '0', done.stderr
  heavy = ('pyarrow', 'starlette', 'uvicorn', 'tensorflow', 'praxis', 'transformers', 'spmd_tasks')  # a finder of ours
  assert not [name for name in heavy if name in ''.join(others)]
