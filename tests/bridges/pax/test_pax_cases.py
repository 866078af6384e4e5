"""Pax experiments of many kinds (tests/data/pax_cases) have the losses and evals of Paxml.

Some end early by their `early_stopping_fn`, or have no training dataset. The results of Paxml 1.4.0 on jax 0.10.2 are
in tests/data/pax_cases/paxml_losses.json.
"""

import json

import numpy as np
import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.bridges.pax.conftest import PAX_EXPERIMENTS

EXPECTED = json.loads((PAX_EXPERIMENTS / 'pax_cases' / 'paxml_losses.json').read_text())
# Combines many features of the other cases.
ALWAYS = ('pipelines.PipelinedStreams',)
FOUR = ('--num_fake_devices', 4)
FLAGS = ('--mode', 'train', '--eval_on_test', '--set', 'log_every_steps=1', '--set', 'trackers=()')

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  'name',
  [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, expected in EXPECTED.items()
    if 'error' not in expected
  ],
)
def test_losses_and_evals_equal_paxml(run_pax, name, tmp_path):
  finished = run_pax('--exp', f'pax_cases.{name}', *FLAGS, '--job_log_dir', tmp_path, *FOUR)
  assert finished.returncode == 0, finished.stderr
  expected = EXPECTED[name]
  np.testing.assert_allclose(list(binary.column(tmp_path, 'loss').values()), expected['losses'], rtol=1e-6)
  for dataset, losses in expected['evals'].items():
    lines = {line['step']: line for line in binary.metric_lines(tmp_path / 'eval' / dataset)}
    ours = [lines[int(step)].get('total_loss', lines[int(step)]['loss']) for step in losses]
    np.testing.assert_allclose(ours, list(losses.values()), rtol=1e-6)


# --- experiments that end early, or only evaluate ---


def calls(directory):
  """Returns the calls of early_stopping_fn: arguments, metrics that do not depend on the clock, and all metrics."""
  return list(map(split_metrics, (directory / 'asked.jsonl').read_text().splitlines()))


def split_metrics(line):
  arguments = json.loads(line) if isinstance(line, str) else dict(line)
  metrics = arguments.pop('metrics')
  without_times = {name: value for name, value in metrics.items() if 'eval_test' in name or name == 'num_params'}
  return arguments, without_times, metrics


@pytest.fixture(scope='module')
def ended_runs(run_pax_together, tmp_path_factory):
  """Runs UntilTarget, whose second eval ends it at step 4, and EvalOnly; returns the directory and the last stderr.

  On three devices, for which most sizes are padded.
  """
  directory = tmp_path_factory.mktemp('ended')
  flags = ('--job_log_dir', directory, '--num_fake_devices', 3, '--set', 'ici_mesh_shape=1,1,3')
  eval_only = ('--exp', 'pax_cases.ending.EvalOnly', '--mode', 'eval', '--accept_config_changes', *flags)
  (code, stderr), (eval_code, eval_stderr) = run_pax_together(
    ('--exp', 'pax_cases.ending.UntilTarget', *FLAGS, *flags), eval_only
  )
  assert code == eval_code == exit_codes.OK, stderr + eval_stderr
  assert 'Ended after step 4 of 7: task.early_stopping_fn, StopsAt, returned True.' in stderr
  return directory, eval_stderr


def check_calls(directory, case):
  ours, theirs = calls(directory), list(map(split_metrics, EXPECTED[case]['asked']))
  assert len(ours) == len(theirs)
  for our_call, their_call in zip(ours, theirs, strict=True):
    arguments, metrics, all_metrics = our_call
    their_arguments, their_metrics, all_their_metrics = their_call
    assert arguments == their_arguments
    assert set(all_metrics) >= set(all_their_metrics)
    assert {name: metrics[name] for name in their_metrics} == pytest.approx(their_metrics, rel=1e-6)


def test_early_stopping_fn_is_called_as_by_paxml(ended_runs):
  ended_job, _ = ended_runs
  check_calls(ended_job, 'ending.UntilTarget')
  assert len(binary.metric_lines(ended_job)) == 4
  assert binary.checkpoint_names(ended_job) == ['checkpoint_00000004']


@pytest.mark.exhaustive
@pytest.mark.parametrize('name, num_steps', [('UntilStep', 3), ('ToTheEnd', 7)])
def test_early_stopping_between_evals_and_at_the_end(run_pax, tmp_path, name, num_steps):
  finished = run_pax('--exp', f'pax_cases.ending.{name}', *FLAGS, '--job_log_dir', tmp_path, *FOUR)
  assert finished.returncode == exit_codes.OK, finished.stderr
  check_calls(tmp_path, f'ending.{name}')
  assert len(binary.metric_lines(tmp_path)) == num_steps


def test_an_experiment_without_a_training_dataset_evaluates(ended_runs):
  directory, stderr = ended_runs
  recorded = next(line for line in binary.metric_lines(directory / 'eval' / 'valid') if line['step'] == 4)
  assert f'loss {recorded["loss"]:.4f}' in stderr
