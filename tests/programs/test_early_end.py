"""Jobs that an experiment ends early: saved and ended like finished ones, the same after a kill in the eval.

And which values end a job.
"""

import json
import shutil

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.programs.hooks import EvalTarget, StepReport
from tests import binary
from tests.programs.small_jobs import Small

UNTIL_TARGET = f'{__name__}.UntilTarget'


class UntilTarget(Small):
  """Ends at step 8, its first eval."""

  def hooks(self):
    return [EvalTarget(eval_set='valid', at_most=100.0)]


@pytest.fixture(scope='module')
def ended_job(tmp_path_factory):
  """UntilTarget, ended at step 8."""
  directory = tmp_path_factory.mktemp('ended') / 'job'
  assert binary.run_in_process('--exp', UNTIL_TARGET, '--mode', 'train', '--job_log_dir', directory) == exit_codes.OK
  return directory


def last_step(directory):
  return binary.metric_lines(directory)[-1]['step']


def test_a_job_ends_by_its_eval_with_everything_saved(ended_job, finished_job):
  assert last_step(ended_job) == 8
  assert binary.checkpoint_names(ended_job)[-1] == 'checkpoint_00000008'
  assert binary.column(ended_job, 'loss') == dict(list(binary.column(finished_job, 'loss').items())[:8])
  assert [line['step'] for line in binary.metric_lines(ended_job / 'eval' / 'valid')] == [8]
  assert json.loads((ended_job / 'newest_checkpoint.json').read_text()) == {'step': 8, 'is_last': True}
  assert json.loads((ended_job / 'goodput.json').read_text())['has_ended']


def test_a_job_that_was_killed_in_the_deciding_eval_ends_where_it_would_have_ended(ended_job, tmp_path, capfd):
  job = shutil.copytree(ended_job, tmp_path / 'job')
  (job / 'newest_checkpoint.json').write_text('{"step": 8}\n')
  shutil.rmtree(job / 'eval' / 'ragged')
  assert binary.run_in_process('--mode', 'train', '--job_log_dir', job) == exit_codes.OK
  assert 'Ended after step 8 of 20' in capfd.readouterr().err
  assert last_step(job) == 8


def test_a_target_without_evals_is_refused(tmp_path, capfd):
  flags = ('--exp', UNTIL_TARGET, '--mode', 'train', '--job_log_dir', tmp_path / 'job')
  assert binary.run_in_process(*flags, '--set', 'eval_every_steps=None') == exit_codes.USAGE
  assert 'asked after evals, but eval_every_steps is None' in capfd.readouterr().err
  assert not (tmp_path / 'job').exists()


EVALS = {'valid': {'loss': 2.0, 'accuracy': 0.5, 'z_loss': float('nan'), 'expert_load': [0.5, 0.5]}}


def reason(target):
  return target.reason(StepReport(step=8, metrics={}, evals=EVALS, eval_seconds=1.0))


@pytest.mark.parametrize(
  'metric, limits, expected',
  [
    ('loss', {'at_most': 2.0}, 'loss of valid is 2, at most 2'),
    ('loss', {'at_most': 1.9}, None),
    ('accuracy', {'at_least': 0.4}, 'accuracy of valid is 0.5, at least 0.4'),
    ('accuracy', {'at_least': 0.6}, None),
    ('z_loss', {'at_most': 2.0}, None),
    ('z_loss', {'at_least': 2.0}, None),
  ],
)
def test_a_job_ends_where_the_limit_is_reached(metric, limits, expected):
  assert reason(EvalTarget(eval_set='valid', metric=metric, **limits)) == expected


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'eval_set': 'valid'}, 'give one of them'),
    ({'eval_set': 'test', 'at_most': 1.0}, r'not an eval set: choose one of valid'),
    ({'eval_set': 'valid', 'metric': 'bleu', 'at_least': 1.0}, 'choose one of .*z_loss'),
  ],
)
def test_mistakes_are_named(settings, words):
  with pytest.raises(UserError, match=words):
    reason(EvalTarget(**settings))
