"""Restarting a job gives the run that was never disturbed: from any checkpoint, past damaged ones, on another mesh.

A job that was killed right after a checkpoint is made from a finished one by taking its later checkpoints away; real
kills are in test_kills.py. data/e2bba1f/uneven_half is the directory of a real job of version e2bba1f (November 2026),
synthetic.Uneven, stopped at step 10 of 20. Its config.json is not read: the experiment is named.
"""

from pathlib import Path
import shutil

import numpy as np
import pytest

from tests import binary
from tests.programs.small_runs import assert_same_arrays, saved_arrays, train

LAST_STEP = 20
OLD = Path(__file__).parents[1] / 'data' / 'e2bba1f' / 'uneven_half'


def begun_job(finished_job: Path, directory: Path, step: int) -> Path:
  """A copy of the finished job as it was after the checkpoint of `step`."""
  shutil.copytree(finished_job, directory)
  for path in (directory / 'checkpoints').iterdir():
    if path.name > f'checkpoint_{step:08d}':
      shutil.rmtree(path)
  (directory / 'metrics.jsonl').unlink()
  return directory


def assert_same_run(resumed: Path, finished: Path, *, first_step: int) -> None:
  """Every metric of every step from `first_step` on, but for those of speed, and every array at the end."""
  expected = {line['step']: line for line in binary.metric_lines(finished)}
  lines = binary.metric_lines(resumed)
  assert [line['step'] for line in lines] == list(range(first_step, LAST_STEP + 1))
  for line in lines:
    for name in ('loss', 'cross_entropy', 'accuracy', 'grad_norm', 'weight_norm', 'learning_rate', 'loss_weight'):
      assert line[name] == expected[line['step']][name], (name, line['step'])
  assert_same_arrays(saved_arrays(resumed, LAST_STEP), saved_arrays(finished, LAST_STEP))


def test_the_optimizers_state_may_move_to_the_host(finished_job, tmp_path):
  """On an uneven mesh; and back, from the checkpoint that such a job has saved."""
  directory = begun_job(finished_job, tmp_path / 'job', 12)
  changes = ('--accept_config_changes', '--set', 'task.learner.state_on_host=True')
  assert train(directory, *changes, '--num_train_steps', '16') == 0
  assert train(directory, '--accept_config_changes', '--set', 'task.learner.state_on_host=False') == 0
  assert_same_run(directory, finished_job, first_step=13)


def flip_a_byte(checkpoint: Path) -> None:
  """In the largest file below `state`: array data."""
  largest = max((path for path in (checkpoint / 'state').rglob('*') if path.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 0x10
  largest.write_bytes(data)


def test_a_finished_job_does_nothing(finished_job, tmp_path, capsys):
  directory = begun_job(finished_job, tmp_path / 'job', LAST_STEP)
  before = binary.checkpoint_names(directory)
  config = (directory / 'config.json').read_bytes()
  assert train(directory, '--ici_mesh_shape', '1,8,1') == 0
  assert 'step 20 of 20 is already saved' in capsys.readouterr().err
  assert (directory / 'config.json').read_bytes() == config  # the settings of its last steps, which a replay runs again
  assert binary.metric_lines(directory) == []
  assert binary.checkpoint_names(directory) == before


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_job_goes_on_from_the_one_before(finished_job, tmp_path):
  directory = begun_job(finished_job, tmp_path / 'job', 16)
  flip_a_byte(directory / 'checkpoints' / 'checkpoint_00000016')
  assert train(directory) == 0
  assert_same_run(directory, finished_job, first_step=15)
  aside = [name for name in binary.checkpoint_names(directory) if 'damaged' in name]
  assert len(aside) == 1
  assert aside[0].startswith('checkpoint_00000016.damaged-')


def test_another_mesh_goes_on_with_the_same_numbers(finished_job, tmp_path):
  directory = begun_job(finished_job, tmp_path / 'job', 10)
  assert train(directory, '--ici_mesh_shape', '1,8,1') == 0
  expected = binary.column(finished_job, 'loss')
  losses = binary.column(directory, 'loss')
  assert list(losses) == list(range(11, LAST_STEP + 1))
  np.testing.assert_allclose(list(losses.values()), [expected[step] for step in losses], rtol=1e-5)


def test_a_job_of_an_older_version_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
  shutil.copytree(OLD, tmp_path / 'resumed')
  for name in ('resumed', 'whole'):
    flags = ('--set', 'trackers=()', '--accept_config_changes')
    assert train(tmp_path / name, *flags, exp='synthetic.Uneven') == 0
  losses, undisturbed = (binary.column(tmp_path / name, 'loss') for name in ('resumed', 'whole'))
  assert list(losses) == list(range(1, 21))
  assert losses == pytest.approx(undisturbed, rel=2e-6)  # compiled for another processor, at another level
