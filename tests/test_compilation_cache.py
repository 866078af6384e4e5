"""Compiled programs are cached in the directory that the user chooses, by default the job's."""

import json
import os
from pathlib import Path
import shutil
import time
from types import SimpleNamespace

from etils import epath
import pytest

from spmd_tasks import store_files
from spmd_tasks.command import Command
from spmd_tasks.files import glob_below
from spmd_tasks.programs import job_directory
from spmd_tasks.programs.compiled_programs import programs_directory
from spmd_tasks.signatures import secret_name
from tests import binary

DIR, ENABLED = 'jax_compilation_cache_dir', 'jax_enable_compilation_cache'


@pytest.mark.parametrize(
  'asked, named, platform, directory, enabled',
  [
    (None, None, 'gpu', 'job/compiled/NAME', True),
    (None, None, 'cpu', None, True),
    (None, '/jax', 'gpu', '/jax', True),  # JAX's own variable
    ('mine', '/jax', 'cpu', 'mine', True),
    ('none', '/jax', 'gpu', '/jax', False),
  ],
)
def test_the_flag_wins_over_jaxs_variable(asked, named, platform, directory, enabled, tmp_path, monkeypatch):
  updates = {DIR: named, ENABLED: True}
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: platform)
  monkeypatch.chdir(tmp_path)
  flags = SimpleNamespace(compilation_cache=asked, job_log_dir='job')
  Command(flags=flags)._set_compilation_cache(epath.Path(tmp_path / 'job'))
  directory = directory and directory.replace('NAME', secret_name('compiled', tmp_path / 'job'))
  assert updates == {DIR: directory and str(tmp_path / directory), ENABLED: enabled}


def test_a_read_only_directory_is_not_used(tmp_path, monkeypatch):
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**{DIR: None}, update=None))
  Command(flags=SimpleNamespace(compilation_cache=None, job_log_dir=tmp_path))._set_compilation_cache(
    epath.Path(tmp_path)
  )


def is_used(job_log_dir):
  """Returns whether programs are read from the directory named by this user's key, or not at all."""
  directory = programs_directory(epath.Path(job_log_dir))
  assert directory is None or directory == epath.Path(job_log_dir) / 'compiled' / secret_name('compiled', job_log_dir)
  return directory is not None


def test_programs_in_an_unsigned_directory_are_not_used(tmp_path, caplog):
  job = epath.Path(tmp_path / 'job')
  assert is_used(job)  # a new one
  planted = job / 'compiled' / 'jit_train_step-1-cache'
  planted.parent.mkdir(parents=True)
  planted.write_bytes(b'a program')
  assert is_used(job)  # begun, and killed before it had a config: what was planted is not in the place
  job_directory.write_config(job, json.dumps({'experiment': 'a.B', 'overrides': {}, 'config': {}}))
  assert is_used(job)
  assert not caplog.records
  shutil.copytree(job, tmp_path / 'copy')
  assert not is_used(tmp_path / 'copy')
  assert 'it was copied, moved or edited' in caplog.text
  (job / 'config.json').write_text('{')
  assert not is_used(job)


def test_a_resumed_directory_is_signed_but_its_old_programs_are_not_used(tmp_path):
  first, second = (epath.Path(tmp_path / name) for name in ('first', 'second'))
  first.mkdir()
  job_directory.write_config(first, json.dumps({'experiment': 'a.B', 'overrides': {}, 'config': {}}))
  directory = programs_directory(first)
  assert directory is not None
  (directory / 'jit_train_step-1-cache').parent.mkdir(parents=True)
  (directory / 'jit_train_step-1-cache').write_bytes(b'a program')
  shutil.copytree(first, second)
  job_directory.write_config(second, (second / 'config.json').read_text())
  assert is_used(second)
  assert not programs_directory(second).exists()


def test_programs_that_another_user_may_have_written_are_not_used(tmp_path, monkeypatch):
  programs = Path(programs_directory(epath.Path(tmp_path)))
  programs.mkdir(parents=True, mode=0o777)
  programs.chmod(0o777)
  assert is_used(tmp_path)
  assert programs.stat().st_mode & 0o777 == 0o700  # from now on
  (programs / 'entry').symlink_to('/etc/passwd')
  lstat = os.lstat

  def lstat_of_two_users(path, **how):
    is_others = str(path).endswith('/entry')
    return SimpleNamespace(st_uid=os.geteuid() + 1) if is_others else lstat(path, **how)

  monkeypatch.setattr(os, 'lstat', lstat_of_two_users)
  assert not is_used(tmp_path)


def test_without_a_key_no_programs_are_cached(tmp_path, monkeypatch, caplog):
  monkeypatch.setenv('XDG_CONFIG_HOME', '/proc/none')
  assert not is_used(epath.Path(tmp_path / 'job'))
  assert '--compilation_cache DIR names another place' in caplog.text


def test_a_job_caches_its_programs_in_the_given_directory(tmp_path):
  flags = ['--exp', 'tests.programs.own_experiments.Regression', '--ici_mesh_shape', '1,1,1', '--num_train_steps', '1']
  flags += ['--mode', 'train', '--job_log_dir', tmp_path / 'job', '--compilation_cache', tmp_path / 'programs']
  done = binary.run_binary(*flags)
  assert done.returncode == 0, done.stderr[-2000:]
  assert any('train_step' in path.name for path in (tmp_path / 'programs').iterdir())


def test_a_cache_in_a_store_is_downloaded_and_new_programs_are_uploaded(store, tmp_path, monkeypatch):
  failures, create = [OSError('slow down')], store_files.stores.create

  def fail_once(*args):
    if failures:
      raise failures.pop()
    return create(*args)

  monkeypatch.setattr(store_files.stores, 'create', fail_once)
  monkeypatch.setattr(store_files, '_MIRROR_PERIOD_S', 0.05)
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  for host, asked in (('a', None), ('b', str(store / 'compiled' / secret_name('compiled', store)))):
    updates = {DIR: None}
    monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / host))
    Command(flags=SimpleNamespace(compilation_cache=asked, job_log_dir=store))._set_compilation_cache(store)
    copies = Path(updates[DIR])
    assert copies.is_relative_to(tmp_path / host)
    if host == 'a':
      (copies / 'jit_step-1-cache').write_bytes(b'program')
      end = time.monotonic() + 20
      while not glob_below(store, 'compiled/*/*') and time.monotonic() < end:
        time.sleep(0.05)
  assert [(path.name, path.read_bytes()) for path in copies.iterdir()] == [('jit_step-1-cache', b'program')]
