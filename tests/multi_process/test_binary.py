"""The real binary as two processes over loopback: same numbers, checkpoints for any process count, bounded ends."""

from pathlib import Path
import signal
import sys
import time

from launch import Job, RankResult, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.programs.job_directory import claim
from spmd_tasks.runtime.metrics import read_jsonl
from tests import binary

pytestmark = pytest.mark.slow

START_S = 120.0
DEADLINE_S = 30.0  # from a fault until the last process is gone
EXHAUSTIVE = pytest.mark.exhaustive  # of SIGTERM test_faults.py has all cases, with a smaller worker


def own_flags(job_log_dir: Path, *flags: str) -> list[str]:
  """Flags of a process without those by which it finds another one."""
  experiment = 'tests.multi_process.raising_experiments.Job'
  return ['--exp', experiment, '--mode', 'train', '--job_log_dir', str(job_log_dir), *flags]


def commands(job_log_dir: Path, *flags: str) -> list[list[str]]:
  """The commands of two processes of four devices."""
  command = [sys.executable, '-m', 'spmd_tasks.main', *own_flags(job_log_dir, *flags), '--num_fake_devices=4']
  return [command + rank_flags for rank_flags in coordinator_flags(num_processes=2)]


def train_alone(job_log_dir: Path, *flags: str) -> None:
  """On the eight devices of this process."""
  assert binary.run_in_process(*own_flags(job_log_dir, *flags)) == exit_codes.OK


def train(tmp_path: Path, job_log_dir: Path, *flags: str, fresh: bool = False) -> list[RankResult]:
  """As two processes."""
  log_dir = tmp_path / f'logs_{len(list(tmp_path.iterdir()))}'
  log_dir.mkdir()
  with Job(commands(job_log_dir, *flags), log_dir=log_dir, num_devices=4, fresh=fresh) as job:
    return job.wait(deadline_s=START_S)


def losses_by_step(job_log_dir: Path) -> dict[int, float]:
  return {step: scalars['loss'] for step, scalars in read_jsonl(job_log_dir).items()}


def losses(job_log_dir: Path) -> list[float]:
  return [scalars['loss'] for _, scalars in sorted(read_jsonl(job_log_dir).items())]


def test_two_processes_give_the_numbers_of_one_and_share_checkpoints(tmp_path):
  alone, shared = tmp_path / 'alone', tmp_path / 'shared'
  train_alone(alone)
  first = train(tmp_path, shared, '--num_train_steps=10', fresh=True)  # the order of a set differs between the two
  train_alone(shared, '--num_train_steps=15')
  last = train(tmp_path, shared)
  for ranks in (first, last):
    assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
    assert not any(rank.left_orphans for rank in ranks)
  assert len(losses(alone)) == 20
  np.testing.assert_allclose(losses(shared), losses(alone), rtol=1e-5)
  evals = [read_jsonl(directory / 'eval' / 'valid')[20]['loss'] for directory in (alone, shared)]
  np.testing.assert_allclose(*evals, rtol=1e-5)
  assert 'resuming after step 15' in last[0].log


@pytest.mark.exhaustive
def test_process_0_ends_the_job_on_all_after_the_same_step(tmp_path):
  ranks = train(tmp_path, tmp_path / 'job', '--exp=tests.multi_process.raising_experiments.EndsEarly')
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert 'Ended after step 7 of 20: it is enough.' in ranks[0].log
  assert len(losses(tmp_path / 'job')) == 7
  assert sorted(read_jsonl(tmp_path / 'job' / 'eval' / 'valid')) == [7]


def test_rows_keep_their_order_where_a_process_holds_rows_here_and_there(tmp_path):
  # mdl over the processes: each holds rows 0, 1, 4, 5 or 2, 3, 6, 7. Dropout falls on rows, so their order shows; the
  # batch of 6 is padded to 8.
  flags = ['--set', 'batch_size=6', '--set', 'task.model.stack.block.dropout_rate=0.2', '--num_train_steps=4']
  dcn = ['--ici_mesh_shape=1,2,2', '--dcn_mesh_shape=1,1,2']
  train_alone(tmp_path / 'alone', *flags)
  ranks = train(tmp_path, tmp_path / 'dcn', *flags, *dcn)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  np.testing.assert_allclose(losses(tmp_path / 'dcn'), losses(tmp_path / 'alone'), rtol=1e-5)


def wait_for_end(job: Job) -> list[RankResult]:
  """All processes must leave by themselves, nonzero, within the deadline from now."""
  ranks = job.wait(deadline_s=DEADLINE_S)
  assert not any(rank.was_killed or rank.left_orphans for rank in ranks), [rank.log for rank in ranks]
  assert all(rank.returncode != 0 for rank in ranks)
  return ranks


