"""Which configs count as signed by this user for a directory, and which files are valid keys."""

from concurrent import futures
import json
import os
from pathlib import Path
import stat
import threading

from etils import epath
import pytest

from spmd_tasks import signatures
from spmd_tasks.signatures import KeyProblemError, key_file, signed, why_unsigned

CONFIG = {'experiment': 'a.B', 'overrides': {}, 'config': {'rate': 0.1, 'name': 'ü', 'shape': [1, {'float': 'nan'}]}}
OTHER = 'it was copied, moved or edited, or another user or machine signed it'


@pytest.fixture(autouse=True)
def configuration(tmp_path, monkeypatch):
  """A configuration directory for this test, which does not exist yet."""
  monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path / 'home' / '.config'))
  signatures._warn_once.cache_clear()
  return tmp_path / 'home' / '.config'


def through_text(config):
  return json.loads(json.dumps(config))


def test_a_signature_is_valid_for_one_content_and_directory(tmp_path):
  config = through_text(signed(CONFIG, tmp_path))
  assert {name: value for name, value in config.items() if name != 'signature'} == CONFIG
  assert why_unsigned(config, tmp_path) == ''
  assert why_unsigned(dict(reversed(config.items())), epath.Path(f'{tmp_path}/x/..')) == ''
  assert why_unsigned(CONFIG, tmp_path) == 'it is not signed'
  (tmp_path / 'link').symlink_to(tmp_path)
  assert why_unsigned(config, tmp_path / 'link') == ''
  assert why_unsigned(config, tmp_path / 'home') == OTHER
  for changed in ({'origin': ['/']}, {'overrides': {'a': 1}}, {'config': {}}, {'signature': 'ä'}, {'signature': [1]}):
    assert why_unsigned({**config, **changed}, tmp_path) == OTHER


def test_a_directory_of_a_store_is_its_url():
  config = signed(CONFIG, 'gs://bucket/runs/x')
  assert why_unsigned(config, epath.Path('gs://bucket/runs/x')) == ''
  assert why_unsigned(config, 'gs://other/runs/x') == OTHER


def test_the_key_is_created_once_and_readable_only_by_this_user(tmp_path, configuration):
  assert why_unsigned({**CONFIG, 'signature': '0'}, tmp_path).startswith('this user has no key')
  assert not configuration.exists()  # to look makes none
  umask = os.umask(0)
  try:
    signed(CONFIG, tmp_path)
  finally:
    os.umask(umask)
  path = key_file()
  assert path == configuration / 'spmd_tasks' / 'key'
  key = path.read_bytes()
  assert len(key) == 32
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
  assert os.listdir(path.parent) == ['key']
  signed(CONFIG, tmp_path)
  assert path.read_bytes() == key


def test_concurrent_processes_create_one_key(tmp_path, configuration):
  barrier = threading.Barrier(8)

  def sign(_):
    barrier.wait()
    return signed(CONFIG, tmp_path)['signature']

  with futures.ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(sign, range(8)))) == 1
  assert os.listdir(configuration / 'spmd_tasks') == ['key']


def no_hard_links(monkeypatch):
  def link(*paths):
    raise PermissionError(1, 'Operation not permitted')

  monkeypatch.setattr(os, 'link', link)


def test_a_key_is_created_on_a_file_system_without_hard_links(tmp_path, monkeypatch):
  no_hard_links(monkeypatch)
  assert why_unsigned(signed(CONFIG, tmp_path), tmp_path) == ''
  assert os.listdir(key_file().parent) == ['key']


def as_link(path: Path):
  path.rename(path.with_name('other'))
  path.symlink_to('other')


def as_fifo(path: Path):
  path.unlink()
  os.mkfifo(path)


def as_directory(path: Path):
  path.unlink()
  path.mkdir()


UNUSABLE = [
  (lambda path: path.chmod(0o640), 'other users may read or write the key'),
  (lambda path: path.chmod(0o602), 'other users may read or write the key'),
  (lambda path: path.parent.chmod(0o770), 'other users may replace the key'),
  (lambda path: path.write_bytes(b''), 'is damaged'),
  (lambda path: path.write_bytes(b'k' * 33), 'is damaged'),
  (as_link, 'is a link'),
  (as_fifo, 'is not a file'),
  (as_directory, 'is not a file'),
]


@pytest.mark.parametrize('change, words', UNUSABLE)
def test_a_key_that_others_may_know_or_choose_is_refused_and_the_job_runs_unsigned(tmp_path, change, words, caplog):
  config = signed(CONFIG, tmp_path)
  change(key_file())
  assert words in why_unsigned(config, tmp_path)
  for _ in range(2):
    assert signed(config, tmp_path) == CONFIG
  (record,) = caplog.records  # once
  assert words in record.getMessage()
  assert '--experiment_path' in record.getMessage()


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
  config = signed(CONFIG, tmp_path)
  monkeypatch.setattr(signatures.os, 'geteuid', lambda: 12345)
  assert 'belongs to another user: set XDG_CONFIG_HOME' in why_unsigned(config, tmp_path)


def no_home(monkeypatch):
  monkeypatch.delenv('XDG_CONFIG_HOME')
  monkeypatch.delenv('HOME', raising=False)
  monkeypatch.setattr('pwd.getpwuid', lambda uid: {}[uid])


def home_is_a_file(monkeypatch):
  monkeypatch.setenv('XDG_CONFIG_HOME', __file__)


def home_may_only_be_read(monkeypatch):
  monkeypatch.setenv('XDG_CONFIG_HOME', '/proc')


def relative_home(monkeypatch):
  monkeypatch.setenv('XDG_CONFIG_HOME', 'archive')
  monkeypatch.setenv('HOME', 'archive')


@pytest.mark.parametrize('change', [no_home, home_is_a_file, home_may_only_be_read, relative_home])
def test_a_job_without_a_directory_for_the_key_runs_unsigned(tmp_path, change, monkeypatch, caplog):
  monkeypatch.chdir(tmp_path)
  change(monkeypatch)
  assert signed(CONFIG, tmp_path) == CONFIG
  assert len(caplog.records) == 1
  assert not (tmp_path / 'archive').exists()
  with pytest.raises(KeyProblemError):
    signatures.secret_name('compiled', tmp_path)


def test_a_secret_name_depends_on_the_key(tmp_path):
  names = {signatures.secret_name(purpose, path) for purpose in 'ab' for path in (tmp_path, tmp_path / 'x')}
  assert len(names) == 4
  key_file().unlink()
  assert signatures.secret_name('a', tmp_path) not in names
