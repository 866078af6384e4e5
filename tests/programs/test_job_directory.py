"""A job_log_dir belongs to one experiment and to one running job at a time."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.programs import job_directory
from spmd_tasks.programs.job_directory import claim
from tests import binary

CLAIM_AND_WAIT = """
import sys, time
from spmd_tasks.programs.job_directory import claim
job = claim(sys.argv[1], experiment_name='lm.A')
print('claimed', flush=True)
time.sleep(60)
"""

CLAIM_WITHOUT_RIGHTS = """
import os, sys
from spmd_tasks.programs.job_directory import claim
if os.getuid() == 0:
  os.setuid(65534)
try:
  claim(sys.argv[1], experiment_name='lm.A')
except ValueError as error:
  print(error)
"""


def contents(path: pathlib.Path) -> dict[str, bytes]:
  return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob('*') if file.is_file()}


def claim_and_begin(directory: pathlib.Path, experiment_name: str) -> None:
  """As a job that has restored or initialized its state."""
  with claim(directory, experiment_name=experiment_name) as job:
    job_directory.write_config(job.path, json.dumps({'experiment': experiment_name}))


@pytest.mark.parametrize('is_there', [True, False])
def test_a_new_job_that_is_refused_leaves_nothing_and_what_was_there_stays(tmp_path, is_there):
  directory = tmp_path / 'a' / 'b[1]'
  if is_there:
    (directory / 'samples').mkdir(parents=True)
    (directory / 'log.txt').write_text('of a shell')
  before = contents(tmp_path)

  def run(error):
    with contextlib.suppress(type(error)), claim(directory, experiment_name='lm.A'):
      (directory / 'checkpoints' / 'x').mkdir(parents=True, exist_ok=True)
      (directory / 'metrics.jsonl').write_text('')
      (directory / 'trackers.json').write_text('{}')
      if not isinstance(error, UserError):
        job_directory.write_config(directory, '{"experiment": "lm.A"}')
      raise error

  run(UserError('no such origin'))
  assert contents(tmp_path) == before
  assert (tmp_path / 'a').exists() == is_there
  run(RuntimeError('a bug'))
  assert (directory / 'metrics.jsonl').exists()
  run(UserError('the job has been here before'))
  assert (directory / 'metrics.jsonl').exists()


@pytest.mark.parametrize('kind', ['deleted', 'a link to nothing'])
def test_a_job_with_checkpoints_but_without_its_config_is_not_resumed(tmp_path, kind, capsys):
  flags = ('--exp', 'tests.programs.own_experiments.Regression', '--ici_mesh_shape', '1,8,1')
  flags += ('--job_log_dir', tmp_path, '--num_train_steps')
  config = tmp_path / 'config.json'
  assert binary.run_in_process('--mode', 'train', *flags, 1) == exit_codes.OK
  config.unlink()
  if kind == 'a link to nothing':
    config.symlink_to(tmp_path / 'nothing')
  before = contents(tmp_path)
  for mode in ('train', 'eval'):
    capsys.readouterr()
    assert binary.run_in_process('--mode', mode, *flags, 2) == exit_codes.USAGE
    message = capsys.readouterr().err
    assert f'{config} is {"missing" if kind == "deleted" else kind}, but there is' in message
    assert message.count('\n') == 1
  assert contents(tmp_path) == before
  assert binary.run_in_process('--mode', 'train', *flags, 2, '--accept_config_changes') == exit_codes.OK
  assert config.is_file()
  assert not config.is_symlink()
  config.write_text('{"experiment": ')
  capsys.readouterr()
  for command, remedy in (
    (flags[2:-1], 'Put the original back, or name the experiment: --exp NAME.'),
    ((*flags, 2), 'put the original back, or remove it and resume with the settings of this command:'),
  ):
    assert binary.run_in_process('--mode', 'train', *command) == exit_codes.USAGE
    assert remedy in capsys.readouterr().err


def test_another_experiment_is_refused_and_nothing_is_written(tmp_path):
  claim_and_begin(tmp_path, 'lm.A')
  before = contents(tmp_path)
  with pytest.raises(ValueError, match=r"'lm\.A', not to 'lm\.B': choose another job_log_dir"):
    claim(tmp_path, experiment_name='lm.B')
  assert contents(tmp_path) == before


def test_a_second_running_job_is_refused_by_name_and_nothing_is_written(tmp_path):
  with claim(tmp_path, experiment_name='lm.A'):
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf'in use by another running job \(host .*, pid {os.getpid()}, since 20'):
      claim(tmp_path, experiment_name='lm.A')
    assert contents(tmp_path) == before
  claim(tmp_path, experiment_name='lm.A').lock.release()


def test_kill_9_releases_the_lock(tmp_path):
  process = binary.start_process(['-c', CLAIM_AND_WAIT, tmp_path], stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  assert process.stdout.readline() == 'claimed\n'
  with pytest.raises(ValueError, match=f'pid {process.pid}'):
    claim(tmp_path, experiment_name='lm.A')
  process.send_signal(signal.SIGKILL)
  process.communicate()
  claim(tmp_path, experiment_name='lm.A').lock.release()


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir])
@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl', 'eval/valid/metrics.jsonl'])
def test_something_else_in_place_of_a_file_is_refused_at_once(tmp_path, make, name):
  path = tmp_path / name
  path.parent.mkdir(parents=True, exist_ok=True)
  make(path)
  with pytest.raises(ValueError, match=f'{name}. is not a file.*move it away'):
    claim(tmp_path, experiment_name='lm.A')


@pytest.mark.parametrize('make', [os.mkfifo])
@pytest.mark.parametrize('name', ['checkpoints', 'ranks'])
def test_something_else_in_place_of_a_directory_is_refused_at_once(tmp_path, make, name):
  make(tmp_path / name)
  with pytest.raises(ValueError, match=f'{name}. is not a directory.*move it away'):
    claim(tmp_path, experiment_name='lm.A')


@pytest.mark.parametrize('below', ['', 'job'])
def test_a_directory_without_write_permission_is_refused(below):
  with tempfile.TemporaryDirectory() as directory:  # tmp_path's parents are closed to other users
    os.chmod(directory, 0o555)
    argv = ['-c', CLAIM_WITHOUT_RIGHTS, os.path.join(directory, below)]
    streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    result = binary.finish(binary.start_process(argv, text=True, **streams))
    assert 'cannot be used: Permission denied' in result.stdout, result.stderr
    assert 'Choose a directory' in result.stdout
    assert os.listdir(directory) == []


@pytest.mark.parametrize('text', [b'', b'{"name": 1}', b'[' * 100_000])
def test_a_config_that_names_no_experiment_is_refused(tmp_path, text):
  (tmp_path / 'config.json').write_bytes(text)
  with pytest.raises(ValueError, match='does not say which experiment'):
    claim(tmp_path, experiment_name='lm.A')


# --- links ---


@pytest.mark.parametrize('name', ['job.lock', 'metrics.jsonl', 'eval/valid/metrics.jsonl', 'eval', 'checkpoints'])
@pytest.mark.parametrize('is_there', [True, False])
def test_a_link_in_place_of_what_a_job_writes_is_refused_and_its_target_stays(tmp_path, name, is_there):
  other, directory = tmp_path / 'other', tmp_path / 'job'
  is_directory = name in ('eval', 'checkpoints')
  claim_and_begin(other, 'lm.Other')
  target = other / name
  if is_there:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir() if is_directory else target.write_text('precious')
  (directory / name).parent.mkdir(parents=True)
  (directory / name).symlink_to(target)
  before = contents(tmp_path)
  with pytest.raises(UserError, match=f'{name}. is a symbolic link to .*other/{name}.*put a (file|directory) in its'):
    claim(directory, experiment_name='lm.A')
  assert contents(tmp_path) == before


def test_the_directory_and_its_checkpoints_may_be_on_other_disks(tmp_path):
  for name in ('job', 'large_disk'):
    (tmp_path / name).mkdir()
  (tmp_path / 'job' / 'checkpoints').symlink_to(tmp_path / 'large_disk')
  (tmp_path / 'link').symlink_to(tmp_path / 'job')
  claim_and_begin(tmp_path / 'link', 'lm.A')
  assert (tmp_path / 'job' / 'job.lock').is_file()


def test_a_copy_by_hard_links_has_a_lock_of_its_own(tmp_path):
  original, copy = tmp_path / 'original', tmp_path / 'copy'

  def link_all():
    copy.mkdir(exist_ok=True)
    for path in original.iterdir():
      (copy / path.name).unlink(missing_ok=True)
      os.link(path, copy / path.name)

  with claim(original, experiment_name='lm.A') as job:
    job_directory.write_config(job.path, json.dumps({'experiment': 'lm.A'}))
    link_all()
    with pytest.raises(UserError, match=r'a copy of, remove .*copy/job\.lock'):
      claim(copy, experiment_name='lm.A')
  before = contents(original)
  with claim(copy, experiment_name='lm.A'):
    assert contents(original) == before
    claim(original, experiment_name='lm.A').lock.release()
  link_all()
  with claim(original, experiment_name='lm.A'):
    claim(copy, experiment_name='lm.A').lock.release()
