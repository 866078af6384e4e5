"""Pax experiments that a function of theirs ends early, as in Paxml, and experiments without a training dataset."""

import json

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.bridges.pax.test_pax_cases import EXPECTED, FLAGS

FAKE = ('--num_fake_devices', 4)

pytestmark = pytest.mark.slow


def calls(directory):
  """What the function was asked: names of metrics, and what does not depend on the clock."""
  return list(map(clock_free, (directory / 'asked.jsonl').read_text().splitlines()))


def clock_free(line):
  asked = json.loads(line) if isinstance(line, str) else dict(line)
  metrics = asked.pop('metrics')
  return asked, {name: value for name, value in metrics.items() if 'eval_test' in name or name == 'num_params'}, metrics


@pytest.fixture(scope='module')
def ended_job(run_pax, tmp_path_factory):
  """UntilTarget, ended at step 4 by its second eval."""
  directory = tmp_path_factory.mktemp('ended')
  finished = run_pax('--exp', 'pax_cases.ending.UntilTarget', *FLAGS, '--job_log_dir', directory, *FAKE)
  assert finished.returncode == exit_codes.OK, finished.stderr
  assert 'Ended after step 4 of 7: task.early_stopping_fn, StopsAt, says so.' in finished.stderr
  return directory


def check_calls(directory, case):
  ours, theirs = calls(directory), list(map(clock_free, EXPECTED[case]['asked']))
  assert len(ours) == len(theirs)
  for (asked, metrics, named), (asked_there, metrics_there, named_there) in zip(ours, theirs, strict=True):
    assert asked == asked_there
    assert set(named) >= set(named_there)
    assert {name: metrics[name] for name in metrics_there} == pytest.approx(metrics_there, rel=1e-6)


def test_the_function_is_asked_what_paxml_asks_it(ended_job):
  check_calls(ended_job, 'ending.UntilTarget')
  assert len(binary.metric_lines(ended_job)) == 4
  assert binary.checkpoint_names(ended_job) == ['checkpoint_00000004']


@pytest.mark.exhaustive
@pytest.mark.parametrize('name, num_steps', [('UntilStep', 3), ('ToTheEnd', 7)])
def test_between_evals_and_at_the_end(run_pax, tmp_path, name, num_steps):
  finished = run_pax('--exp', f'pax_cases.ending.{name}', *FLAGS, '--job_log_dir', tmp_path, *FAKE)
  assert finished.returncode == exit_codes.OK, finished.stderr
  check_calls(tmp_path, f'ending.{name}')
  assert len(binary.metric_lines(tmp_path)) == num_steps


def test_an_experiment_without_a_training_dataset_evaluates(ended_job, run_pax):
  flags = ('--mode', 'eval', '--accept_config_changes', '--job_log_dir', ended_job, *FAKE)
  finished = run_pax('--exp', 'pax_cases.ending.EvalOnly', *flags)
  assert finished.returncode == exit_codes.OK, finished.stderr
  recorded = binary.metric_lines(ended_job / 'eval' / 'valid')[-1]['loss']
  assert f'loss {recorded:.4f}' in finished.stderr
