"""Whatever happens to one process, all are out in bounded time, and a survivor's log says whose fault it was."""

from pathlib import Path
import re
import signal
import sys

from launch import Job, RankResult, coordinator_flags, run_ranks
import pytest

from spmd_tasks import exit_codes

WORKER = str(Path(__file__).with_name('worker_steps.py'))
DEADLINE_S = 30.0  # From the fault on, as promised; the start before it takes about 2 s.
START_S = 60.0  # For the start alone, on a machine that is busy with other tests.

MAIN_THREAD_WAITS = 'in __float__'  # A survivor's stacks show it waiting for the step's result.


def run_worker(tmp_path: Path, *flags: str) -> list[RankResult]:
  """Two processes with two devices each; none may be left behind."""
  ranks = run_ranks(
    [WORKER, f'--job_log_dir={tmp_path}', *flags],
    num_processes=2,
    num_devices=2,
    log_dir=tmp_path,
    deadline_s=START_S + DEADLINE_S,
  )
  assert not any(rank.left_orphans for rank in ranks)
  return ranks


def assert_all_left(ranks: list[RankResult]):
  """By themselves and nonzero, within the deadline after the first to go."""
  assert all(rank.returncode != 0 and not rank.was_killed for rank in ranks), [rank.log for rank in ranks]
  assert max(rank.seconds for rank in ranks) - min(rank.seconds for rank in ranks) < DEADLINE_S


@pytest.mark.slow
def test_a_clean_run_leaves_with_zero_and_the_same_losses_however_long_one_process_works_and_closes(tmp_path):
  # For longer than the shutdown timeout of 2 s, at which JAX would abort both.
  ranks = run_worker(tmp_path, '--late_s=4')
  assert [rank.returncode for rank in ranks] == [exit_codes.OK, exit_codes.OK], [rank.log for rank in ranks]
  losses = [re.findall(r'step \d+ loss .*', rank.log) for rank in ranks]
  # The mean of 0..3, times the step's number.
  assert losses[0] == losses[1] == [f'step {step} loss {1.5 * (step + 1)}' for step in range(8)]


def test_an_exception_in_one_process_ends_the_other_with_its_reason(tmp_path):
  culprit = 1
  ranks = run_worker(tmp_path, '--fault=raise', f'--fault_rank={culprit}')
  assert_all_left(ranks)
  survivor = ranks[1 - culprit]
  assert ranks[culprit].returncode == exit_codes.FAILED
  assert survivor.returncode == exit_codes.PEER_FAILED
  assert 'Traceback' in ranks[culprit].log
  assert 'in commit' in ranks[culprit].log
  assert f'likely culprit: process {culprit}: ArithmeticError: this step is cursed' in survivor.log
  assert MAIN_THREAD_WAITS in survivor.log


@pytest.mark.slow
def test_a_process_that_hangs_ends_both_and_is_named(tmp_path):
  culprit = 0
  ranks = run_worker(tmp_path, '--fault=hang', f'--fault_rank={culprit}', '--watchdog_timeout_s=5')
  assert_all_left(ranks)
  survivor = ranks[1 - culprit]
  # Whoever's watchdog fires first tells the other.
  assert exit_codes.STUCK in [rank.returncode for rank in ranks]
  assert {rank.returncode for rank in ranks} <= {exit_codes.STUCK, exit_codes.PEER_FAILED}
  assert 'in commit' in ranks[culprit].log  # Its own stacks show where it hangs.
  assert MAIN_THREAD_WAITS in survivor.log
  assert f'likely culprit: process {culprit}' in survivor.log
  assert f'process {1 - culprit} is behind' not in ranks[culprit].log


@pytest.mark.slow
@pytest.mark.parametrize(
  'limit, returncode, reason',
  [
    (
      '--heartbeat_timeout_s=10',
      -signal.SIGABRT,
      'The following tasks are unhealthy (stopped sending heartbeats):\n1\n',
    ),
    ('--watchdog_timeout_s=5', exit_codes.STUCK, 'likely culprit: process 1 is gone from this host'),
  ],
)
def test_each_limit_alone_finds_a_killed_process(tmp_path, limit, returncode, reason):
  ranks = run_worker(tmp_path, '--fault=kill', limit)
  assert_all_left(ranks)
  assert [rank.returncode for rank in ranks] == [returncode, -signal.SIGKILL], ranks[0].log
  assert reason in ranks[0].log
  assert MAIN_THREAD_WAITS in ranks[0].log


def test_the_coordinator_killed_ends_the_others_at_once(tmp_path):
  ranks = run_worker(tmp_path, '--fault=kill', '--fault_rank=0')
  assert_all_left(ranks)
  # The broken connections reach JAX's service, which aborts, and the collective, which raises: in either order.
  assert 'the leader task was preempted/died' in ranks[1].log or 'likely culprit: process 0' in ranks[1].log
  assert ranks[1].seconds - ranks[0].seconds < 10


@pytest.mark.slow
def test_a_stopped_process_is_named_and_leaves_when_continued(tmp_path):
  flags = [f'--job_log_dir={tmp_path}', '--fault=stop', '--watchdog_timeout_s=5']
  argvs = [[sys.executable, WORKER, *flags, *own] for own in coordinator_flags(num_processes=2)]
  with Job(argvs, log_dir=tmp_path, num_devices=2) as job:
    job.wait_for_text(0, 'leaving with exit code', limit_s=START_S + DEADLINE_S)
    job.wait_for_text(0, 'likely culprit: process 1 is stopped by a signal', limit_s=10)
    assert MAIN_THREAD_WAITS in job.log(0)
    # Nothing in a stopped process runs, so its launcher must kill it, as Job and Slurm do; or somebody continues it.
    job.send(1, signal.SIGCONT)
    ranks = job.wait(deadline_s=DEADLINE_S)
  assert_all_left(ranks)
  assert ranks[0].returncode == exit_codes.STUCK


@pytest.mark.parametrize('preempted', [1, pytest.param(-1, marks=pytest.mark.exhaustive)])
def test_sigterm_to_one_process_or_all_stops_all_at_the_same_step(tmp_path, preempted):
  # The worker gets a second SIGTERM in the middle of its save.
  ranks = run_worker(tmp_path, '--fault=sigterm', f'--fault_rank={preempted}', '--num_steps=2000', '--step_s=0.02')
  assert [rank.returncode for rank in ranks] == [exit_codes.PREEMPTED] * 2, [rank.log for rank in ranks]
  saved = [re.findall(r'saved at (\d+)', rank.log) for rank in ranks]
  assert saved[0] == saved[1]
  assert len(saved[0]) == 1
  assert 4 <= int(saved[0][0]) < 1999
