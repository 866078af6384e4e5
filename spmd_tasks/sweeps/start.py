"""Lists or runs the jobs of a sweep: --sweep_list, --sweep_index and --sweep all."""

import argparse
from collections.abc import Iterable, Iterator
import contextlib
import os
import sys
import tempfile
import time

import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd_tasks import exit_codes
from spmd_tasks.command import Command
from spmd_tasks.config.resolution import ResolvedConfig, resolve_experiment, split_override
from spmd_tasks.distributed.initialization import skip_absent_tpu
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path, is_missing
from spmd_tasks.main import run_flags
from spmd_tasks.programs.compiled_programs import programs_directory
from spmd_tasks.programs.job_directory import CONFIG_FILE
from spmd_tasks.sweeps.jobs import SweepJob, jobs_of, sweep_of
from spmd_tasks.sweeps.optuna_choices import ByOptuna

_INDEX_VARIABLES = ('SLURM_ARRAY_TASK_ID', 'JOB_COMPLETION_INDEX')  # of a Slurm array, an indexed Kubernetes Job


def start(flags: argparse.Namespace) -> int | None:
  """Lists the jobs of a sweep or runs them all and returns an exit code, or turns `flags` into those of one job."""
  if flags.exp is None:
    raise UserError('a sweep needs --exp NAME, the experiment whose sweep() has its jobs.')
  command = Command(flags=flags)
  if flags.sweep_index is None:
    command.use_fake_devices()
    skip_absent_tpu()
  experiment = resolve_experiment(flags.exp, command.overrides, flags.experiment_path)
  sweep = sweep_of(experiment)
  if isinstance(sweep, ByOptuna):
    if flags.sweep is None or flags.mode not in (None, 'train'):
      raise UserError(
        'by_optuna() chooses a job by the results of the earlier ones: --mode train --sweep all runs them.'
      )
    jobs = [sweep.example()]
  else:
    jobs = jobs_of(experiment)
  _refuse_set_twice(command, jobs)
  if flags.sweep_index is None:
    resolved = _check_jobs(command, jobs)
    if isinstance(sweep, ByOptuna):
      sweep.check_metric(resolved[0].parts['eval_inputs'])
  if flags.sweep_list:
    width = max(len(job.name) for job in jobs)
    print('\n'.join(f'{index:4}  {job.name:{width}}  {" ".join(job.overrides)}' for index, job in enumerate(jobs)))
    return exit_codes.OK
  if flags.job_log_dir and not is_missing(absolute_path(flags.job_log_dir) / CONFIG_FILE):
    raise UserError(
      f'--job_log_dir {flags.job_log_dir} is the directory of a job: give another one, below which each job of the '
      'sweep has its own. Without --sweep_index the job itself continues.'
    )
  if isinstance(sweep, ByOptuna):
    return _run_all(flags, sweep.jobs(flags.job_log_dir), sweep.count)
  if flags.sweep is not None:
    return _run_all(flags, enumerate(jobs, 1), len(jobs))
  _choose(flags, jobs[_index(flags, len(jobs))])
  return None


def _refuse_set_twice(command: Command, jobs: list[SweepJob]) -> None:
  """Raises a UserError if the user's overrides set what the sweep sets."""
  by_user = {split_override(override)[0] for override in command.overrides}
  for job in jobs:
    if both := by_user & {split_override(override)[0] for override in job.overrides}:
      path = '.'.join(min(both))
      raise UserError(f'{path} is set by the command, and by the sweep in {job.name}: remove it from one of them.')


def _check_jobs(command: Command, jobs: list[SweepJob]) -> list[ResolvedConfig]:
  """Returns the config of each job. Raises a UserError if the overrides of one are wrong, before any job runs."""
  resolved = []
  for job in jobs:
    try:
      resolved.append(command.resolve(after=job.overrides))
    except UserError as error:
      raise UserError(f'job {job.name} of the sweep: {error}') from error
  return resolved


