"""The structure of the package: rows, no circles of imports, and what a base install and a first step import."""

import ast
import graphlib
from importlib import metadata
import os
from pathlib import Path
import re
import subprocess
import sys
import tomllib

import pytest

from tests import import_graph
from tests.import_graph import Import, dotted_name, imports_in, module_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'spmd_tasks'

# A part imports only parts from rows below its own. The extensions come first, then the core.
ROWS = (
  ('verification',),
  ('evaluation', 'planning', 'replay', 'serving', 'sweeps', 'tuning'),
  ('bridges',),
  ('adapters',),
  ('main',),
  ('command',),
  ('flags', 'loading', 'recipes'),
  ('flag_hints', 'modes'),
  ('config',),
  ('experiments',),
  ('programs',),
  ('experiment',),
  ('decoding',),
  ('runtime',),
  ('checkpoints',),
  ('distributed', 'inputs', 'layers', 'learning'),
  ('sharding',),
  ('signatures', 'store_files'),
  ('files', 'frozen_fields'),
  ('storage_problems',),
  ('append_objects',),
  ('stores',),
  ('hub',),
  ('extensions', 'references'),
  ('activity', 'errors', 'sigterm', 'streams', 'xla_flags'),
  ('exit_codes', 'interrupt', 'lazy_exports', 'user_code'),
)
EXTENSIONS = {part for row in ROWS[: ROWS.index(('main',))] for part in row}
ROW_OF_PART = {part: number for number, row in enumerate(ROWS) for part in row}


MODULES = {
  name: path
  for name, path in import_graph.MODULES.items()
  if path.is_relative_to(PACKAGE) and path.name != '__main__.py'
}


def imports() -> list[Import]:
  return [imported for path in MODULES.values() for imported in imports_in(path)]


def part_of(name: str) -> str | None:
  """The part of the package in a dotted name: `spmd_tasks.runtime.task` -> `runtime`."""
  parts = name.split('.')
  return parts[1] if parts[0] == 'spmd_tasks' and len(parts) > 1 else None


def test_every_module_belongs_to_a_row():
  assert {part_of(name) for name in MODULES} - {None} == ROW_OF_PART.keys(), 'give each part a row in ROWS'


def test_rows_import_only_rows_below_them():
  """So no core module imports an extension, and no parts import one another in a circle."""
  wrong = []
  for imported in imports():
    above, below = part_of(dotted_name(imported.importer)), part_of(imported.name)
    if above is None or below in (None, above):  # `spmd_tasks` itself exports names of all rows, lazily
      continue
    if below not in ROW_OF_PART or ROW_OF_PART[above] >= ROW_OF_PART[below]:
      wrong.append(str(imported))
  assert not wrong, '\n'.join(wrong)


def test_the_core_names_no_extension():
  """Not even in a string that is imported later: entry points alone find extensions."""
  wrong = []
  for name, path in MODULES.items():
    if part_of(name) not in EXTENSIONS:
      strings = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
      names = [(node.lineno, node.value) for node in strings if isinstance(node.value, str) and ' ' not in node.value]
      wrong += [f'{name}:{line} names {value}' for line, value in names if part_of(value.split(':')[0]) in EXTENSIONS]
  assert not wrong, '\n'.join(wrong)


def test_no_module_imports_itself_by_way_of_others():
  graph: dict[str, set[str]] = {name: set() for name in MODULES}
  for imported in imports():
    importer, module = dotted_name(imported.importer), module_of(imported.name)
    if 'spmd_tasks' not in (importer, module) and module in graph.keys() - {importer}:
      graph[importer].add(module)
  graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_no_part_imports_a_private_module_of_another():
  wrong = []
  for imported in imports():
    is_private = any(part.startswith('_') for part in imported.name.split('.')[:-1])
    if is_private and part_of(imported.name) not in (None, part_of(dotted_name(imported.importer))):
      wrong.append(str(imported))
  assert not wrong, '\n'.join(wrong)


def modules_of_extras() -> set[str]:
  """The top-level modules that the extras install and a base install lacks."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  names = lambda packages: {re.split(r'[<>=\[]', package)[0].lower() for package in packages}
  extras = names(package for packages in project['optional-dependencies'].values() for package in packages)
  extras -= {*names(project['dependencies']), project['name']}
  distributions = metadata.packages_distributions().items()
  return {
    module for module, packages in distributions if extras & {package.lower().replace('_', '-') for package in packages}
  }


_IMPORT_ALL = """
import importlib, sys, warnings
warnings.filterwarnings('error', module=r'spmd_tasks\\b')
absent, names = {absent!r}, {names!r}

class Absent:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in absent:
      raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Absent())
for name in names:
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name.split('.')[0] not in absent:
      raise
    print(name)
"""


def test_a_base_install_imports_the_whole_core_and_the_declarations_of_extensions():
  """Without the packages of any extra. A warning of ours is an error."""
  program = _IMPORT_ALL.format(absent=modules_of_extras(), names=list(MODULES))
  done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert done.returncode == 0, done.stderr
  # No module of these is in the list itself: a declaration needs no extra.
  need_extras = {name.rpartition('.')[0] for name in done.stdout.split()}
  assert need_extras == {'spmd_tasks.bridges.pax', 'spmd_tasks.evaluation', 'spmd_tasks.serving'}


_HELP = "from spmd_tasks import main\ntry: main.run(['--help'])\nexcept SystemExit: pass"
_FIRST_STEP = """
from spmd_tasks import main
flags = '--exp lm.StdlibTiny --mode train --job_log_dir job --num_fake_devices 8 --num_train_steps 2'
flags += ' --set num_layers=1 --set batch_size=8 --set seq_len=32'
assert main.run(flags.split()) == 0
"""
_OF_EXTENSIONS = {'pyarrow', 'starlette', 'uvicorn', 'tensorflow', 'praxis', 'transformers'}


@pytest.mark.parametrize(
  'program, absent',
  [
    pytest.param('import spmd_tasks', {'jax', 'numpy', 'fiddle', 'typing'}, id='import'),
    pytest.param(_HELP, {'jax', 'numpy', 'fiddle'}, id='help'),
    # Orbax and TensorStore take a second or more to import.
    pytest.param('import spmd_tasks.programs.train', {*_OF_EXTENSIONS, 'orbax', 'tensorstore', 'flax.nnx'}, id='train'),
    pytest.param(_FIRST_STEP, _OF_EXTENSIONS, id='first step', marks=pytest.mark.exhaustive),
  ],
)
def test_a_start_imports_only_what_it_uses(program, absent, tmp_path):
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  program += f'\nimport sys\nprint("imported:", *({absent!r} & sys.modules.keys()))'
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == 'imported:'
