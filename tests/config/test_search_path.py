"""A config.json may come from anyone: what it names is imported only where the user or an installed package says so.

The files of an attacker write a line to the file `ran` when they are imported.
"""

import json
from pathlib import Path
import shutil
import sys

from etils import epath
import pytest

from spmd_tasks import experiments
from spmd_tasks.config import from_saved, registry, resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError
from spmd_tasks.programs.job_directory import write_config

ATTACK = "from pathlib import Path\nPath({ran!r}).open('a').write(__name__ + '\\n')\n"
EXPERIMENT = '''
from spmd_tasks.experiments.synthetic import Tiny

class Mine(Tiny):
  """My own."""

  model_dims = 32
'''


@pytest.fixture
def directory(tmp_path, monkeypatch):
  """The current directory, with modules of one's own and of others; what is imported is forgotten afterwards."""
  for folder in ('labs/my_lab', 'labs/other_lab', 'evil/pack', 'nest/inner'):
    (tmp_path / folder).mkdir(parents=True)
  attack = ATTACK.format(ran=str(tmp_path / 'ran'))
  names = ('evil_module.py', 'evil/pack/__init__.py', 'evil/pack/deeper.py', 'nest/deeper.py', 'nest/inner/deepest.py')
  for name in names:
    (tmp_path / name).write_text(attack + EXPERIMENT)
  (tmp_path / 'labs/my_lab/notes.py').write_text(EXPERIMENT)
  (tmp_path / 'labs/other_lab/__init__.py').symlink_to(tmp_path / 'evil_module.py')
  (tmp_path / 'labs/other_lab/notes.py').write_text(EXPERIMENT)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', ['', str(tmp_path / 'evil'), *sys.path])
  monkeypatch.setattr(registry, '_registry', {})
  before = set(sys.modules)
  yield tmp_path
  for name in set(sys.modules) - before:
    file = getattr(sys.modules[name], '__file__', None)
    if file is None or Path(file).is_relative_to(tmp_path):
      del sys.modules[name]


def saved(name):
  return {'experiment': name, 'overrides': {}, 'config': {}}


ATTACKS = [
  'evil_module.Mine',  # in the current directory
  'pack.Mine',  # on sys.path, as PYTHONPATH and site-packages are
  'pack.deeper.Mine',
  'nest.inner.deepest.Mine',  # in another one
  'labs.other_lab.notes.Mine',  # below the search path, but its package is a link that leads out of it
  'antigravity.Mine',  # of the standard library: opens a browser
  'os.system.Mine',
  '__main__.Mine',
  '../evil_module.Mine',
  'evil_module',
  '.Mine',
  '',
]


@pytest.mark.parametrize('experiment_path', [(), ('labs',)], ids=['no path', 'a path'])
@pytest.mark.parametrize('name', ATTACKS)
def test_a_file_has_nothing_imported(directory, name, experiment_path):
  before, path = set(sys.modules), list(sys.path)
  with pytest.raises(UserError) as error:
    from_json(saved(name), experiment_path=experiment_path)
  assert not (directory / 'ran').exists()
  imported = set(sys.modules) - before
  assert not [module for module in imported if not module.startswith('spmd_tasks.')]  # whose wings are asked
  assert '\n' not in str(error.value)
  assert sys.path[-len(path) :] == path


@pytest.mark.parametrize('name', ['antigravity.Mine', 'webbrowser.Mine', 'pty.Mine'])
def test_the_search_path_is_all_that_may_be_imported(directory, name, monkeypatch):
  monkeypatch.delitem(sys.modules, name.partition('.')[0], raising=False)  # another test's import
  with pytest.raises(UserError, match='not registered'):
    from_json(saved(name), experiment_path=('.',))
  assert name.partition('.')[0] not in sys.modules


def test_modules_of_an_installed_paxml_may_be_imported_and_not_those_of_a_folder_of_that_name(tmp_path, monkeypatch):
  name = 'paxml.tasks.vision.params.mnist'
  for module in [each for each in sys.modules if each.partition('.')[0] == 'paxml']:
    monkeypatch.delitem(sys.modules, module)
  assert from_saved.may_be_imported(name, (), [])
  folder = tmp_path.joinpath(*name.split('.'))
  folder.mkdir(parents=True)
  for path in (folder, *folder.parents):
    if path.is_relative_to(tmp_path / 'paxml'):
      (path / '__init__.py').touch()
  monkeypatch.syspath_prepend(tmp_path)
  assert not from_saved.may_be_imported(name, (), [])


def test_ones_own_experiment_goes_on_with_the_path_that_the_message_names(directory):
  sys.path.insert(0, str(directory / 'labs'))  # as the first command found it
  config = to_json(resolve('my_lab.notes.Mine', ['num_layers=3']))
  (directory / 'config.json').write_text(json.dumps(config))
  del sys.modules['my_lab.notes'], sys.modules['my_lab']
  read = read_saved_config('config.json')
  with pytest.raises(UserError) as error:
    from_json(read)
  assert str(error.value) == (
    'the saved config names the experiment my_lab.notes.Mine, which is not registered, and a file alone never decides '
    f'what is imported: if you trust the code in {directory}/labs, add --experiment_path {directory}/labs (in Python, '
    'import my_lab.notes first).'
  )
  assert 'my_lab.notes' not in sys.modules
  job = from_json(read, experiment_path=('labs',)).build()
  assert (job.name, job.experiment.num_layers, job.experiment.model_dims) == ('my_lab.notes.Mine', 3, 32)
  assert from_json(read).name == 'my_lab.notes.Mine'  # imported by now


