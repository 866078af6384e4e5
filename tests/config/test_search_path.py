"""A config.json may come from a stranger: it imports only modules that the user or an installed package allows.

An attacker's modules write a line to the file `ran` when they are imported.
"""

import json
from pathlib import Path
import shutil
import sys

from etils import epath
import pytest

from spmd_tasks import experiments, references, signatures
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
  """The current directory, with the user's modules and an attacker's, which are unloaded afterwards."""
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


@pytest.fixture
def own_key(tmp_path_factory, monkeypatch):
  """A key of this test only."""
  monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path_factory.mktemp('configuration')))


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
def test_a_file_imports_nothing(directory, name, experiment_path):
  before, path = set(sys.modules), list(sys.path)
  with pytest.raises(UserError) as error:
    from_json(saved(name), experiment_path=experiment_path)
  assert not (directory / 'ran').exists()
  imported = set(sys.modules) - before
  assert not [module for module in imported if not module.startswith('spmd_tasks.')]
  assert '\n' not in str(error.value)
  assert sys.path[-len(path) :] == path


@pytest.mark.parametrize('name', ['antigravity.Mine', 'webbrowser.Mine', 'pty.Mine'])
def test_only_modules_on_the_search_path_may_be_imported(directory, name, monkeypatch):
  monkeypatch.delitem(sys.modules, name.partition('.')[0], raising=False)  # another test's import
  with pytest.raises(UserError, match='not registered'):
    from_json(saved(name), experiment_path=('.',))
  assert name.partition('.')[0] not in sys.modules


def test_an_installed_paxml_may_be_imported_but_not_a_folder_of_that_name(tmp_path, monkeypatch):
  name = 'paxml.tasks.vision.params.mnist'
  for module in [*sys.modules]:
    if module.partition('.')[0] == 'paxml':
      monkeypatch.delitem(sys.modules, module)
  assert from_saved.may_be_imported(name, (), [])
  folder = tmp_path.joinpath(*name.split('.'))
  folder.mkdir(parents=True)
  for path in (folder, *folder.parents):
    if path.is_relative_to(tmp_path / 'paxml'):
      (path / '__init__.py').touch()
  monkeypatch.syspath_prepend(tmp_path)
  assert not from_saved.may_be_imported(name, (), [])


def test_the_users_own_experiment_needs_the_path_in_the_message(directory):
  sys.path.insert(0, str(directory / 'labs'))
  config = to_json(resolve('my_lab.notes.Mine', ['num_layers=3']))
  (directory / 'config.json').write_text(json.dumps(config))
  del sys.modules['my_lab.notes'], sys.modules['my_lab']
  read = read_saved_config('config.json')
  with pytest.raises(UserError) as error:
    from_json(read)
  assert 'my_lab.notes.Mine, which is not registered' in str(error.value)
  assert 'it is not signed' in str(error.value)
  assert f'add --experiment_path {directory}/labs' in str(error.value)
  assert 'my_lab.notes' not in sys.modules
  job = from_json(read, experiment_path=('labs',)).build()
  assert (job.name, job.experiment.num_layers, job.experiment.model_dims) == ('my_lab.notes.Mine', 3, 32)
  assert from_json(read).name == 'my_lab.notes.Mine'  # imported by now


def test_without_a_directory_the_message_asks_for_one(directory):
  with pytest.raises(UserError, match='add --experiment_path DIR, the directory of gone_lab'):
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
def test_a_symbol_in_a_file_is_only_compared(directory, path, value):
  config = to_json(resolve('synthetic.Tiny'))
  before = set(sys.modules)
  with pytest.raises(UserError, match=path):
    from_json(config | {'config': config['config'] | {path: value}}, experiment_path=['labs'])
  assert not (directory / 'ran').exists()
  assert set(sys.modules) == before


def begin_job(directory):
  """Returns the directory of a job of labs/my_lab/notes.py, whose modules are unloaded again."""
  sys.path.insert(0, str(directory / 'labs'))
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


def test_the_users_own_job_finds_its_module_again(directory):
  job = begin_job(directory)
  assert from_json(read_saved_config(job / 'config.json')).name == 'my_lab.notes.Mine'


def others_may_write(path):
  path.chmod(path.stat().st_mode | 0o020)


def copy_job(job):
  """As an archive that is unpacked in another place."""
  job.rename(job.with_name('first'))
  shutil.copytree(job.with_name('first'), job.with_name('second'))
  return job.with_name('second')


def edit(job, **changes):
  config = json.loads((job / 'config.json').read_text())
  (job / 'config.json').write_text(json.dumps(config | changes))


def link_config(job):
  """A stranger's directory with a link to a signed config.json."""
  (job.parent / 'linked').mkdir()
  (job.parent / 'linked/config.json').symlink_to(job / 'config.json')
  return job.parent / 'linked'


