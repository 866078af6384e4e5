"""Two processes whose job and compiled programs are in an object store: killed, and resumed bit for bit.

The optimizer's state is in the hosts' memory.
"""

from pathlib import Path
import signal
import sys
import time

from etils import epath
from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metrics import read_jsonl
from tests import binary

pytestmark = pytest.mark.slow

START_S = 240.0
DEADLINE_S = 60.0
SETTINGS = ('log_every_steps=1', 'step_timeout_s=60.0', 'checkpoint_every=4', 'checkpoint_max_to_keep=2')
SETTINGS += ('eval_every_steps=None',)


def flags(job_log_dir: epath.PathLike) -> list[str]:
  experiment = 'tests.multi_process.job_experiments.Dropout'
  own = ['--exp', experiment, '--mode', 'train', '--job_log_dir', str(job_log_dir), '--num_train_steps', '12']
  return own + [flag for setting in SETTINGS for flag in ('--set', setting)]


def commands(job_log_dir: epath.PathLike) -> list[list[str]]:
  command = [sys.executable, '-m', 'spmd_tasks.main', *flags(job_log_dir), '--num_fake_devices=4']
  command += ['--compilation_cache', f'{job_log_dir}/programs', '--set', 'task.learner.state_on_host=True']
  command += ['--heartbeat_timeout_s=10', '--shutdown_timeout_s=5', '--set', 'train_input.slow_s=1.0']
  return [[*command, *own] for own in coordinator_flags(num_processes=2)]


# By default test_binary.py has two processes that save together, tests/programs/test_store_jobs.py a job in a store.
@pytest.mark.exhaustive
@pytest.mark.parametrize('store', ['gs', 's3'], indirect=True)
def test_a_job_of_two_processes_is_killed_and_resumed_bit_for_bit(store, tmp_path: Path):
  with Job(commands(store), log_dir=tmp_path, num_devices=4) as job:
    job.wait_for_text(0, 'step 5/', limit_s=START_S)
    while max(read_jsonl(store), default=0) < 5:  # lines are written every second
      time.sleep(0.1)
    for rank in range(2):
      job.send(rank, signal.SIGKILL)
    job.wait(deadline_s=DEADLINE_S)
  before = read_jsonl(store)
  assert 5 <= max(before) < 12
  other_host = {'XDG_CACHE_HOME': str(tmp_path / 'other_host'), 'SPMD_TASKS_QUIET': ''}
  with Job(commands(store), log_dir=tmp_path, num_devices=4, env=other_host) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, '\n'.join(rank.log for rank in ranks)
  assert 'resuming after step 4' in ranks[0].log
  assert 'the train step: read from the compilation cache' in ranks[0].log
  assert not [rank.log for rank in ranks if 'are not used' in rank.log]  # both read the same programs
  metrics = read_jsonl(store)  # of steps that were made twice, the second time
  assert list(metrics) == list(range(1, 13))
  for step in range(5, max(before) + 1):
    for name in ('loss', 'grad_norm', 'weight_norm'):
      assert metrics[step][name] == before[step][name], (step, name)

  # One process evaluates what two have written, and trains to the same numbers with the optimizer's state on devices.
  on_host = ('--set', 'task.learner.state_on_host=True')
  assert binary.run_in_process(*flags(store), *on_host, '--mode', 'eval') == exit_codes.OK
  assert binary.run_in_process(*flags(tmp_path / 'alone')) == exit_codes.OK
  alone = read_jsonl(epath.Path(tmp_path / 'alone'))
  for step in range(1, 13):
    assert metrics[step]['loss'] == pytest.approx(alone[step]['loss'], rel=1e-5)
