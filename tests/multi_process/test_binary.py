"""The real binary as two processes over loopback: same numbers, checkpoints for any process count, bounded ends."""

from pathlib import Path
import signal
import sys

from launch import Job, RankResult, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.programs.job_directory import claim
from spmd_tasks.runtime.metrics import read_jsonl
from tests import binary
from tests.programs.test_resume import flip_a_byte

pytestmark = pytest.mark.slow

START_S = 120.0
DEADLINE_S = 30.0  # from a fault until the last process is gone


def own_flags(job_log_dir: Path, *flags: str, exp: str = 'Dropout') -> list[str]:
  """Flags of a process without those by which it finds another one."""
  experiment = f'tests.multi_process.job_experiments.{exp}'
  return ['--exp', experiment, '--mode', 'train', '--job_log_dir', str(job_log_dir), *flags]


def commands(job_log_dir: Path, *flags: str, exp: str = 'Dropout') -> list[list[str]]:
  """The commands of two processes of four devices."""
  command = [sys.executable, '-m', 'spmd_tasks.main', *own_flags(job_log_dir, *flags, exp=exp), '--num_fake_devices=4']
  limits = ['--heartbeat_timeout_s=10', '--shutdown_timeout_s=5']
  return [command + limits + rank_flags for rank_flags in coordinator_flags(num_processes=2)]


def train_alone(job_log_dir: Path, *flags: str, exp: str = 'Dropout') -> None:
  """On the eight devices of this process."""
  assert binary.run_in_process(*own_flags(job_log_dir, *flags, exp=exp)) == exit_codes.OK


def train(
  tmp_path: Path, job_log_dir: Path, *flags: str, exp: str = 'Dropout', fresh: bool = False
) -> list[RankResult]:
  """As two processes."""
  log_dir = tmp_path / f'logs_{len(list(tmp_path.iterdir()))}'
  log_dir.mkdir()
  with Job(commands(job_log_dir, *flags, exp=exp), log_dir=log_dir, num_devices=4, fresh=fresh) as job:
    return job.wait(deadline_s=START_S)


def losses(job_log_dir: Path) -> list[float]:
  return [scalars['loss'] for _, scalars in sorted(read_jsonl(job_log_dir).items())]


def test_rows_of_plain_data_count_once_on_any_number_of_processes(tmp_path):
  """Each process keeps its rows of a batch, also of a last one that two do not divide."""
  alone, shared = tmp_path / 'alone', tmp_path / 'shared'
  train_alone(alone, exp='Plain')
  train_alone(shared, '--num_train_steps=5', exp='Plain')
  ranks = train(tmp_path, shared, exp='Plain')
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert len(losses(alone)) == 12
  lines = list(read_jsonl(shared).values())[6:]  # those of the two processes with rates
  assert {line['slowest_host'] for line in lines} <= {0, 1}
  assert all(0 <= line['host_wait_fraction'] <= 1 for line in lines)
  np.testing.assert_allclose(losses(shared), losses(alone), rtol=1e-5)
  evals = [read_jsonl(directory / 'eval' / 'valid')[12] for directory in (alone, shared)]
  np.testing.assert_allclose(evals[0]['loss'], evals[1]['loss'], rtol=1e-5)
  assert evals[0]['num_batches'] == evals[1]['num_batches'] == 2


