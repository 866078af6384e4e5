"""Real processes that are killed, stopped by SIGTERM or started twice, at moments that nobody chose."""

from pathlib import Path
import random
import signal
import subprocess
import time

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import assert_same_arrays, saved_arrays

LAST_STEP = 20
INTERVAL = 2
# Slow batches spread the steps over a second, so that a signal meets the job between any two of them.
FLAGS = ('--exp', SMALL, '--mode', 'train', '--num_fake_devices', 8, '--set', 'train_input.seconds_per_batch=0.05')


@pytest.fixture
def start():
  """Starts jobs, of which none outlives the test."""
  processes = []

  def start_job(*flags: object) -> subprocess.Popen:
    processes.append(binary.start_binary(*flags))
    return processes[-1]

  yield start_job
  for process in processes:
    if process.poll() is None:
      process.kill()
      process.communicate()
    process.stdout.close()
    process.stderr.close()


def steps_of(directory: Path) -> list[int]:
  return [line['step'] for line in binary.metric_lines(directory)]


def wait_until(process: subprocess.Popen, condition, limit_s: float = 150) -> None:
  deadline = time.monotonic() + limit_s
  while not condition():
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline, 'the job does not get there'
    time.sleep(0.002)


def kill_in_mid_save(process: subprocess.Popen, directory: Path) -> None:
  """Kills while a checkpoint is half-written: the process is stopped first, so that it cannot finish it meanwhile."""
  while True:
    wait_until(process, lambda: any(name.endswith('.partial') for name in binary.checkpoint_names(directory)))
    process.send_signal(signal.SIGSTOP)
    binary.wait_until_stopped(process)
    if any(name.endswith('.partial') for name in binary.checkpoint_names(directory)):
      process.kill()
      return
    process.send_signal(signal.SIGCONT)


def kill_at_random(process: subprocess.Popen, rng: random.Random) -> None:
  time.sleep(rng.uniform(0, 0.15))
  process.kill()


def assert_little_is_lost(*, last_seen: int, first_again: int) -> None:
  """A small state is on disk before the next step begins."""
  assert last_seen - (first_again - 1) <= INTERVAL


def assert_same_losses(directory: Path, finished_job: Path) -> None:
  """Of every line, also those of steps that were executed again."""
  expected = {line['step']: line for line in binary.metric_lines(finished_job)}
  for line in binary.metric_lines(directory):
    for name in ('loss', 'grad_norm', 'weight_norm'):
      assert line[name] == expected[line['step']][name], (name, line['step'])


# When to kill: after this step, and whether in the middle of a save.
IN_A_SAVE, ANYWHERE = (3, True), (9, False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  'kills',
  [
    pytest.param((IN_A_SAVE,), id='in the middle of a save'),
    # By default the next test kills anywhere.
    pytest.param((IN_A_SAVE, ANYWHERE), id='and again', marks=pytest.mark.exhaustive),
  ],
)
def test_kill_9_at_any_moment_changes_no_bit(finished_job, start, tmp_path, kills):
  directory = tmp_path / 'job'
  flags = (*FLAGS, '--job_log_dir', directory, '--set', 'checkpoint_max_to_keep=3')
  rng = random.Random(0)
  num_again = 0
  for target, is_mid_save in kills:
    before = steps_of(directory)
    process = start(*flags)
    wait_until(process, lambda: max(steps_of(directory)[len(before) :], default=0) >= target)  # noqa: B023
    if is_mid_save:
      kill_in_mid_save(process, directory)
    else:
      kill_at_random(process, rng)
    ended = binary.finish(process)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    if before:
      first_again = steps_of(directory)[len(before)]
      assert_little_is_lost(last_seen=before[-1], first_again=first_again)
      num_again += before[-1] - first_again + 1
  before = steps_of(directory)
  assert binary.run_in_process(*flags) == exit_codes.OK
  first_again = steps_of(directory)[len(before)]
  assert_little_is_lost(last_seen=before[-1], first_again=first_again)
  num_again += before[-1] - first_again + 1
  assert num_again >= 1  # steps were executed again, or nothing was tested

  assert set(steps_of(directory)) == set(range(1, LAST_STEP + 1))
  assert_same_losses(directory, finished_job)
  assert binary.checkpoint_names(directory) == [f'checkpoint_{step:08d}' for step in (16, 18, 20)]
  assert_same_arrays(saved_arrays(directory, LAST_STEP), saved_arrays(finished_job, LAST_STEP))


