"""Profile: the hook that has JAX's profiler capture steps, which the experiment names or somebody asks for.

echo 5 > runs/mine/profile_now          # the next five steps of a running job, as process 0 sees them
echo 5 3 > runs/mine/profile_now        # as process 3 does
"""

import contextlib
import tempfile

from etils import epath
import jax

from spmd_tasks.distributed import is_primary
from spmd_tasks.files import is_remote, make_directory, read_text, storage_errors
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome


def take_request(run: TrainRun, request: epath.Path, step: int) -> 'Profile | None':
  """Begins to profile as a file asks that has appeared, and removes it; None where it asks another process."""
  try:
    words = read_text(request).split()
    words += ['5', '0'][len(words) :]
    process = int(words[1][:9]) if words[1].isdecimal() else -1
    if process != jax.process_index() and (process in range(jax.process_count()) or not is_primary()):
      return None
    request.unlink(missing_ok=True)
  except FileNotFoundError:  # another process has just taken it
    return None
  except (OSError, ValueError) as error:  # of another user, or no text: no reason to end the job
    run.message(f'{request} cannot be read: {error}')
    with contextlib.suppress(OSError):
      request.unlink(missing_ok=True)
    return None
  is_number = words[0].isdecimal() and len(words[0]) < 10 and int(words[0]) > 0
  if process != jax.process_index() or not is_number:
    wanted = f'write a number of steps and a process, if not 0, of {jax.process_count()}'
    run.message(f'{request} asks for {" ".join(words)!r}: {wanted}.')
    return None
  profile = Profile((step, step + int(words[0])))
  profile.prepare(run)
  with contextlib.suppress(RuntimeError):  # the profiler runs already, for profile_steps
    profile.before_loop(run, step)
    run.message(f'profiling {words[0]} steps of process {words[1]}: see {run.job_log_dir / "profile"}')
    return profile
  return None


class Profile(TrainHook):
  """Captures the steps [first, last), by default those of `profile_steps`, for TensorBoard and XProf."""

  is_running = False

  def __init__(self, steps: tuple[int, int] | None = None):
    self._asked = steps

  def prepare(self, run: TrainRun) -> None:
    steps = self._asked or run.experiment.profile_steps
    assert steps is not None
    self._steps = steps
    self._directory = run.job_log_dir / 'profile'
    # JAX writes to disks alone.
    self._local = tempfile.mkdtemp(prefix='spmd_tasks_profile_') if is_remote(run.job_log_dir) else str(self._directory)

  def before_loop(self, run: TrainRun, step: int | None = None) -> None:
    run.stack.callback(self._stop)
    self._start_or_stop(run.first_step if step is None else step)

  def needs_state(self, step: int) -> bool:
    return step in self._steps  # no step may be in flight at the borders

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._start_or_stop(outcome.step)

  def _start_or_stop(self, step: int) -> None:
    is_inside = self._steps[0] <= step < self._steps[1]
    if is_inside and not self.is_running:
      with storage_errors(self._directory):
        make_directory(self._directory)
        jax.profiler.start_trace(self._local)
      self.is_running = True
    elif not is_inside:
      self._stop()

  def _stop(self) -> None:
    if self.is_running:
      self.is_running = False
      with storage_errors(self._directory):
        jax.profiler.stop_trace()
        if is_remote(self._directory):
          from spmd_tasks.stores import upload

          upload(self._local, self._directory)