def test_two_processes_give_the_numbers_of_one_and_share_checkpoints(tmp_path):
  """With mdl over the processes, each holds rows 0, 1, 4, 5 or 2, 3, 6, 7; dropout shows their order.

  The batch of 6 is padded to 8. The newest checkpoint that the two find is damaged.
  """
  alone, shared = tmp_path / 'alone', tmp_path / 'shared'
  flags = ['--set', 'train_input.rows.batch_size=6', '--ici_mesh_shape=1,2,4']
  across = ['--ici_mesh_shape=1,2,2', '--dcn_mesh_shape=1,1,2']
  train_alone(alone, *flags)
  train_alone(shared, *flags, '--num_train_steps=5', '--set', 'checkpoint_every=3')
  flip_a_byte(shared / 'checkpoints' / 'checkpoint_00000005')
  # The order of a set differs between the two.
  ranks = train(tmp_path, shared, *flags, *across, '--num_train_steps=15', fresh=True)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert not any(rank.left_orphans for rank in ranks)
  train_alone(shared, *flags)
  assert len(losses(alone)) == 20
  np.testing.assert_allclose(losses(shared), losses(alone), rtol=1e-5)
  evals = [read_jsonl(directory / 'eval' / 'valid')[20]['loss'] for directory in (alone, shared)]
  np.testing.assert_allclose(*evals, rtol=1e-5)
  assert 'resuming after step 3' in ranks[0].log
  assert [name for name in binary.checkpoint_names(shared) if name.startswith('checkpoint_00000005.damaged-')]


def wait_for_end(job: Job) -> list[RankResult]:
  """All processes must leave by themselves, nonzero, within the deadline from now."""
  ranks = job.wait(deadline_s=DEADLINE_S)
  assert not any(rank.was_killed or rank.left_orphans for rank in ranks), [rank.log for rank in ranks]
  assert all(rank.returncode != 0 for rank in ranks)
  return ranks


def test_processes_that_differ_are_refused_before_anything_is_written(tmp_path):
  """Of what is compared tests/distributed/test_agreement.py has all."""
  first, second = commands(tmp_path / 'job', exp='Light')
  second += ['--set', 'task.learner.optimizer.learning_rate=0.01']
  with Job([first, second], log_dir=tmp_path, num_devices=4) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.USAGE] * 2, [rank.log for rank in ranks]
  assert 'learning_rate=0.01, process 0 has 0.03: start all' in ranks[0].log
  assert not any('Traceback' in rank.log for rank in ranks)
  assert not (tmp_path / 'job').exists()


def test_a_signal_to_one_process_saves_the_same_step_on_all_also_while_they_save(tmp_path):
  """Ctrl-C; of SIGTERM test_faults.py has all cases, with a smaller worker."""
  flags = ['--num_train_steps=100000', '--set', 'checkpoint_every=1']
  with Job(commands(tmp_path / 'job', *flags, exp='Light'), log_dir=tmp_path, num_devices=4) as job:
    job.wait_for_text(0, 'step 3/', limit_s=START_S)
    job.send(1, signal.SIGINT)
    ranks = wait_for_end(job)
  assert [rank.returncode for rank in ranks] == [exit_codes.PREEMPTED, exit_codes.INTERRUPTED], ranks[0].log
  step = max(read_jsonl(tmp_path / 'job'))
  assert f'Preempted: step {step} is saved' in ranks[0].log
  assert (tmp_path / 'job' / 'checkpoints' / f'checkpoint_{step:08}').is_dir()
  assert 'Traceback' not in ranks[0].log + ranks[1].log


def test_processes_agree_on_the_steps_that_are_saved_by_time(tmp_path):
  flags = ['--num_train_steps=40', '--set', 'checkpoint_every=1s', '--set', 'train_input.slow_s=0.1']
  ranks = train(tmp_path, tmp_path / 'job', *flags, exp='Light')
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  times = {step: metrics['time'] for step, metrics in read_jsonl(tmp_path / 'job').items()}
  steps = [int(name.removeprefix('checkpoint_')) for name in binary.checkpoint_names(tmp_path / 'job')]
  assert len(steps) == 3
  assert steps[-1] == 40
  assert 0.5 < times[steps[1]] - times[steps[0]] < 2  # beside the other process's slow steps


def test_all_processes_refuse_a_directory_that_is_in_use(tmp_path):
  with claim(tmp_path / 'used', experiment_name='tests.multi_process.job_experiments.Light'):
    ranks = train(tmp_path, tmp_path / 'used', exp='Light')
  assert [rank.returncode for rank in ranks] == [exit_codes.USAGE] * 2, [rank.log for rank in ranks]
  assert all('in use by another' in rank.log for rank in ranks)
  assert not any(rank.was_killed or 'Traceback' in rank.log for rank in ranks)