@pytest.mark.slow
def test_kill_9_loses_at_most_the_time_between_checkpoints(finished_job, start, tmp_path, capfd):
  """That of the steps after the newest checkpoint: a save begins at the end of the step in which the time is up."""
  directory = tmp_path / 'job'
  flags = (*FLAGS, '--job_log_dir', directory, '--set', 'train_input.seconds_per_batch=0.2')
  flags += ('--set', 'checkpoint_every=1s', '--set', 'eval_every_steps=None')
  process = start(*flags)
  wait_until(process, lambda: len(steps_of(directory)) >= 14)
  process.kill()
  binary.finish(process)
  ended = {line['step']: line['time'] for line in binary.metric_lines(directory)}
  assert binary.run_in_process(*flags) == exit_codes.OK
  assert '; a checkpoint every second' in capfd.readouterr().err
  saved = steps_of(directory)[len(ended)] - 1
  longest = max(ended[step] - ended[step - 1] for step in ended if step > 1)
  assert 0 < saved < len(ended)
  assert ended[len(ended)] - ended[saved] <= 1 + 2 * longest
  assert_same_losses(directory, finished_job)
  assert_same_arrays(saved_arrays(directory, LAST_STEP), saved_arrays(finished_job, LAST_STEP))


def test_sigterm_saves_the_step_reached_and_the_same_command_goes_on(finished_job, start, tmp_path, capfd):
  directory = tmp_path / 'job'
  flags = (*FLAGS, '--job_log_dir', directory, '--set', 'checkpoint_every=7')
  process = start(*flags)
  wait_until(process, lambda: len(steps_of(directory)) >= 3)
  process.terminate()
  process.terminate()  # launchers repeat themselves
  ended = binary.finish(process)
  assert ended.returncode == exit_codes.PREEMPTED == 42, ended.stderr
  reached = steps_of(directory)[-1]
  assert 3 <= reached < LAST_STEP
  assert f'Preempted: step {reached} is saved' in ended.stderr
  assert 'Traceback' not in ended.stderr
  assert binary.checkpoint_names(directory)[-1] == f'checkpoint_{reached:08d}'

  assert binary.run_in_process(*flags) == exit_codes.OK
  assert f'resuming after step {reached}' in capfd.readouterr().err
  assert steps_of(directory) == list(range(1, LAST_STEP + 1))  # no step twice, none left out
  assert_same_losses(directory, finished_job)
  assert_same_arrays(saved_arrays(directory, LAST_STEP), saved_arrays(finished_job, LAST_STEP))


def test_sigterm_in_an_eval_gives_it_up_and_the_same_command_makes_up_for_it(finished_job, start, tmp_path):
  directory = tmp_path / 'job'
  flags = (*FLAGS, '--job_log_dir', directory)
  process = start(*flags, '--set', 'eval_inputs.valid.num_batches=1000000')  # would take half an hour
  wait_until(process, lambda: steps_of(directory)[-1:] == [8])  # the first eval is due
  time.sleep(0.5)
  process.terminate()
  ended = binary.finish(process, limit_s=30)
  assert ended.returncode == exit_codes.PREEMPTED, ended.stderr
  assert 'Preempted: step 8 is saved' in ended.stderr
  assert not list((directory / 'eval').rglob('*'))

  assert binary.run_in_process(*flags) == exit_codes.OK
  for name in ('valid', 'ragged'):
    again, undisturbed = (binary.metric_lines(path / 'eval' / name) for path in (directory, finished_job))
    assert [line.pop('step') for line in again] == [line.pop('step') for line in undisturbed] == [8, 16, LAST_STEP]
    assert [line | {'time': 0} for line in again] == [line | {'time': 0} for line in undisturbed]
