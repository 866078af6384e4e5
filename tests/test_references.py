"""`module:name` in a config resolves to code below the user's own directories, or registered, and to nothing else."""

import importlib
from pathlib import Path
import sys

import pytest

from spmd_tasks import references
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.references import load_reference
from tests.config import small_experiments

OWN = """
import functools
import os
from os import system
from subprocess import run as run_program
import numpy as np
from numpy import save

def score(prompt, completion, record):
  return 1.0

class Environment:
  def __call__(self, prompt, completion, record):
    return 2.0

made = Environment()
partly = functools.partial(score, 'p')
cached = functools.cache(score)
disguised = functools.partial(os.system)
wrapped = functools.wraps(os.system)(lambda *args: 0)
evaluate = eval
"""
PAYLOAD = 'from pathlib import Path\nPath({ran!r}).touch()\ndef score(*call):\n  return 1.0\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
  """A project with a package of its own and, beside it on sys.path, modules that must never be imported."""
  (tmp_path / 'project/own_lab').mkdir(parents=True)
  (tmp_path / 'project/own_lab/rewards.py').write_text(OWN)
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'elsewhere/payload.py').write_text(PAYLOAD.format(ran=str(tmp_path / 'ran')))
  (tmp_path / 'project/own_lab/linked.py').symlink_to(tmp_path / 'elsewhere/payload.py')
  monkeypatch.setattr(sys, 'path', [*sys.path, str(tmp_path / 'elsewhere')])
  before = set(sys.modules)
  yield tmp_path / 'project'
  assert not (tmp_path / 'ran').exists()
  for name in set(sys.modules) - before:
    if name.startswith(('own_', 'payload')):
      del sys.modules[name]


@pytest.mark.parametrize('name', ['score', 'Environment', 'made', 'partly', 'cached'])
def test_what_a_directory_of_ones_own_defines_is_found(project, name):
  assert callable(load_reference(f'own_lab.rewards:{name}', [project]))


REFUSED = [
  *(
    'os:system',
    'posix:system',
    'builtins:eval',
    'pty:spawn',
    'subprocess:call',
    'antigravity:webbrowser',
    '__main__:f',
  ),
  *('numpy:save', 'jax:jit', 'spmd_tasks.files:append', 'spmd_tasks.command:os', 'spmd_tasks:load'),
  *('payload:score', 'own_lab.linked:score', 'own_lab.payload:score', 'elsewhere.payload:score'),
  *('spmd_tasks.command:os.system', 'own_lab.rewards:os.system', 'own_lab.rewards:np.save'),
  *(
    '..own_lab:score',
    '.:score',
    ':score',
    'own_lab.rewards:',
    'own_lab/rewards:score',
    'own_lab.rewards:score:x',
    'a',
  ),
]


@pytest.mark.parametrize('reference', REFUSED)
def test_no_other_code_is_imported(project, reference):
  before = set(sys.modules)
  with pytest.raises(UserError) as error:
    load_reference(reference, [project])
  assert not {name for name in set(sys.modules) - before if name != 'own_lab'}
  assert '\n' not in str(error.value)


FOREIGN = ['system', 'run_program', 'save', 'os', 'np', 'disguised', 'wrapped', 'evaluate']


@pytest.mark.parametrize('name', FOREIGN)
def test_a_function_that_the_users_module_imports_is_not_the_users_own(project, name):
  with pytest.raises(UserError, match='name a function of your own that calls it'):
    load_reference(f'own_lab.rewards:{name}', [project])


def test_without_directories_the_error_names_the_directory_of_the_module(project, monkeypatch):
  monkeypatch.chdir(project)
  with pytest.raises(UserError, match=rf'if you trust the code in {project}, add --experiment_path {project}'):
    load_reference('own_lab.rewards:score', [])


def test_the_error_about_a_misspelled_module_says_to_correct_it(project):
  with pytest.raises(UserError, match=r'own_lab.reward:score .*project, .* correct the name'):
    load_reference('own_lab.reward:score', [project])


def test_a_module_that_was_imported_from_elsewhere_is_not_below(project, tmp_path):
  (project / 'payload.py').write_text('def score(*call):\n  return 1.0\n')
  (tmp_path / 'elsewhere/payload.py').write_text('def score(*call):\n  return 2.0\n')
  importlib.import_module('payload')
  with pytest.raises(UserError, match='is not below'):
    load_reference('payload:score', [project])


def test_an_installed_package_may_register_a_function(project, tmp_path):
  (tmp_path / 'elsewhere/payload.py').write_text('def score(*call):\n  return 1.0\ndef other(*call):\n  return 1.0\n')
  information = tmp_path / 'elsewhere' / 'payload-1.0.dist-info'
  information.mkdir()
  (information / 'METADATA').write_text('Metadata-Version: 2.1\nName: payload\nVersion: 1.0\n')
  (information / 'entry_points.txt').write_text(f'[{references.ENTRY_POINTS}]\nscore = payload:score\n')
  assert load_reference('payload:score', [])('p', 'c', {}) == 1.0
  with pytest.raises(UserError, match='no installed package registers it'):
    load_reference('payload:other', [])


def test_references_may_be_below_the_current_directory_the_experiments_and_the_search_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'labs').mkdir()
  monkeypatch.setattr(sys, 'path', list(sys.path))
  resolved = resolve(small_experiments.Small, experiment_path=['labs'])
  root = Path(small_experiments.__file__).resolve().parents[small_experiments.__name__.count('.')]
  assert set(resolved.code_directories) == {tmp_path, tmp_path / 'labs', root}
  assert resolve('synthetic.Tiny').code_directories == (tmp_path,)  # not this package's


def test_for_an_installed_package_only_its_own_files_count(project, monkeypatch):
  monkeypatch.setattr(references, '_INSTALLED', {project})
  (project / 'own_single.py').write_text('class Mine:\n  pass\n')
  monkeypatch.syspath_prepend(project)
  for module, name, part in (('own_lab.rewards', 'Environment', 'own_lab'), ('own_single', 'Mine', 'own_single.py')):
    cls = getattr(importlib.import_module(module), name)
    assert references.directories_of(cls) == [project / part]
