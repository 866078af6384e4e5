"""Compiled programs are cached in the directory that the user chooses, by default the job's."""

import contextlib
import functools
import json
import operator
import os
from pathlib import Path
import re
import shutil
import time
from types import SimpleNamespace

from etils import epath
import jax
import pytest

from spmd_tasks import store_files
from spmd_tasks.command import Command
from spmd_tasks.files import glob_below
from spmd_tasks.programs import job_directory
from spmd_tasks.programs.compiled_programs import programs_directory
from spmd_tasks.runtime.program_cache import compile_program
from spmd_tasks.signatures import secret_name
from tests import binary, xla_settings
from tests.store_fixtures import one_kind_of_store

DIR, ENABLED = 'jax_compilation_cache_dir', 'jax_enable_compilation_cache'


def set_cache(flags, directory, job=None):
  with contextlib.ExitStack() as stack:
    Command(flags=flags)._set_compilation_cache(directory, stack if job is None else job)


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
  set_cache(flags, epath.Path(tmp_path / 'job'))
  directory = directory and directory.replace('NAME', secret_name('compiled', tmp_path / 'job'))
  assert updates == {DIR: directory and str(tmp_path / directory), ENABLED: enabled}


def test_a_read_only_directory_is_not_used(tmp_path, monkeypatch):
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**{DIR: None}, update=None))
  set_cache(SimpleNamespace(compilation_cache=None, job_log_dir=tmp_path), epath.Path(tmp_path))


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


def test_a_job_says_why_its_programs_were_not_in_the_cache(tmp_path, monkeypatch):
  monkeypatch.delenv('SPMD_TASKS_QUIET', raising=False)
  flags = ['--exp', 'tests.programs.own_experiments.Regression', '--ici_mesh_shape', '1,1,1', '--num_train_steps', '1']
  flags += ['--mode', 'train', '--compilation_cache', tmp_path / 'programs']

  def lines(job, *more):
    done = binary.run_binary(*flags, '--job_log_dir', tmp_path / job, *more)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.partition(' the train step: ')[2] for line in done.stderr.splitlines() if ' the train step: ' in line]

  (first,) = lines('first')
  assert 'the compilation cache has none of this name' in first
  assert any('train_step' in path.name for path in (tmp_path / 'programs').iterdir())
  (second,) = lines('second')
  assert second.startswith('read from the compilation cache in ')
  (third,) = lines('third', '--set', 'train_input.batch_size=16')
  assert 'has it with other arguments or operations (' in third
  assert re.search(r"\['x'\] float32\[\d+, .* here .*\['x'\] float32\[16, ", third), third
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'] + ' --xla_cpu_enable_fast_math=true')
  (fourth,) = lines('fourth')
  assert 'other XLA flags (none; here --xla_cpu_enable_fast_math=true)' in fourth


def test_programs_are_compiled_if_their_records_cannot_be_written(tmp_path, monkeypatch, caplog):
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr('jax._src.compilation_cache.put_executable_and_time', lambda *args: None)
  jax.config.update(DIR, str(tmp_path / 'file'))
  try:
    for number in range(2):
      compiled = compile_program(jax.jit(functools.partial(operator.add, number)).lower(1), 'the sum')
      assert compiled(1) == 1 + number
  finally:
    jax.config.update(DIR, xla_settings.ENVIRONMENT['JAX_COMPILATION_CACHE_DIR'])
  assert len(caplog.records) == 1
  assert 'cannot be read or recorded there' in caplog.text


def test_a_cache_in_a_store_is_downloaded_and_new_programs_are_uploaded(store, tmp_path, monkeypatch):
  failures, create = [OSError('slow down')], store_files.stores.create

  def fail_once(*args):
    if failures:
      raise failures.pop()
    return create(*args)

  monkeypatch.setattr(store_files.stores, 'create', fail_once)
  monkeypatch.setattr(store_files, '_MIRROR_PERIOD_S', 0.05)
  monkeypatch.setattr('spmd_tasks.command.jax.default_backend', lambda: 'gpu')
  programs = store / 'compiled' / secret_name('compiled', store)
  for host, asked in (('a', None), ('b', str(programs))):
    updates = {DIR: None}
    monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / host))
    with contextlib.ExitStack() as job:
      set_cache(SimpleNamespace(compilation_cache=asked, job_log_dir=store), store, job)
      copies = Path(updates[DIR])
      assert copies.is_relative_to(tmp_path / host)
      if host == 'a':
        (copies / 'a_folder').mkdir()  # as XLA for GPUs makes one
        (copies / 'jit_step-1-cache').write_bytes(b'program')
        end = time.monotonic() + 20
        while not glob_below(store, 'compiled/*/*') and time.monotonic() < end:
          time.sleep(0.05)
        monkeypatch.setattr(store_files, '_MIRROR_PERIOD_S', 60.0)
        (copies / 'jit_last-1-cache').write_bytes(b'last')  # uploaded when the job ends
  found = {path.name: path.read_bytes() for path in copies.iterdir()}
  assert found == {'jit_step-1-cache': b'program', 'jit_last-1-cache': b'last'}

  with store_files.mirror(programs, uploads=False) as copies:  # a process that does not write
    (copies / 'jit_own-1-cache').write_bytes(b'own')
  with store_files.mirror(programs, uploads=False) as copies:
    assert {path.name for path in copies.iterdir()} == set(found)


@one_kind_of_store
def test_a_store_that_cannot_be_read_is_a_warning(store, tmp_path, monkeypatch, caplog):
  def refuse(url):
    raise PermissionError(f'403 {url}')

  monkeypatch.setattr(store_files.stores, 'local_copies', refuse)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  updates = {DIR: None}
  monkeypatch.setattr('spmd_tasks.command.jax.config', SimpleNamespace(**updates, update=updates.__setitem__))
  set_cache(SimpleNamespace(compilation_cache=str(store / 'programs'), job_log_dir=store), store)
  assert Path(updates[DIR]).is_relative_to(tmp_path)  # JAX keeps programs there
  assert caplog.text.count(f'{store}/programs cannot be read') == 1
