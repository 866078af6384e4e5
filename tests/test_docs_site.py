"""The docs site: every public name has an API entry, and text that follows from the code is the code's."""

import ast
import importlib
import os
from pathlib import Path
import sys

import griffe
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import docs_fields  # noqa: E402
import docs_site  # noqa: E402

PUBLIC = docs_site.public_packages()


@pytest.fixture(scope='module')
def package() -> griffe.Module:
  """spmd_tasks as the site's generator reads it: as syntax, without importing it."""
  loaded = griffe.load('spmd_tasks', search_paths=[ROOT], resolve_aliases=True, resolve_external=False)
  assert isinstance(loaded, griffe.Module)
  return loaded


@pytest.mark.parametrize('public', PUBLIC, ids=lambda public: public.name)
def test_every_public_name_has_an_api_entry(public, package):
  page = docs_site.api_page(public)
  entries = [line.removeprefix('::: ') for line in page.splitlines() if line.startswith('::: ')]
  assert entries[0] == public.name
  assert [entry.rpartition('.')[2] for entry in entries[1:]] == list(public.names)
  for entry in entries[1:]:
    entry_object = package[entry.removeprefix('spmd_tasks.')]
    if entry_object.is_alias:
      entry_object = entry_object.final_target  # raises where the name leads nowhere


@pytest.mark.parametrize('public', PUBLIC, ids=lambda public: public.name)
def test_the_public_names_exist(public):
  module = importlib.import_module(public.name)
  if hasattr(module, '__path__'):
    assert tuple(module.__all__) == public.names
  if public.name != 'spmd_tasks.bridges.pax':  # its names import Paxml, see tests/bridges/pax/test_shims.py
    assert [name for name in public.names if not hasattr(module, name)] == []


PACKAGES = [public for public in PUBLIC if public.name.rpartition('.')[2] not in docs_site.MODULES]


def test_at_most_250_names_are_promised():
  """A name that two packages export, such as Learner, counts once."""
  assert len({name for public in PACKAGES for name in public.names}) <= 250


@pytest.mark.parametrize('public', PACKAGES, ids=lambda public: public.name)
def test_a_package_explains_itself_in_under_25_lines(public):
  assert 0 < len(public.docstring.splitlines()) < 25


def test_public_classes_and_functions_have_docstrings(package):
  bare = []
  for public in PUBLIC:
    for name in public.names:
      entry_object = package[docs_site.identifier(public.name, name).removeprefix('spmd_tasks.')]
      entry_object = entry_object.final_target if entry_object.is_alias else entry_object
      if (entry_object.is_class or entry_object.is_function) and entry_object.docstring is None:
        bare.append(f'{public.name}.{name}')
  assert bare == []


def test_fields_of_a_class_are_in_its_entry(package):
  fields = docs_fields.FieldsOfClasses()
  cls = package['recipes.dense.DenseLanguageModel']
  fields.on_class(cls=cls, loader=None)
  assert "  dtype (str): of the computation; weights are float32. Default: `'float32'`." in cls.docstring.value
  assert '  num_layers (int): Default: `4`.' in cls.docstring.value
  before = cls.docstring.value
  fields.on_class(cls=cls, loader=None)
  assert cls.docstring.value == before


def test_every_module_and_every_experiment_has_its_line():
  page = docs_site.modules_page()
  for path in [*(ROOT / 'spmd_tasks').rglob('*.py'), *(ROOT / 'experiments').glob('*.py')]:
    if ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))):
      assert f'| `{path.name}` |' in page, path
  experiments = docs_site.experiments_page()
  assert '`lm.StdlibTiny`' in experiments
  assert 'spmd-tasks --exp lm.StdlibTiny' in experiments


def test_the_rows_in_the_reading_order_are_those_of_the_layering_test():
  path = ROOT / 'docs' / 'reading_order.md'
  before, start, rest = path.read_text(encoding='utf-8').partition('<!-- rows: scripts/docs_site.py -->\n')
  listed, end, after = rest.partition('<!-- end -->\n')
  assert start
  assert end
  rows = f'```text\n{docs_site.existing_rows()}```\n'
  if os.environ.get('UPDATE_GOLDEN') == '1':
    path.write_text(f'{before}{start}{rows}{end}{after}', encoding='utf-8')
  else:
    assert listed == rows, 'scripts/update_golden writes the rows anew'