def new_key(job):
  """As on another machine, or for another user."""
  signatures.key_file().write_bytes(b'k' * 32)


def lose_key(job):
  signatures.key_file().unlink()


def rename_package(job):
  (job.parents[1] / 'labs/my_lab').rename(job.parents[1] / 'labs/other')


def rename_labs(job):
  (job.parents[1] / 'labs').rename(job.parents[1] / 'labels')


def share_key(job):
  signatures.key_file().chmod(0o640)


NOT_SIGNED = 'it was copied, moved or edited, or another user or machine signed it'
CHANGES = [
  (lambda job: others_may_write(job.parents[1] / 'labs'), r'others may write to .*labs'),
  (lambda job: others_may_write(job.parents[1] / 'labs/my_lab'), r'others may write to .*my_lab'),
  (lambda job: others_may_write(job.parents[1]), r'others may write to'),
  (lambda job: job.rename(job.with_name('moved')), NOT_SIGNED),
  (copy_job, NOT_SIGNED),
  (link_config, NOT_SIGNED),
  (lambda job: edit(job, overrides={'seed': 1}), NOT_SIGNED),
  (lambda job: edit(job, origin=['/proc/self/cwd']), NOT_SIGNED),
  (lambda job: edit(job, signature=None), NOT_SIGNED),
  (new_key, NOT_SIGNED),
  (lose_key, 'this user has no key'),
  (share_key, 'other users may read or write the key .*: delete'),
  (rename_package, 'is not registered'),
  (rename_labs, 'labs, where its modules were, is no longer a directory'),
]


@pytest.mark.parametrize('change, words', CHANGES)
def test_a_job_that_others_may_have_changed_imports_nothing(directory, own_key, change, words):
  job = begin_job(directory)
  job = change(job) or job
  with pytest.raises(UserError, match=words) as error:
    from_json(read_saved_config(job / 'config.json'))
  assert '--experiment_path' in str(error.value)
  assert 'my_lab.notes' not in sys.modules


def test_the_formatting_of_a_signed_config_may_change(directory):
  job = begin_job(directory)
  edit(job)  # changes the indentation
  job.chmod(0o777)
  for _ in range(2):
    assert from_json(read_saved_config(job / 'config.json'), ['seed=3']).experiment.seed == 3
  shutil.copytree(job, job.with_name('copy'))
  again = from_json(read_saved_config(job.with_name('copy') / 'config.json'), experiment_path=['labs'])
  write_config(epath.Path(job.with_name('copy')), json.dumps(to_json(again)))  # as a job that resumes there
  for name in ('my_lab.notes', 'my_lab'):
    del sys.modules[name]
  registry._registry.clear()
  assert from_json(read_saved_config(job.with_name('copy') / 'config.json')).name == 'my_lab.notes.Mine'


def test_a_job_of_another_user_imports_nothing(directory, monkeypatch):
  job = begin_job(directory)
  monkeypatch.setattr(signatures.os, 'geteuid', lambda: 12345)
  with pytest.raises(UserError, match=r'key .* belongs to another user'):
    from_json(read_saved_config(job / 'config.json'))


def test_a_directory_in_an_unsigned_file_is_ignored(directory):
  for origin in (str(directory), [str(directory)], ['/proc/self/cwd'], ['.'], [1], {}):
    forged = saved('labs.my_lab.notes.Mine') | {'origin': origin, 'signature': '0' * 64}
    (directory / 'config.json').write_text(json.dumps(forged))
    for config in (forged, read_saved_config('config.json')):
      with pytest.raises(UserError, match='not registered'):
        from_json(config)


@pytest.mark.parametrize('origin', ['/proc/self/cwd', '/dev/fd', '.', 'labs', 'LINK'])
def test_a_signed_directory_of_modules_must_always_be_the_same_directory(directory, origin):
  """Even if an older version recorded another one."""
  (directory / 'LINK').symlink_to(directory / 'labs')
  origin = str(directory / origin) if origin == 'LINK' else origin
  job = begin_job(directory)
  config = {**json.loads((job / 'config.json').read_text()), 'experiment': 'labs.my_lab.notes.Mine', 'origin': [origin]}
  write_config(epath.Path(job), json.dumps(config))
  with pytest.raises(UserError, match='is no longer a directory'):
    from_json(read_saved_config(job / 'config.json'))


def test_packages_installed_below_a_directory_do_not_count(directory, monkeypatch):
  """Such as in a virtual environment in the project's directory."""
  monkeypatch.setattr(references, '_INSTALLED', {directory / 'labs'})
  sys.path.insert(0, str(directory / 'labs'))
  with pytest.raises(UserError, match='not registered'):
    from_json(saved('my_lab.notes.Mine'), experiment_path=['.'])
  assert from_json(saved('my_lab.notes.Mine'), experiment_path=['labs']).name == 'my_lab.notes.Mine'
