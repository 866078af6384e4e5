"""A job whose checkpoints are gone stops with the reason; it begins again only if told to, and then loses nothing."""

import json
from pathlib import Path
import re
import shutil

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import train

RECORD = 'newest_checkpoint.json'


@pytest.fixture
def lost_job(finished_job, tmp_path):
  """A finished job without its checkpoints."""
  return Path(shutil.copytree(finished_job, tmp_path / 'job', ignore=shutil.ignore_patterns('checkpoints')))


def link_to_mount_point(directory):
  (directory / 'not mounted').mkdir()
  (directory / 'checkpoints').symlink_to(directory / 'not mounted')


def only_partial(directory):
  for step in (18, 20):
    (directory / 'checkpoints' / f'checkpoint_{step:08d}.partial' / 'state').mkdir(parents=True)


LOSSES = {
  'a link to an empty mount point': (link_to_mount_point, 'holds no complete checkpoint, but .*step 20'),
  'all partial': (only_partial, 'holds no complete checkpoint, but .*step 20'),
  'a record that is damaged': (lambda directory: (directory / RECORD).write_bytes(b'\0\0'), r'json, .* is damaged'),
}


@pytest.mark.parametrize('loss', LOSSES)
def test_a_job_whose_checkpoints_are_gone_stops_and_changes_nothing(lost_job, loss, capfd):
  lose, reason = LOSSES[loss]
  lose(lost_job)
  before = binary.snapshot(lost_job)
  for _ in range(2):
    assert train(lost_job, '--num_train_steps', 40) == exit_codes.USAGE
  sentence = capfd.readouterr().err.splitlines()[-1]
  assert sentence.startswith(f'spmd-tasks: {lost_job}/checkpoints ')
  assert re.search(reason, sentence)
  assert 'start in another --job_log_dir' in sentence
  after = binary.snapshot(lost_job)
  assert {path for path in after if after[path] != before.get(path)} <= {str(lost_job / 'job.lock'), str(lost_job)}


@pytest.mark.parametrize('mode', ['eval'])
def test_readers_of_lost_checkpoints_say_that_there_were_some(lost_job, mode, capfd):
  assert binary.run_in_process('--exp', SMALL, '--mode', mode, '--job_log_dir', lost_job) == exit_codes.USAGE
  assert 'newest_checkpoint.json says that step 20 was saved' in capfd.readouterr().err


def test_a_job_that_was_ended_before_its_first_save_begins_again(finished_job, tmp_path):
  directory = tmp_path / 'job'
  directory.mkdir()
  lines = (finished_job / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (directory / 'metrics.jsonl').write_text(''.join(lines[:3]))  # the save of step 2 was not complete
  shutil.copy(finished_job / 'config.json', directory)
  (directory / 'checkpoints' / 'checkpoint_00000002.partial').mkdir(parents=True)
  (directory / RECORD).write_text('{"step": 0}\n')
  assert train(directory, '--num_train_steps', 4) == exit_codes.OK
  assert [line['step'] for line in binary.metric_lines(directory)] == [1, 2, 3, 1, 2, 3, 4]
  assert json.loads((directory / RECORD).read_text()) == {'step': 4}
  assert binary.checkpoint_names(directory) == ['checkpoint_00000002', 'checkpoint_00000004']
