"""One of two processes is killed and its memory lost: both start again and go on from the copies of the other one."""

import shutil
import signal
import sys

from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from tests import binary

pytestmark = pytest.mark.slow

START_S = 120.0
DEADLINE_S = 30.0


def commands(tmp_path, *flags: str) -> list[list[str]]:
  """Two processes of four devices, each with a RAM disk of its own, as on two hosts."""
  command = [sys.executable, '-m', 'spmd_tasks.main', '--exp', 'tests.multi_process.raising_experiments.Job']
  command += ['--mode', 'train', '--job_log_dir', str(tmp_path / 'job'), '--num_fake_devices=4', *flags]
  command += ['--set', 'peer_copy_every_steps=20', '--set', 'checkpoint_every_steps=30']
  ranks = enumerate(coordinator_flags(num_processes=2))
  return [command + own + ['--set', f'peer_copy_directory={tmp_path / f"ram{rank}"}'] for rank, own in ranks]


def damage(checkpoint) -> None:
  """So that whoever reads it sets it aside."""
  for path in checkpoint.rglob('*'):
    if path.is_file() and path.name != 'manifest.json':
      path.write_bytes(path.read_bytes()[::-1] + b'.')


def test_a_restart_after_the_loss_of_a_process_and_its_memory_reads_no_checkpoint(tmp_path):
  for rank in range(2):
    (tmp_path / f'ram{rank}').mkdir()
  with Job(commands(tmp_path, '--num_train_steps=100000'), log_dir=tmp_path, num_devices=4) as job:
    job.wait_for_text(0, 'step 55/', limit_s=START_S)
    job.send(1, signal.SIGKILL)
    ranks = job.wait(deadline_s=DEADLINE_S)
  assert ranks[1].returncode == -signal.SIGKILL
  assert ranks[0].returncode != 0
  before = binary.metric_lines(tmp_path / 'job')
  shutil.rmtree(tmp_path / 'ram1')
  (tmp_path / 'ram1').mkdir()
  checkpoints = sorted((tmp_path / 'job' / 'checkpoints').glob('checkpoint_*[0-9]'))
  for checkpoint in checkpoints:
    damage(checkpoint)

  last = before[-1]['step'] + 5
  with Job(commands(tmp_path, f'--num_train_steps={last}'), log_dir=tmp_path, num_devices=4) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert 'from the copies in memory (that of process 1 from process 0)' in ranks[0].log
  assert all(checkpoint.exists() for checkpoint in checkpoints)  # none was read and set aside
  assert not any('damaged' in name for name in binary.checkpoint_names(tmp_path / 'job'))

  again = binary.metric_lines(tmp_path / 'job')[len(before) :]
  assert [line['step'] for line in again] == list(range(again[0]['step'], last + 1))
  assert again[0]['step'] - 1 in (40, 60)  # copied every 20 steps; the newest checkpoint is of step 30 or 60
  first = {line['step']: line for line in before}
  repeated = [line for line in again if line['step'] in first]
  assert repeated
  for line in repeated:
    for name in ('loss', 'cross_entropy', 'accuracy', 'grad_norm', 'weight_norm', 'learning_rate'):
      assert line[name] == first[line['step']][name], (name, line['step'])
  for rank in range(2):  # a job that ended well leaves nothing in memory
    assert not [path for path in (tmp_path / f'ram{rank}').rglob('*') if path.is_file()]