def _index(flags: argparse.Namespace, num_jobs: int) -> int:
  """Returns the index of the job to run. Raises a UserError if there is no such job."""
  index, source = flags.sweep_index, f'--sweep_index {flags.sweep_index}'
  if index is True:  # the flag without a number
    variable = next((name for name in _INDEX_VARIABLES if name in os.environ), None)
    if variable is None:
      raise UserError(
        f'--sweep_index without a number needs {" or ".join(_INDEX_VARIABLES)} in the environment: give one of 0 to '
        f'{num_jobs - 1}.'
      )
    source = f'{variable}={os.environ[variable]}'
    index = int(os.environ[variable]) if os.environ[variable].isdecimal() else -1
    if variable == 'JOB_COMPLETION_INDEX':  # then it does not number the processes of one job
      _run_alone(flags)
  if not 0 <= index < num_jobs:
    raise UserError(f'{source} is not a job of the sweep, which has {num_jobs}: use 0 to {num_jobs - 1}.')
  return index


def _run_alone(flags: argparse.Namespace) -> None:
  """Makes jobs run in this process alone, whatever the launcher."""
  if flags.cluster == 'auto' and flags.coordinator_address is None:
    flags.cluster = 'none'


def _choose(flags: argparse.Namespace, job: SweepJob) -> None:
  """Turns `flags` into those of a job of the sweep."""
  flags.sweep = flags.sweep_index = None
  flags.overrides = [*flags.overrides, *job.overrides]
  if flags.job_log_dir:
    flags.job_log_dir = f'{flags.job_log_dir.rstrip("/")}/{job.name}'


@contextlib.contextmanager
def _shared_programs(flags: argparse.Namespace) -> Iterator[None]:
  """Lets the jobs read one another's compiled programs; nothing changes if the command names a place for them."""
  settings = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')
  before = {name: getattr(jax.config, name) for name in settings}
  if flags.compilation_cache or before['jax_compilation_cache_dir']:
    yield
    return
  with contextlib.ExitStack() as stack:
    path = None
    if jax.default_backend() != 'cpu':  # on accelerators a job keeps its programs for its next start
      path = programs_directory(absolute_path(flags.job_log_dir))
    path = path or stack.enter_context(tempfile.TemporaryDirectory(prefix='spmd_tasks_compiled_'))
    flags.compilation_cache = os.fspath(path)
    stack.callback(compilation_cache.reset_cache)  # JAX does not notice another directory by itself
    for name, value in before.items():
      stack.callback(jax.config.update, name, value)
    compilation_cache.reset_cache()
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    yield


def _run_all(flags: argparse.Namespace, jobs: Iterable[tuple[int, SweepJob]], count: int) -> int:
  """Runs all numbered jobs; returns the exit code of the first one that failed. A preempted job ends the sweep."""
  if flags.mode is None or not flags.job_log_dir:
    raise UserError('--sweep all needs --mode, such as train, and --job_log_dir, which gets a directory for each job.')
  if flags.num_processes not in (None, 1):
    raise UserError(
      f'--sweep all runs in one process, but --num_processes is {flags.num_processes}: give --sweep_index N to several.'
    )
  _run_alone(flags)
  codes: dict[str, int] = {}
  with _shared_programs(flags):
    for number, job in jobs:
      of_job = argparse.Namespace(**vars(flags))
      _choose(of_job, job)
      print(f'spmd-tasks: job {number} of {count}: {of_job.job_log_dir}', file=sys.stderr, flush=True)
      codes[job.name] = run_flags(of_job, called=time.monotonic())
      if codes[job.name] in (exit_codes.PREEMPTED, exit_codes.INTERRUPTED):
        return codes[job.name]
  failed = {name: code for name, code in codes.items() if code != exit_codes.OK}
  if failed:
    print(f'spmd-tasks: {len(failed)} of {count} jobs failed: {", ".join(failed)}', file=sys.stderr)
  elif flags.mode == 'train':
    print(f'spmd-tasks: all {count} jobs are complete: --mode compare {flags.job_log_dir}', file=sys.stderr)
  return next(iter(failed.values()), exit_codes.OK)
