"""Compiled programs are kept for the next start where the user says, and by default in the directory of the job."""

import os
from pathlib import Path
import time
from types import SimpleNamespace

from etils import epath
import pytest

from spmd_tasks import store_files
from spmd_tasks.command import Command
from spmd_tasks.files import glob_below
from tests import binary

DIR, ENABLED = 'jax_compilation_cache_dir', 'jax_enable_compilation_cache'


@pytest.mark.parametrize(
  'asked, named, platform, directory, enabled',
  [
    (None, None, 'gpu', 'job/compiled', True),
    (None, None, 'cpu', None, True),
    (None, '/jax', 'gpu', '/jax', True),  # JAX's own variable
    ('mine', '/jax', 'cpu', 'mine', True),
    ('none', '/jax', 'gpu', '/jax', False),
  ],
)
def test_the_flag_comes_first_then_jax_own_variable(asked, named, platform, directory, enabled, tmp_path, monkeypatch):
  updates = {DIR: named, ENABLED: True}
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: platform)
  monkeypatch.chdir(tmp_path)
  flags = SimpleNamespace(compilation_cache=asked, job_log_dir='job')
  Command(flags=flags)._keep_programs(epath.Path(tmp_path / 'job'))
  assert updates == {DIR: directory and str(tmp_path / directory), ENABLED: enabled}


def test_a_directory_that_may_only_be_read_is_left_alone(tmp_path, monkeypatch):
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**{DIR: None}, update=None))
  Command(flags=SimpleNamespace(compilation_cache=None, job_log_dir=tmp_path))._keep_programs(epath.Path(tmp_path))


def test_a_job_keeps_its_programs_where_it_is_told_to(tmp_path):
  flags = ['--exp', 'tests.programs.own_experiments.Regression', '--ici_mesh_shape', '1,1,1', '--num_train_steps', '1']
  flags += ['--mode', 'train', '--job_log_dir', tmp_path / 'job', '--compilation_cache', tmp_path / 'kept']
  done = binary.run_binary(*flags)
  assert done.returncode == 0, done.stderr[-2000:]
  assert any('train_step' in path.name for path in (tmp_path / 'kept').iterdir())


def test_programs_in_a_store_are_copied_here_and_new_ones_there(store, tmp_path, monkeypatch):
  failures, create = [OSError('slow down')], store_files.stores.create

  def fail_once(*given):
    if failures:
      raise failures.pop()
    return create(*given)

  monkeypatch.setattr(store_files.stores, 'create', fail_once)
  monkeypatch.setattr(store_files, '_MIRROR_PERIOD_S', 0.05)
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  for host, asked in (('a', None), ('b', str(store / 'compiled'))):
    updates = {DIR: None}
    monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / host))
    Command(flags=SimpleNamespace(compilation_cache=asked, job_log_dir=store))._keep_programs(store)
    kept = Path(updates[DIR])
    assert kept.is_relative_to(tmp_path / host)
    if host == 'a':
      (kept / 'jit_step-1-cache').write_bytes(b'program')
      end = time.monotonic() + 20
      while not glob_below(store, 'compiled/*') and time.monotonic() < end:
        time.sleep(0.05)
  assert [(path.name, path.read_bytes()) for path in kept.iterdir()] == [('jit_step-1-cache', b'program')]