def test_without_a_place_the_message_says_what_to_name(directory):
  with pytest.raises(UserError, match='add --experiment_path DIR, the directory that holds gone_lab'):
    from_json(saved('gone_lab.notes.Mine'))
  with pytest.raises(UserError, match='--experiment_path nowhere is not a directory'):
    from_json(saved('gone_lab.notes.Mine'), experiment_path=['nowhere'])


@pytest.mark.parametrize('name', ['lm.UnevenTiny', 'spmd_tasks.recipes.DenseLanguageModel'])
def test_registered_experiments_and_recipes_need_no_path(directory, name):
  assert from_json(saved(name)).experiment.num_layers


def test_a_module_of_a_package_with_entry_points_needs_no_path(directory):
  """`--exp vision.Base` saves the name of the module that defines the class, which the registered one imports."""
  package = directory / 'site' / 'vision_lab'
  package.mkdir(parents=True)
  (package / '__init__.py').write_text('')
  (package / 'base.py').write_text(EXPERIMENT)
  (package / 'experiments.py').write_text('from vision_lab.base import Mine\n')
  (package / 'unused.py').write_text(ATTACK.format(ran=str(directory / 'ran')) + EXPERIMENT)
  info = directory / 'site' / 'vision_lab-1.0.dist-info'
  info.mkdir()
  (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: vision_lab\nVersion: 1.0\n')
  (info / 'entry_points.txt').write_text(f'[{experiments.ENTRY_POINTS}]\nvision = vision_lab.experiments\n')
  sys.path.insert(0, str(directory / 'site'))
  with pytest.raises(UserError, match='not registered'):
    from_json(saved('vision_lab.unused.Mine'))
  assert not (directory / 'ran').exists()
  assert from_json(saved('vision_lab.base.Mine')).name == 'vision_lab.base.Mine'
  assert from_json(saved('vision_lab.experiments.Mine')).name == 'vision_lab.base.Mine'


SYMBOLS = [
  {'symbol': 'evil_module:Mine'},
  {'symbol': 'os:system', 'partial': {'args': ['touch ran']}},
  {'symbol': 'pack.deeper:Mine', 'closure': {'x': {'symbol': 'evil_module:Mine'}}},
  {'object': 'evil_module:Mine', 'repr': '1'},
  {'enum': 'evil_module:Mine', 'name': 'A'},
  {'dtype': 'evil_module'},
  {'dict': {'a': {'symbol': 'evil_module:Mine'}}},
]


PATHS = ('task', 'task.model.stack.block.ffn.activation', 'dtype')


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('value', SYMBOLS, ids=str)
def test_a_symbol_in_a_file_is_compared_and_neither_imported_nor_called(directory, path, value):
  config = to_json(resolve('synthetic.Tiny'))
  before = set(sys.modules)
  with pytest.raises(UserError, match=path):
    from_json(config | {'config': config['config'] | {path: value}}, experiment_path=['labs'])
  assert not (directory / 'ran').exists()
  assert set(sys.modules) == before


def begin_job(directory):
  """A job of labs/my_lab/notes.py that has written its config, with nothing of it imported any more."""
  sys.path.insert(0, str(directory / 'labs'))  # as the first command found it
  config = to_json(resolve('my_lab.notes.Mine'))
  sys.path.remove(str(directory / 'labs'))
  for name in ('my_lab.notes', 'my_lab'):
    sys.modules.pop(name, None)
  job = directory / 'runs' / 'job'
  job.mkdir(parents=True)
  write_config(epath.Path(job), json.dumps(config))
  for path in (directory, *directory.rglob('*')):
    path.chmod(0o755 if path.is_dir() else 0o644)
  return job


def test_ones_own_job_finds_its_module_again(directory):
  job = begin_job(directory)
  assert from_json(read_saved_config(job / 'config.json')).name == 'my_lab.notes.Mine'


def others_may_write(path):
  path.chmod(path.stat().st_mode | 0o020)


def copy_job(job):
  job.rename(job.with_name('first'))
  shutil.copytree(job.with_name('first'), job)


CHANGES = [
  (lambda job: others_may_write(job), r'others may write to .*runs/job: chmod go-w'),
  (lambda job: others_may_write(job / 'config.json'), r'others may write to .*config.json'),
  (lambda job: others_may_write(job.parents[1] / 'labs'), r'others may write to .*labs'),
  (lambda job: others_may_write(job.parents[1] / 'labs/my_lab'), r'others may write to .*my_lab'),
  (lambda job: others_may_write(job.parents[1]), r'others may write to'),
  (copy_job, 'is a copy, or was made on another machine'),
  (lambda job: (job.parents[1] / 'labs/my_lab').rename(job.parents[1] / 'labs/other'), 'labs has no my_lab'),
]


@pytest.mark.parametrize('change, words', CHANGES)
def test_a_job_that_others_may_have_made_does_not(directory, change, words):
  job = begin_job(directory)
  change(job)
  with pytest.raises(UserError, match=words) as error:
    from_json(read_saved_config(job / 'config.json'))
  assert '--experiment_path' in str(error.value)
  assert 'my_lab.notes' not in sys.modules


def test_a_job_of_another_user_does_not(directory, monkeypatch):
  job = begin_job(directory)
  monkeypatch.setattr(from_saved.os, 'geteuid', lambda: 12345)
  if job.stat().st_uid == 0:  # root's files are trusted
    assert from_json(read_saved_config(job / 'config.json')).name == 'my_lab.notes.Mine'
    return
  with pytest.raises(UserError, match='belongs to another user'):
    from_json(read_saved_config(job / 'config.json'))


def test_a_path_in_the_file_alone_says_nothing(directory):
  named = saved('labs.my_lab.notes.Mine') | {'origin': str(directory), 'mark': 1}
  (directory / 'config.json').write_text(json.dumps(named))
  for config in (named, read_saved_config('config.json')):
    with pytest.raises(UserError, match='not registered'):
      from_json(config)
