"""Modules that import Praxis are recognized by their sources, and only these install the shims."""

import pytest

from spmd_tasks.bridges.pax import _recognition, _shims
from spmd_tasks.config.registry import find_class
from spmd_tasks.recipes import DenseLanguageModel
from tests import binary


@pytest.mark.parametrize(
  'module, sources, expected',
  [
    ('lab', {'lab': 'from praxis import layers'}, True),
    ('lab', {'lab': 'def late():\n  import praxis'}, True),
    ('lab', {'lab': 'import other', 'other': 'import paxml.learners'}, True),
    ('lab', {'lab': 'import other', 'other': 'import lab'}, False),
    ('lab', {'lab': 'import jax, numpy\nfrom spmd_tasks.experiment import Experiment'}, False),
    ('group.lab', {'group/lab': 'from . import models'}, True),
    ('group.lab', {'group/lab': 'from .models import Model'}, True),
    ('group.lab', {'group/lab': 'from . import plain'}, False),
    ('group.lab', {'group/lab': 'from .far import Far', 'group/far': 'from . import models'}, True),
    ('group.lab', {'group/lab': '', 'group/__init__': 'from .models import Model'}, True),
    ('paxml.tasks.lm.params.lm_cloud', {}, True),
  ],
)
def test_modules_that_import_praxis_are_recognized(module, sources, expected, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'group').mkdir()
  around = {'group/__init__': '', 'group/models': 'import praxis', 'group/plain': 'import jax'}
  for name, source in (around | sources).items():
    (tmp_path / f'{name}.py').write_text(source)
  calls = []
  monkeypatch.setattr(_shims, 'install_shims', lambda: calls.append(1))
  _recognition.prepare_import(module)
  assert bool(calls) == expected


def test_experiments_of_this_package_are_not_searched(monkeypatch):
  monkeypatch.setattr(_recognition, '_sources', lambda module: pytest.fail(module))
  assert find_class('spmd_tasks.recipes.DenseLanguageModel', is_typed=True) is DenseLanguageModel


PROGRAM = """
import sys
import jax
from spmd_tasks import main
own = jax.tree_flatten = lambda *x: jax.tree.flatten(*x)
before = [*sys.meta_path]
code = main.run(['--exp', {experiment!r}, '--experiment_path', {directory!r}, '--print_config'])
added = [type(finder).__name__ for finder in sys.meta_path if finder not in before]
assert jax.tree_flatten is own, 'a name that JAX has is left alone'
if 'praxis' in sys.modules:
  assert jax.tree_unflatten(jax.tree_flatten([1, 2])[1], 'ab') == ['a', 'b']
  from pax_lab import dense_lm
  from paxml import summary_utils
  dense_lm.DenseLm().datasets()
  dense_lm.DenseLm().task().Instantiate()
  assert not isinstance(3, summary_utils.SummaryWriter)
  assert not {{'tensorflow', 'seqio'}} & set(sys.modules), 'imported before it is used'
print(code, added, hasattr(jax, 'tree_map'), 'praxis' in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
  'experiment, said',
  [
    ('plain_lab.Plain', '0 [] False False'),
    ('pax_lab.dense_lm.DenseLm', "0 ['_ShimFinder'] True True"),
  ],
)
def test_plain_experiments_run_without_shims(experiment, said, tmp_path):
  """Pax experiments import TensorFlow when it is used."""
  directory = 'tests/data'
  if experiment.startswith('plain'):  # user code, unlike our own package
    directory = str(tmp_path)
    (tmp_path / 'plain_lab.py').write_text('from spmd_tasks.recipes import DenseLanguageModel as Plain')
  finished = binary.run_python(PROGRAM.format(experiment=experiment, directory=directory), limit_s=240)
  assert finished.stderr.splitlines()[-1] == said, finished.stderr
