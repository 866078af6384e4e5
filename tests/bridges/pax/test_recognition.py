"""A module that needs Praxis is recognized by its source, before it is imported; nothing else installs the shims."""

import textwrap

import pytest

from spmd_tasks.bridges.pax import _recognition
from tests import binary


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """Writes modules, and tells whether the shims are installed for one of them."""
  monkeypatch.syspath_prepend(tmp_path)
  calls = []
  monkeypatch.setattr(_recognition, 'install_shims', lambda: calls.append(1))

  def prepare(name, sources):
    for module, source in sources.items():
      path = (tmp_path / module).with_suffix('.py')
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(textwrap.dedent(source))
    calls.clear()
    _recognition._imported_by.cache_clear()
    _recognition.prepare_import(name)
    return bool(calls)

  return prepare


@pytest.mark.parametrize(
  'sources, expected',
  [
    ({'lab': 'from praxis import layers'}, True),
    ({'lab': 'def late():\n  import praxis'}, True),
    ({'lab': 'from spmd_tasks.bridges.pax import PaxTask'}, True),
    ({'lab': 'from spmd_tasks import bridges\nfrom spmd_tasks.bridges import pax'}, True),
    ({'lab': 'import other', 'other': 'import praxis'}, True),
    ({'lab': 'import other', 'other': 'import lab'}, False),
    ({'lab': 'import jax, numpy\nfrom spmd_tasks.experiment import Experiment'}, False),
  ],
)
def test_by_what_a_module_and_its_own_modules_import(sources, expected, installed):
  assert installed('lab', sources) == expected


def test_by_packages_around_and_relative_imports(installed):
  package = {'group/__init__': '', 'group/models': 'import praxis', 'group/plain': 'import jax'}
  assert installed('group.lab', package | {'group/lab': 'from . import models'})
  assert installed('group.lab', package | {'group/lab': 'from .models import Model'})
  assert not installed('group.lab', package | {'group/lab': 'from . import plain'})
  assert installed('group.lab', package | {'group/__init__': 'from group import models', 'group/lab': ''})
  assert installed('paxml.tasks.lm.params.lm_cloud', {})


PROGRAM = """
import sys
from spmd_tasks import main
before = [*sys.meta_path]
code = main.run([{flags}, '--print_config'])
import jax
print(code, sys.meta_path == before, hasattr(jax, 'tree_map'), 'praxis' in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
  'flags, said',
  [
    ("'--exp', 'lm.StdlibTiny'", '0 True False False'),
    ("'--exp', 'pax_lab.dense_lm.DenseLm', '--experiment_path', 'tests/data'", '0 False True True'),
  ],
)
def test_the_process_of_a_plain_experiment_has_no_finder_and_no_added_name(flags, said):
  """In a process of its own."""
  finished = binary.run_python(PROGRAM.format(flags=flags), limit_s=240)
  assert finished.stderr.splitlines()[-1] == said, finished.stderr
