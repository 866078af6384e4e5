"""Two processes, of which one is killed: both go on from the other's memory."""

from pathlib import Path
import shutil
import signal
import sys

from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metric_files import read_jsonl
from tests import binary

pytestmark = pytest.mark.slow

START_S = 120.0
DEADLINE_S = 30.0
SECONDS_PER_BATCH = 1.0  # of process 1: longer than a step, also where many tests share the machine


def commands(directory: Path, num_train_steps: int) -> list[list[str]]:
  """Two processes of four devices, each with a RAM disk of its own, as on two hosts; copied every 6 steps."""
  command = [sys.executable, '-m', 'spmd_tasks.main', '--exp', 'tests.multi_process.job_experiments.Light']
  command += ['--mode', 'train', '--job_log_dir', str(directory / 'job'), '--num_fake_devices=4']
  command += ['--set', f'train_input.slow_s={SECONDS_PER_BATCH}', f'--num_train_steps={num_train_steps}']
  command += ['--set', 'peer_copy_every_steps=6', '--set', 'checkpoint_every=4', '--set', 'prefetch_batches=1']
  ranks = enumerate(coordinator_flags(num_processes=2))
  return [command + own + ['--set', f'peer_copy_directory={directory / f"ram{rank}"}'] for rank, own in ranks]


@pytest.fixture(scope='module')
def killed(tmp_path_factory) -> Path:
  """The directory of a job whose process 1 was killed after step 7, with a checkpoint of step 4 and copies of 6."""
  directory = tmp_path_factory.mktemp('killed')
  for rank in range(2):
    (directory / f'ram{rank}').mkdir()
  with Job(commands(directory, 100000), log_dir=directory, num_devices=4) as job:
    job.wait_for_text(0, 'step 7/', limit_s=START_S)
    job.send(1, signal.SIGKILL)
    ranks = job.wait(deadline_s=DEADLINE_S)
  assert ranks[1].returncode == -signal.SIGKILL
  assert ranks[0].returncode != 0
  return directory


def test_a_copy_compiles_nothing_in_the_loop_and_the_first_checkpoint_does(killed):
  metrics = read_jsonl(killed / 'job')
  assert metrics[4]['num_compilations'] == 0
  assert metrics[7]['num_compilations'] == metrics[5]['num_compilations']


def damage(checkpoint: Path) -> None:
  """So that whoever reads it sets it aside."""
  for path in checkpoint.rglob('*'):
    if path.is_file() and path.name != 'manifest.json':
      path.write_bytes(path.read_bytes()[::-1] + b'.')


def test_a_restart_after_the_loss_of_a_process_and_its_memory_reads_no_checkpoint(killed):
  job_log_dir = killed / 'job'
  before = binary.metric_lines(job_log_dir)
  shutil.rmtree(killed / 'ram1')
  (killed / 'ram1').mkdir()
  checkpoints = sorted((job_log_dir / 'checkpoints').glob('checkpoint_*[0-9]'))
  assert checkpoints
  for checkpoint in checkpoints:
    damage(checkpoint)

  last = before[-1]['step'] + 2
  with Job(commands(killed, last), log_dir=killed, num_devices=4) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert 'resuming after step 6 from the copies in memory (that of process 1 from process 0)' in ranks[0].log
  assert all(checkpoint.exists() for checkpoint in checkpoints)
  assert not any('damaged' in name for name in binary.checkpoint_names(job_log_dir))

  again = binary.metric_lines(job_log_dir)[len(before) :]
  assert [line['step'] for line in again] == list(range(7, last + 1))
  first = {line['step']: line for line in before}
  for line in again[: len(before) - 6]:
    for name in ('loss', 'grad_norm', 'weight_norm', 'learning_rate'):
      assert line[name] == first[line['step']][name], (name, line['step'])
  for rank in range(2):  # a job that ended well leaves nothing in memory
    assert not [path for path in (killed / f'ram{rank}').rglob('*') if path.is_file()]
