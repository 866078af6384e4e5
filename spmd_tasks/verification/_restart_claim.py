"""The claim that a killed job, started again, computes what an undisturbed one does; with the real binary.

Three processes train the shrunk experiment on its mesh: one is killed (SIGKILL) once it has a checkpoint, one continues
its directory, one is never disturbed. Metrics of every step and every bit of the last checkpoint must be the same.
"""

from collections.abc import Iterator
import concurrent.futures
import functools
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from etils import epath
import jax
import numpy as np

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import leaf_entries
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.runtime.metrics import read_jsonl
from spmd_tasks.verification._agreement import Difference, distance
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken
from spmd_tasks.verification._runner import leaves_of
from spmd_tasks.verification._settings import Setting, build_job

_NUM_STEPS, _SAVE_EVERY = 12, 2
_LIMIT_S = 600.0
_JOB = {
  'num_train_steps': _NUM_STEPS,
  'checkpoint_every_steps': _SAVE_EVERY,
  'checkpoint_max_to_keep': _NUM_STEPS,
  'log_every_steps': 1,
  'eval_every_steps': None,
  'profile_steps': None,
  'tensorboard': False,
}


def restart_cases(bench: Bench) -> Iterator[Case]:
  """Yields the one case; its processes run beside all other cases."""
  setting = Setting(mesh=bench.own_mesh)
  jobs = _Jobs(bench, setting.num_devices)
  yield Case(
    claim='restart',
    subject=f'killed and started again, {setting}',
    decide=functools.partial(_compare_jobs, setting=setting, jobs=jobs),
    settings=(Setting(),),
    begin=jobs.begin,
  )


def _compare_jobs(bench: Bench, setting: Setting, jobs: '_Jobs') -> Verdict:
  step, failed = jobs.wait()
  wrong = Difference(step=0, leaf=failed) if failed else _first_difference(bench, setting, jobs)
  if wrong is not None:
    return broken(bench, 'restart', setting, wrong)
  return Verdict(
    status='held', detail=f'killed after step {step} of {_NUM_STEPS}; metrics and the last checkpoint, bit for bit'
  )


# Tests start processes in another way, which is faster.
start_process = subprocess.Popen


class _Jobs:
  """Processes of the binary, which train the shrunk experiment in the directories `killed` and `undisturbed`."""

  def __init__(self, bench: Bench, num_devices: int):
    Path(bench.directory).mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix='restart_', dir=bench.directory))
    self.killed, self.undisturbed = directory / 'killed', directory / 'undisturbed'
    experiment, own = bench.source.flags[:2], bench.source.flags[2:]
    last = [f'ici_mesh_shape={",".join(str(size) for _, size in bench.own_mesh)}', 'dcn_mesh_shape=None']
    last += [f'{name}={value}' for name, value in _JOB.items()]
    before, after = ([f'--set={each}' for each in overrides] for overrides in (bench.source.shrinking, last))
    self._flags = [*experiment, *before, *own, *after, '--mode', 'train', '--num_fake_devices', str(num_devices)]
    # What the first job compiles, the others read.
    cache = {'JAX_COMPILATION_CACHE_DIR': str(directory / 'compiled')}
    self._env = {**cache, **os.environ, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    self._running: list[subprocess.Popen] = []
    self._ended: concurrent.futures.Future[tuple[int, str | None]]

  def begin(self, bench: Bench) -> None:
    """Starts the jobs, on another thread; the end of the bench is theirs too."""
    bench.on_close.callback(self._close)
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='restart')
    self._ended = thread.submit(self._run)
    thread.shutdown(wait=False)

  def wait(self) -> tuple[int, str | None]:
    """Waits for the jobs; returns the step after which one was killed, and what went wrong."""
    return self._ended.result()

  def _run(self) -> tuple[int, str | None]:
    step = self._kill_after_checkpoint(self.killed)
    return step, self._finish(self.killed, self.undisturbed)

  def _close(self) -> None:
    for process in self._running:
      if process.poll() is None:
        process.kill()
        process.wait()

  def _start(self, directory: Path) -> subprocess.Popen:
    with directory.with_suffix('.log').open('ab') as file:
      process = start_process(
        [sys.executable, '-m', 'spmd_tasks.main', *self._flags, '--job_log_dir', str(directory)],
        env=self._env,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=file,
      )
    self._running.append(process)
    return process

  def _kill_after_checkpoint(self, directory: Path) -> int:
    """Starts a job and kills it once it has a checkpoint; returns the checkpoint's step, or that of its end."""
    process = self._start(directory)
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
      saved = _saved_steps(directory)
      if saved:
        process.kill()
        process.wait()
        return max(_saved_steps(directory))
      time.sleep(0.005)
    process.kill()
    process.wait()
    return max(_saved_steps(directory), default=0)

  def _finish(self, *directories: Path) -> str | None:
    """Starts jobs and waits for their end; returns what the first that fails wrote last."""
    processes = [self._start(directory) for directory in directories]
    for directory, process in zip(directories, processes):
      try:
        code = process.wait(_LIMIT_S)
      except subprocess.TimeoutExpired:
        return f'a training job did not end within {_LIMIT_S:.0f} s'
      if code:
        lines = directory.with_suffix('.log').read_text(errors='replace').strip().splitlines()
        return f'a training job ended with exit code {code}: {lines[-1] if lines else "it wrote nothing"}'
    return None


def _saved_steps(directory: Path) -> list[int]:
  """Returns the steps of the checkpoints that are sealed."""
  names = [path.name.rpartition('_')[2] for path in (directory / 'checkpoints').glob('checkpoint_*')]
  return [int(name) for name in names if name.isdigit()]


def _first_difference(bench: Bench, setting: Setting, jobs: _Jobs) -> Difference | None:
  """Compares the metrics that a step computes, by step, then every leaf of the last checkpoints."""
  expected = bench.trajectory(Setting()).result(0)
  names = {name for name in (*expected.forward, *expected.updated) if '/' not in name}
  got, want = (read_jsonl(epath.Path(directory)) for directory in (jobs.killed, jobs.undisturbed))
  for step in range(1, _NUM_STEPS + 1):
    if step not in got or step not in want:
      return Difference(step=step, leaf='metrics.jsonl has no such step')
    for name in sorted(names):
      value, wanted = (np.asarray(record[step].get(name, np.nan)) for record in (got, want))
      if not np.array_equal(value, wanted, equal_nan=True):
        return Difference(step=step, leaf=name, difference=distance(value, wanted))
  job = build_job(bench.source, setting)
  states = [_last_state(job, setting, directory) for directory in (jobs.killed, jobs.undisturbed)]
  for name, value in leaves_of(states[1]).items():
    other = leaves_of(states[0])[name]
    if value.tobytes() != other.tobytes():
      return Difference(step=_NUM_STEPS, leaf=f'checkpoint: {name}', difference=distance(value, other))
  return None


def _last_state(job: Job, setting: Setting, directory: Path) -> Any:
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[: setting.num_devices]))
  checkpointer, state = Checkpointer(directory / 'checkpoints', read_only=True), model.canonical_state
  names = {leaf.name for leaf in checkpointer.saved_leaves(_NUM_STEPS)}
  if not names.issuperset(leaf.name for leaf in leaf_entries(state.weights)):  # frozen weights are in a folder
    state = model.trained_part(state)
  restored = checkpointer.restore(state, _NUM_STEPS)
  assert restored is not None
  return jax.device_get(restored.state)
