"""A Pax experiment whose hosts read their own rows, as two processes: the curve of one process, also after a resume."""

from pathlib import Path
import sys

from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metric_files import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]  # nine imports of Paxml

EXPERIMENTS = Path(__file__).parents[1] / 'data'


def run(tmp_path: Path, num_processes: int, *flags: object) -> None:
  command = [sys.executable, '-m', 'spmd_tasks.main', f'--num_fake_devices={4 // num_processes}', *map(str, flags)]
  command += ['--experiment_path', str(EXPERIMENTS)]
  ranks = [command]
  if num_processes > 1:
    ranks = [[*command, *rank] for rank in coordinator_flags(num_processes=num_processes)]
  log_dir = tmp_path / f'logs_{len(list(tmp_path.iterdir()))}'
  log_dir.mkdir()
  with Job(ranks, log_dir=log_dir, num_devices=4 // num_processes) as job:
    results = job.wait(deadline_s=300)
  assert [result.returncode for result in results] == [exit_codes.OK] * num_processes, [r.log for r in results]


def losses(job: Path) -> list[float]:
  return [line['loss'] for _, line in sorted(read_jsonl(job).items())]


def test_two_processes_follow_one_and_hand_their_state_to_paxml_and_back(tmp_path):
  """Losses with dropout, bit for bit. The state goes to Paxml's format and back; the input begins anew there."""
  alone, shared, on_alone, on_shared = (tmp_path / name for name in ('alone', 'shared', 'on_alone', 'on_shared'))
  train = ('--exp', 'pax_cases.inputs.Hosts', '--mode', 'train', '--set', 'log_every_steps=1', '--job_log_dir')
  run(tmp_path, 1, *train, alone)
  run(tmp_path, 2, *train, shared, '--num_train_steps', 4)
  run(tmp_path, 2, *train, shared, '--num_train_steps', 6)
  assert losses(shared) == losses(alone)
  assert len(losses(alone)) == 6
  run(tmp_path, 2, '--mode', 'export', '--job_log_dir', shared, '--out', tmp_path / 'paxml')
  on = ('--num_train_steps', 8, '--set', f'continue_from={tmp_path / "paxml"}')
  run(tmp_path, 1, *train, on_alone, *on)
  run(tmp_path, 2, *train, on_shared, *on)
  assert losses(on_shared) == losses(on_alone)
  assert len(losses(on_alone)) == 2