@pytest.mark.parametrize(
  'flags, code, difference',
  [
    (['--set', 'task.learner.optimizer.learning_rate=0.01'], '', 'learning_rate=0.01, process 0 has 0.003: start all'),
    pytest.param(  # of what is compared tests/distributed/test_agreement.py has all
      [],
      'import jax; jax.config.update("jax_enable_x64", True)',
      'jax_enable_x64=true, process 0 has false: start all',
      marks=EXHAUSTIVE,
    ),
    (
      ['--set', 'task.learner.optimizer.learning_rte=0.01'],
      '',
      "process 1: unknown config path 'task.learner.optimizer",
    ),
  ],
)
def test_processes_that_differ_are_refused_before_anything_is_written(tmp_path, flags, code, difference):
  first, second = commands(tmp_path / 'job')
  second = [sys.executable, '-c', f'{code}\nfrom spmd_tasks.main import main; main()', *second[3:], *flags]
  with Job([first, second], log_dir=tmp_path, num_devices=4) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.USAGE] * 2, [rank.log for rank in ranks]
  assert difference in ranks[0].log
  assert not any('Traceback' in rank.log for rank in ranks)
  assert not (tmp_path / 'job').exists()


@pytest.mark.parametrize(
  'signum, left',
  [(signal.SIGINT, exit_codes.INTERRUPTED), pytest.param(signal.SIGTERM, exit_codes.PREEMPTED, marks=EXHAUSTIVE)],
)
def test_a_signal_to_one_process_saves_the_same_step_on_all_also_while_they_save(tmp_path, signum, left):
  flags = ['--num_train_steps=100000', '--set', 'checkpoint_every_steps=1', '--set', 'eval_every_steps=None']
  with Job(commands(tmp_path / 'job', *flags), log_dir=tmp_path, num_devices=4) as job:
    job.wait_for_text(0, 'step 3/', limit_s=START_S)
    job.send(1, signum)
    ranks = wait_for_end(job)
  assert [rank.returncode for rank in ranks] == [exit_codes.PREEMPTED, left], ranks[0].log
  step = max(losses_by_step(tmp_path / 'job'))
  assert f'Preempted: step {step} is saved' in ranks[0].log
  assert (tmp_path / 'job' / 'checkpoints' / f'checkpoint_{step:08}').is_dir()
  assert 'Traceback' not in ranks[0].log + ranks[1].log


def test_all_processes_refuse_a_directory_whose_checkpoints_are_gone_or_that_is_in_use(tmp_path):
  lost, used = tmp_path / 'lost', tmp_path / 'used'
  lost.mkdir()
  (lost / 'newest_checkpoint.json').write_text('{"step": 60}\n')
  with claim(used, experiment_name='tests.multi_process.raising_experiments.Job'):
    for directory, reason in (
      (lost, 'newest_checkpoint.json says that step 60 was saved'),
      (used, 'in use by another'),
    ):
      ranks = train(tmp_path, directory)
      assert [rank.returncode for rank in ranks] == [exit_codes.USAGE] * 2, [rank.log for rank in ranks]
      assert all(reason in rank.log for rank in ranks)
      assert not any(rank.was_killed or 'Traceback' in rank.log for rank in ranks)


@pytest.mark.exhaustive  # one process alone: programs/test_kills.py; two of them in mid-training: below
def test_sigterm_in_an_eval_ends_it_everywhere_after_the_same_batch(tmp_path):
  directory = tmp_path / 'job'
  flags = ['--set', 'eval_every_steps=5', '--set', 'eval_inputs.valid.num_batches=1000000']
  with Job(commands(directory, *flags), log_dir=tmp_path, num_devices=4) as job:
    job.wait_for_text(0, 'step 5/', limit_s=START_S)
    time.sleep(1)
    job.send(1, signal.SIGTERM)
    ranks = wait_for_end(job)
  assert [rank.returncode for rank in ranks] == [exit_codes.PREEMPTED] * 2, [rank.log for rank in ranks]
  assert 'Preempted: step 5 is saved' in ranks[0].log
  assert not list((directory / 'eval').rglob('*'))
  again = train(tmp_path, directory, '--set', 'eval_every_steps=5', '--num_train_steps=10')
  assert [rank.returncode for rank in again] == [exit_codes.OK] * 2, [rank.log for rank in again]
  assert list(read_jsonl(directory / 'eval' / 'valid')) == [5, 10]
