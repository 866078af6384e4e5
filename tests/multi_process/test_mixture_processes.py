"""Training on a mixture goes on with another number of processes: the same rows, and so the same losses."""

from pathlib import Path
import random
import signal
import sys

from launch import Job, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

START_S = 120.0
NUM_STEPS = 20


def job(log_dir: Path, job_log_dir: Path, num_processes: int, *flags: str) -> Job:
  """The processes of one start; together they have 8 devices."""
  log_dir.mkdir()
  command = [sys.executable, '-m', 'spmd_tasks.main', '--exp', 'tests.multi_process.mixture_experiments.Mixed']
  command += ['--mode', 'train', '--job_log_dir', str(job_log_dir), f'--num_fake_devices={8 // num_processes}', *flags]
  ranks = coordinator_flags(num_processes=num_processes) if num_processes > 1 else [[]]
  return Job([command + rank for rank in ranks], log_dir=log_dir, num_devices=8 // num_processes)


def check_same(job_log_dir: Path, other: Path) -> None:
  """All steps of both: rows to the last one; losses as sums over devices of other processes allow."""
  found, wanted = read_jsonl(job_log_dir), read_jsonl(other)
  assert found.keys() == wanted.keys() == set(range(1, NUM_STEPS + 1))
  for step, metrics in wanted.items():
    for name in (name for name in metrics if name.startswith(('loss', 'rows/'))):
      exact = name.startswith(('rows/', 'loss_weight'))
      np.testing.assert_allclose(found[step][name], metrics[name], rtol=0 if exact else 1e-5, err_msg=f'{step} {name}')


def test_ended_at_some_steps_and_gone_on_with_other_numbers_of_processes(tmp_path):
  starts = [(1, 20, 'alone'), (2, 7, 'shared'), (4, 13, 'shared'), (1, 20, 'shared')]
  for number, (num_processes, num_steps, directory) in enumerate(starts):
    with job(tmp_path / f'logs_{number}', tmp_path / directory, num_processes, f'--num_train_steps={num_steps}') as run:
      ranks = run.wait(deadline_s=START_S)
    assert [rank.returncode for rank in ranks] == [exit_codes.OK] * num_processes, [rank.log for rank in ranks]
  check_same(tmp_path / 'shared', tmp_path / 'alone')


def test_killed_at_random_moments_and_gone_on_with_other_numbers_of_processes(tmp_path):
  rng = random.Random(4)
  with job(tmp_path / 'logs_alone', tmp_path / 'alone', 1) as run:
    run.wait(deadline_s=START_S)
  flags = ('--set', 'checkpoint_every_steps=2')
  for number, num_processes in enumerate((2, 4, 2, 1)):
    with job(tmp_path / f'logs_{number}', tmp_path / 'killed', num_processes, *flags) as run:
      if number < 3:
        step = 4 + 5 * number + rng.randrange(3)
        run.wait_for_text(0, f'step {step}/', limit_s=START_S)
        run.send(rng.randrange(num_processes), signal.SIGKILL)
      ranks = run.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK], ranks[0].log
  check_same(tmp_path / 'killed', tmp_path / 'alone')
