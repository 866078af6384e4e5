"""Starting a run again from its saved config, and starting the same run with another config."""

import json

from spmd_tasks import exit_codes
from spmd_tasks.runtime.compilation import CompilationCounter
from tests import binary
from tests.programs.small_runs import train


def test_a_run_starts_again_from_its_saved_config(tmp_path):
  # Fields of the experiment, of its task and of its input.
  overrides = ('--set', 'task.learner.optimizer.learning_rate=0.02', '--set', 'train_input.text.noise=0.3')
  settings = ('--num_train_steps', 5, '--seed', 3, *overrides)
  assert train(tmp_path / 'first', *settings) == exit_codes.OK
  saved = tmp_path / 'first' / 'config.json'
  flags = ('--config', saved, '--mode', 'train', '--job_log_dir', tmp_path / 'second')
  assert binary.run_in_process(*flags) == exit_codes.OK
  for name in ('loss', 'grad_norm', 'weight_norm'):
    first, second = (binary.column(tmp_path / run, name) for run in ('first', 'second'))
    assert len(first) == 5
    assert first == second
  first, second = (json.loads((tmp_path / run / 'config.json').read_text()) for run in ('first', 'second'))
  assert first.pop('signature') != second.pop('signature')  # each of its directory
  assert first == second


def test_other_settings_are_refused_and_can_be_accepted(tmp_path, capsys):
  directory = tmp_path / 'job'
  assert train(directory, '--num_train_steps', 2) == exit_codes.OK
  before = binary.snapshot(directory)
  rate, noise = 'task.learner.optimizer.learning_rate=0.02', 'train_input.text.noise=0.2'
  changed = ('--num_train_steps', 4, '--set', rate, '--set', noise)
  capsys.readouterr()
  assert train(directory, *changed) == exit_codes.USAGE
  message = capsys.readouterr().err
  assert message.startswith(f"spmd-tasks: job_log_dir '{directory}' was begun with another config:\n")
  assert '\n  task.learner.optimizer.learning_rate: 0.01 -> 0.02\n' in message
  assert '\n  train_input.text.noise: 0.1 -> 0.2\n' in message
  assert '--accept_config_changes' in message
  assert 'num_train_steps' not in message  # which may change
  assert binary.snapshot(directory) == before

  # The input refuses other noise by itself: going on would not be the same text. The saved config stays what it was.
  assert train(directory, *changed, '--accept_config_changes') == exit_codes.USAGE
  assert 'the saved input state has noise = 0.1' in capsys.readouterr().err
  after = binary.snapshot(directory)
  assert [path for path in after if after[path] != before.get(path)] == [str(directory / 'job.lock')]

  assert train(directory, *changed[:4], '--accept_config_changes') == exit_codes.OK
  assert list(binary.column(directory, 'loss')) == [1, 2, 3, 4]
  assert json.loads((directory / 'config.json').read_text())['config']['task.learner.optimizer.learning_rate'] == 0.02


def test_what_changes_no_number_may_change(finished_job, tmp_path):
  """More steps, other intervals."""
  directory = tmp_path / 'job'
  assert train(directory, '--num_train_steps', 2) == exit_codes.OK
  free = ('checkpoint_every=3', 'eval_every_steps=None', 'prefetch_batches=1', 'step_timeout_s=99')
  overrides = [flag for each in free for flag in ('--set', each)]
  with CompilationCounter() as compilations:
    assert train(directory, '--num_train_steps', 5, *overrides) == exit_codes.OK
  assert compilations.num_programs <= 1  # the steps are those of the job before (tests/shared_models.py)
  expected = binary.column(finished_job, 'loss')
  assert binary.column(directory, 'loss') == {step: expected[step] for step in range(1, 6)}
  assert binary.checkpoint_names(directory) == [f'checkpoint_{step:08d}' for step in (2, 3, 5)]
