"""A Pax experiment whose hosts read their own rows, as two processes: the curve of one process, also after a resume."""

import os
from pathlib import Path
import sys

from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metrics import read_jsonl
from tests import forked

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[1] / 'data'
TRAIN = ('--exp', 'pax_cases.inputs.Hosts', '--mode', 'train', '--eval_on_test', '--set', 'log_every_steps=1')


def run(tmp_path: Path, num_processes: int, *flags: object) -> None:
  """Runs the binary on four devices, as processes that have imported Paxml already."""
  command = [sys.executable, '-m', 'spmd_tasks.main', f'--num_fake_devices={4 // num_processes}', *map(str, flags)]
  command += ['--experiment_path', str(EXPERIMENTS)]
  ranks = [command]
  if num_processes > 1:
    ranks = [[*command, *rank] for rank in coordinator_flags(num_processes=num_processes)]
  log_dir = tmp_path / f'logs_{len(list(tmp_path.iterdir()))}'
  log_dir.mkdir()
  server = os.environ[forked.PAX_SOCKET_VARIABLE] if forked.is_running() else None
  with Job(ranks, log_dir=log_dir, num_devices=4 // num_processes, server=server) as job:
    results = job.wait(deadline_s=300)
  assert [result.returncode for result in results] == [exit_codes.OK] * num_processes, [r.log for r in results]


def losses(job: Path) -> list[float]:
  return [line['loss'] for _, line in sorted(read_jsonl(job).items())]


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The job of one process, 6 steps."""
  directory = tmp_path_factory.mktemp('alone')
  run(directory.parent, 1, *TRAIN, '--job_log_dir', directory)
  assert len(losses(directory)) == 6
  return directory


def test_two_processes_follow_one(alone, tmp_path):
  """Losses with dropout and evals, bit for bit."""
  shared = tmp_path / 'shared'
  run(tmp_path, 2, *TRAIN, '--job_log_dir', shared, '--num_train_steps', 3)
  assert losses(shared) == losses(alone)[:3]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_processes_resume_and_evaluate(alone, tmp_path):
  """Each continues by its own input's state; an eval job of two processes records what training did."""
  shared = tmp_path / 'shared'
  for num_steps in (4, 6):
    run(tmp_path, 2, *TRAIN, '--job_log_dir', shared, '--num_train_steps', num_steps)
  assert losses(shared) == losses(alone)
  evals = read_jsonl(shared / 'eval' / 'valid')
  assert evals[6]['loss'] == read_jsonl(alone / 'eval' / 'valid')[6]['loss']
  (shared / 'eval' / 'valid' / 'metrics.jsonl').unlink()
  run(tmp_path, 2, '--mode', 'eval', '--job_log_dir', shared)
  assert read_jsonl(shared / 'eval' / 'valid')[6]['loss'] == evals[6]['loss']
