"""Jobs of a sweep: each in its directory, with the bits of a job of its own, however often they are killed."""

import json
from pathlib import Path
import random
import signal
import time

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.sweeps.small_sweeps import SHAPES

NAMES = [f'learning_rate={rate},seed={seed}' for rate in (0.1, 0.5) for seed in (0, 1)]
LAST_STEP = 6


def command(directory: Path, *flags: object) -> tuple[object, ...]:
  return ('--exp', SHAPES, '--mode', 'train', '--job_log_dir', directory, *flags)


def results(job: Path) -> tuple[list[dict[str, float]], dict[str, bytes]]:
  """What the steps of a job computed, and the arrays and the position of the input in its last checkpoint."""
  names = ('step', 'loss', 'grad_norm', 'weight_norm')
  lines = {line['step']: {name: line[name] for name in names} for line in binary.metric_lines(job)}
  checkpoint = job / 'checkpoints' / f'checkpoint_{LAST_STEP:08d}'
  files = [path for part in ('state/*.*', 'input') for path in checkpoint.glob(f'{part}/*')]
  return [*lines.values()], {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


@pytest.fixture(scope='module')
def directory(tmp_path_factory) -> Path:
  return tmp_path_factory.mktemp('undisturbed')


@pytest.fixture(scope='module')
def finished(directory) -> binary.Finished:
  """A sweep that nothing has disturbed, which says what it compiles."""
  settings = {'JAX_COMPILATION_CACHE_DIR': '', 'JAX_LOGGING_LEVEL': 'DEBUG'}
  finished = binary.run_binary(*command(directory, '--sweep', 'all'), env=settings)
  assert finished.returncode == exit_codes.OK, finished.stderr
  return finished


@pytest.fixture(scope='module')
def undisturbed(directory, finished) -> Path:
  """The directory of a sweep that nothing has disturbed."""
  del finished
  return directory


def test_all_runs_each_job_in_its_directory(undisturbed):
  assert sorted(path.name for path in undisturbed.iterdir()) == NAMES
  steps, files = results(undisturbed / NAMES[0])
  assert len(steps) == LAST_STEP
  assert len(files) > 10  # kernels, biases and what Adam keeps of them
  config = json.loads((undisturbed / NAMES[3] / 'config.json').read_text())
  assert config['overrides'] == {'learning_rate': 0.5, 'seed': 1}
  losses = {name: binary.column(undisturbed / name, 'loss') for name in NAMES}
  assert len({loss[LAST_STEP] for loss in losses.values()}) == 4


def test_a_job_by_its_index_computes_what_it_computes_among_all(undisturbed, tmp_path):
  """Chosen by the index of an indexed Kubernetes Job, which then does not number the processes of one job."""
  pod = {'KUBERNETES_SERVICE_HOST': '127.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
  finished = binary.run_binary(*command(tmp_path, '--sweep_index'), env=pod)
  assert finished.returncode == exit_codes.OK, finished.stderr
  assert [path.name for path in tmp_path.iterdir()] == [NAMES[2]]
  assert results(tmp_path / NAMES[2]) == results(undisturbed / NAMES[2])


def kill_at_step(directory: Path, name: str, step: int, signum: signal.Signals) -> int:
  """Starts a sweep and signals it once a job has logged a step; returns the exit code."""
  flags = ('--sweep', 'all', '--set', 'seconds_per_batch=0.02')
  process = binary.start_binary(*command(directory, *flags))
  deadline = time.monotonic() + 150
  while len(binary.metric_lines(directory / name)) < step:
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline, 'the sweep does not get there'
    time.sleep(0.002)
  process.send_signal(signum)
  return binary.finish(process).returncode


def test_a_sweep_that_is_killed_and_preempted_computes_the_same_bits(undisturbed, tmp_path):
  assert kill_at_step(tmp_path, NAMES[0], 3, signal.SIGKILL) == -signal.SIGKILL
  assert kill_at_step(tmp_path, NAMES[2], 2, signal.SIGTERM) == exit_codes.PREEMPTED
  assert not (tmp_path / NAMES[3]).exists()  # a preempted job ends the sweep
  finished = binary.run_binary(*command(tmp_path, '--sweep', 'all'))
  assert finished.returncode == exit_codes.OK, finished.stderr
  assert 'resuming after step' in finished.stderr
  assert {name: results(tmp_path / name) for name in NAMES} == {name: results(undisturbed / name) for name in NAMES}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_20_kills_at_random_moments_change_no_bit(undisturbed, tmp_path):
  rng = random.Random(0)
  for _ in range(20):
    process = binary.start_binary(*command(tmp_path, '--sweep', 'all', '--set', 'seconds_per_batch=0.05'))
    time.sleep(rng.uniform(0.5, 5))
    process.kill()
    binary.finish(process)
  finished = binary.run_binary(*command(tmp_path, '--sweep', 'all'))
  assert finished.returncode == exit_codes.OK, finished.stderr
  assert {name: results(tmp_path / name) for name in NAMES} == {name: results(undisturbed / name) for name in NAMES}


def test_a_job_that_fails_ends_no_other(tmp_path):
  (tmp_path / NAMES[1]).write_text('not a directory')
  finished = binary.run_binary(*command(tmp_path, '--sweep', 'all'))
  assert finished.returncode == exit_codes.USAGE
  assert finished.stderr.splitlines()[-1] == f'spmd-tasks: 1 of 4 jobs failed: {NAMES[1]}'
  assert [name for name in NAMES if (tmp_path / name / 'metrics.jsonl').exists()] == [NAMES[0], *NAMES[2:]]


def test_jobs_that_differ_in_numbers_share_their_programs(finished):
  """Two learning rates and two seeds: the first job compiles for all of them."""
  first, *others = finished.stderr.split('spmd-tasks: job ')[1:]
  assert 'PERSISTENT COMPILATION CACHE MISS' in first
  for other in others:
    assert 'Persistent compilation cache hit' in other
    assert 'PERSISTENT COMPILATION CACHE MISS' not in other
