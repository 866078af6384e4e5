"""Bench: compiles an experiment's settings, two at a time, and keeps their programs and the references' steps."""

from collections.abc import Iterable, Sequence
import concurrent.futures
import contextlib
import functools

import jax

from spmd_tasks.verification._agreement import Agreement, agree
from spmd_tasks.verification._batches import draw_batches
from spmd_tasks.verification._layouts import Mesh, scaled_mesh
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Setting, Source
from spmd_tasks.verification._trajectory import Trajectory


class Bench:
  """An experiment on this process's devices, in any setting."""

  def __init__(self, source: Source, *, num_devices: int, directory: str, num_steps: int = 4, seed: int = 0):
    """Makes a bench; nothing is compiled yet.

    Args:
      source: the experiment.
      num_devices: how many devices may be used.
      directory: gets the files of child processes.
      num_steps: how many steps are compared.
      seed: of everything that is drawn.
    """
    self.source, self.num_devices, self.directory = source, num_devices, directory
    self.num_steps, self.seed = num_steps, seed
    # Programs are compiled on two threads and run on one: two programs at once could wait for each other's devices.
    self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix='compile')
    self._runners: dict[Setting, concurrent.futures.Future[Runner]] = {}
    self._trajectories: dict[Setting, Trajectory] = {}
    self.on_close = contextlib.ExitStack()

  @functools.cached_property
  def own_mesh(self) -> Mesh:
    """The experiment's mesh, scaled to the devices."""
    return scaled_mesh(self.source.base.experiment, self.num_devices)

  def prepare(self, settings: Iterable[Setting]) -> None:
    """Begins to compile these settings on other threads; `runner` waits for them."""
    for setting in settings:
      if setting not in self._runners:
        self._runners[setting] = self._pool.submit(self._compile, setting)

  def runner(self, setting: Setting) -> Runner:
    """Returns the compiled setting.

    Raises:
      UserError: the experiment refuses it.
    """
    self.prepare([setting])
    return self._runners[setting].result()

  def _compile(self, setting: Setting) -> Runner:
    runner = Runner(self.source, setting)
    runner.model.train_step.compile()
    return runner

  def close(self) -> None:
    """Ends the threads that compile, and what was given to `on_close.callback`."""
    self.on_close.close()
    self._pool.shutdown(cancel_futures=True)

  def trajectory(self, setting: Setting) -> Trajectory:
    """Returns the steps of a reference."""
    if setting not in self._trajectories:
      runner = self.runner(setting)
      # Weights are drawn once: those of a setting with the same weights are the same, and drawing compiles a program.
      known = (each for each in self._trajectories.values() if _shapes(each.runner) == _shapes(runner))
      same = next(known, None)
      initial = runner.init() if same is None else same.state(0)
      batches = draw_batches(runner.job.train_input, self.num_steps, self.seed)
      self._trajectories[setting] = Trajectory(runner, initial, batches, self.seed)
    return self._trajectories[setting]

  def agree(
    self, setting: Setting, reference: Setting, *, metrics: Sequence[str] | None = None, train: bool = True
  ) -> Agreement:
    """Compares a setting with a reference, step by step, up to the first difference; see `agree`.

    Raises:
      UserError: the experiment refuses one of the settings.
    """
    return agree(self.runner(setting), self.trajectory(reference), metrics=metrics, train=train)


def _shapes(runner: Runner) -> object:
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), runner.model.canonical_state)
