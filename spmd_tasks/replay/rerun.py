"""Runs the training program again over past steps, from an earlier checkpoint, in a directory of its own.

    watcher = Watch(directory=job_log_dir, first=120, last=160, ...)
    rerun(opened, watcher)                     # watcher.after_step was called with steps 120 to 160

There is no second training loop: the same program runs with other hooks. Those that save, evaluate, log and sample are
left out; those that give batches (rollouts, references) stay.
"""

import contextlib
import json
import tempfile
from typing import Any

from etils import epath
import jax

from spmd_tasks import wings
from spmd_tasks.checkpoints.peer_copies import RestoredCopy
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.programs import train
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.programs.report_hooks import CountGoodput
from spmd_tasks.programs.restore import LOOK_LIMIT_S, saved_state
from spmd_tasks.programs.training_loop import Outcome, TrainingDivergedError
from spmd_tasks.replay.fingerprints import Prints, tree_fingerprints
from spmd_tasks.runtime.metrics import Metrics, finish_metrics
from spmd_tasks.runtime.origin import saved_part


class Watch(TrainHook):
  """Restores the nearest checkpoint before `first`, sees steps `first` to `last`, and ends the run.

  A subclass says what is looked at: `look` before a step, with its batch, and `see` after it.

  Attributes:
    checkpoint: the step of the checkpoint that the run went on from; 0: newly made weights.
    fingerprints: of the states at steps at which `reference` has a checkpoint: step -> (replayed, saved).
  """

  def __init__(self, *, directory: epath.Path, reference: epath.Path, first: int, last: int):
    self._directory, self._reference = directory, reference
    self._first, self._last = first, last
    self._saved: dict[int, Prints] = {}
    self._position: Any = None
    self.checkpoint = 0
    self.fingerprints: dict[int, tuple[Prints, Prints]] = {}

  def prepare(self, run: TrainRun) -> None:
    if self._last > run.experiment.num_train_steps:
      raise UserError(f'step {self._last} is behind the last of the job, {run.experiment.num_train_steps}.')
    self._part = saved_part(run.model, run.experiment.origin())

  def restore(self, run: TrainRun, newest_checkpoint: int) -> RestoredCopy | None:
    with _checkpoints(self._reference) as reference:
      wanted = [step for step in _steps(reference) if self._first <= step <= self._last]
      for step in wanted:
        restored = reference.restore(self._part(run.model.canonical_state), step)
        self._saved[step] = tree_fingerprints(restored.state)
        del restored
    with _checkpoints(self._directory) as own:
      earlier = [step for step in _steps(own) if step < self._first]
      if not earlier:
        return None  # the run begins as the job did
      saved = saved_state(run.model, own, run.job, max(earlier))
    assert saved is not None
    state, self.checkpoint, self._position = saved
    origin = f'the checkpoint of step {self.checkpoint}'
    return RestoredCopy(step=self.checkpoint, state=state, input_state=self._position, origin=origin)

  def needs_state(self, step: int) -> bool:
    return step == self._first - 1 or step >= self._last or step in self._saved

  def before_step(self, run: TrainRun, batch: dict[str, jax.Array]) -> None:
    if self._first <= run.step + 1 <= self._last:
      self.look(run, batch, self._position)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state
    if not self._first <= outcome.step <= self._last:
      return
    if outcome.step in self._saved:
      state = run.model.to_canonical(run.state, self._part)
      self.fingerprints[outcome.step] = tree_fingerprints(state), self._saved[outcome.step]
    if not self.see(run, outcome, step_metrics(outcome)) or outcome.step == self._last:
      run.end_early('all steps that were asked for are made again')

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state

  def look(self, run: TrainRun, batch: dict[str, jax.Array], position: Any) -> None:
    """Looks at the placed batch of a step, before which this process's input was at `position`; None: at its begin."""

  def see(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    """Takes a step that was made; returns whether to go on."""
    raise NotImplementedError


def step_metrics(outcome: Outcome) -> Metrics:
  """Returns the metrics of a step itself as metrics.jsonl has them. Waits for the step."""
  metrics = finish_metrics(jax.device_get(outcome.metrics))
  metrics.pop('skipped', None)
  return metrics


def rerun(opened: OpenJob, watch: Watch) -> str | None:
  """Runs the training program with `watch`; returns why the job could not go on, or None."""
  own = [hook for hook in opened.job.experiment.hooks() if type(hook).batches is not TrainHook.batches]
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_replay_') as directory:
    try:
      train.train(
        opened.job,
        epath.Path(directory),
        emergency=opened.emergency,
        begun=opened.begun,
        config_json=json.dumps(opened.config) + '\n',
        hooks=(CountGoodput(), *wings.train_hooks(opened.job), *own, watch),
      )
    except TrainingDivergedError as error:
      return str(error)
  return None


def _checkpoints(directory: epath.Path) -> Any:
  return contextlib.closing(SavedSteps(directory).open_checkpoints(read_only=True))


def _steps(checkpointer: Any) -> list[int]:
  return primary_decides(checkpointer.all_steps, 'replay_steps', limit_s=LOOK_LIMIT_S)
