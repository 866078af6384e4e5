"""Profile: the hook of jobs that have steps captured by JAX's profiler."""

import tempfile

import jax

from spmd_tasks.files import is_remote, storage_errors
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome


class Profile(TrainHook):
  """Captures the steps [first, last) of `profile_steps` with JAX's profiler, for TensorBoard and XProf."""

  _is_running = False

  def prepare(self, run: TrainRun) -> None:
    assert run.experiment.profile_steps is not None
    self._steps = run.experiment.profile_steps
    self._directory = run.job_log_dir / 'profile'
    # JAX writes to disks alone.
    self._local = tempfile.mkdtemp(prefix='spmd_tasks_profile_') if is_remote(run.job_log_dir) else str(self._directory)

  def before_loop(self, run: TrainRun) -> None:
    run.stack.callback(self._stop)
    self._start_or_stop(run.first_step)

  def needs_state(self, step: int) -> bool:
    return step in self._steps  # no step may be in flight at the borders

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._start_or_stop(outcome.step)

  def _start_or_stop(self, step: int) -> None:
    is_inside = self._steps[0] <= step < self._steps[1]
    if is_inside and not self._is_running:
      with storage_errors(self._directory):
        jax.profiler.start_trace(self._local)
      self._is_running = True
    elif not is_inside:
      self._stop()

  def _stop(self) -> None:
    if self._is_running:
      self._is_running = False
      with storage_errors(self._directory):
        jax.profiler.stop_trace()
        if is_remote(self._directory):
          from spmd_tasks.stores import upload

          upload(self._local, self._directory)
