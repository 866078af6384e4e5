"""Batches that make the loss nan or inf are skipped without a trace in the state, counted, and end a job at last.

A spike is a loss weight, or a token outside the vocabulary of 259, which is padded to 260 on the mesh.

The comparison is the finished job, whose input lacks these batches and is the same otherwise.
"""

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.programs import small_runs
from tests.programs.small_runs import assert_same_arrays, saved_arrays

# Position in the input -> loss weight. Steps 4 and 12 are due for a checkpoint when the first try of each is skipped;
# position 7 and 8 are two in a row; 1e38 is finite, but not its sum.
SPIKES = {0: 'nan', 4: 'inf', 7: 'nan', 8: '-inf', 15: '1e38', 17: 'ids=-1', 18: 'ids=259', 20: 'labels=-1'}
SPIKES |= {22: 'labels=259'}
# Steps finished -> steps skipped until then.
EXPECTED_SKIPS = [1] * 3 + [2] * 2 + [4] * 6 + [5] + [7] + [8] + [9] * 6
NUM_STEPS = 20


def train(directory, spikes, *flags) -> int:
  text = '{' + ', '.join(f'"{position}": "{weight}"' for position, weight in spikes.items()) + '}'
  return small_runs.train(directory, '--set', f'train_input.spikes={text}', *flags)


@pytest.fixture(scope='module')
def spiked_job(tmp_path_factory):
  directory = tmp_path_factory.mktemp('spiked') / 'job'
  assert train(directory, SPIKES) == exit_codes.OK
  return directory


def test_the_curve_is_that_without_the_broken_batches(spiked_job, finished_job):
  expected = {line['step']: line for line in binary.metric_lines(finished_job)}
  lines = binary.metric_lines(spiked_job)
  assert [line['step'] for line in lines] == list(range(1, NUM_STEPS + 1))
  for line in lines:
    for name in ('loss', 'grad_norm', 'weight_norm', 'learning_rate'):
      assert line[name] == expected[line['step']][name], (name, line['step'])


def test_weights_moments_and_averages_are_bit_equal(spiked_job, finished_job):
  for step in (4, 8, 12, NUM_STEPS):
    spiked, finished = saved_arrays(spiked_job, step), saved_arrays(finished_job, step)
    assert int(spiked.learner.num_skipped) == EXPECTED_SKIPS[step - 1]
    assert int(finished.learner.num_skipped) == 0
    without_count = spiked.replace(learner=spiked.learner.replace(num_skipped=finished.learner.num_skipped))
    assert_same_arrays(without_count, finished)


def test_skipped_steps_are_counted(spiked_job):
  assert list(binary.column(spiked_job, 'num_skipped_steps').values()) == EXPECTED_SKIPS


def test_the_job_stops_after_n_in_a_row(finished_job, tmp_path, capfd):
  directory = tmp_path / 'job'
  spikes = {5: 'nan', 6: 'nan'} | dict.fromkeys(range(8, 18), 'inf')  # two, one good one, ten
  assert train(directory, spikes) == exit_codes.FAILED == 1
  shown = capfd.readouterr().err
  (message,) = [line for line in shown.splitlines() if line.startswith('spmd-tasks: ')]
  assert '10 steps in a row had a loss or gradient that is not finite' in message
  assert 'The weights are those of step 6, still good' in message
  assert 'Lower the learning rate' in message
  assert 'Traceback' not in shown
  assert len([line for line in shown.splitlines() if 'skipped an update after step' in line]) == 12
  assert [line['step'] for line in binary.metric_lines(directory)] == [1, 2, 3, 4, 5, 6]

  # What is on disk is good: two skips are in it, and not the ten that ended the job.
  saved = saved_arrays(directory, 6)
  assert int(saved.learner.num_skipped) == 2
  finished = saved_arrays(finished_job, 6)
  assert_same_arrays(saved.weights, finished.weights)
  assert_same_arrays(saved.learner.opt_state, finished.learner.opt_state)


def test_the_count_goes_on_after_a_restart(tmp_path):
  directory = tmp_path / 'job'
  for num_steps in (4, 6):
    assert train(directory, {3: 'nan'}, '--num_train_steps', num_steps) == exit_codes.OK
  assert list(binary.column(directory, 'num_skipped_steps').values()) == [0, 0, 0, 1, 1, 1]


def test_finite_spikes_are_the_same_after_a_restart(tmp_path, capfd):
  """With a threshold of one standard deviation some steps are spikes, before the restart and soon after it."""
  flags = '--set', 'task.learner.spike_threshold=1', '--set', 'task.learner.spike_window=8'
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert train(whole, {}, *flags) == exit_codes.OK
  shown = capfd.readouterr().err
  for num_steps in (8, NUM_STEPS):
    assert train(parts, {}, *flags, '--num_train_steps', num_steps) == exit_codes.OK
  for name in ('loss', 'grad_norm', 'weight_norm', 'num_skipped_steps'):
    assert binary.column(parts, name) == binary.column(whole, name)
  num_skipped = list(binary.column(whole, 'num_skipped_steps').values())
  assert 0 < num_skipped[7] < num_skipped[-1]
  message = f', a spike; weights and optimizer are unchanged. `--mode replay --job_log_dir {whole} --step'
  assert shown.count(message) == num_skipped[-1]
