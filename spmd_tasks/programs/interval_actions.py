"""IntervalActions: saves, copies, evaluates and samples the state of a training job, at intervals and at its end.

    if is_multiple(step, experiment.checkpoint_every_steps):
      actions.save()

Each action has a time limit of its own, and goodput counts its time as a loss with a cause.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import math
import time

from spmd_tasks.checkpoints import Checkpointer, PeerCopies, num_bytes
from spmd_tasks.distributed import StepWatchdog, is_primary, primary_decides
from spmd_tasks.experiment import Experiment
from spmd_tasks.programs.early_end import EarlyEnd
from spmd_tasks.programs.eval import Evaluator
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.progress import Progress, format_metrics
from spmd_tasks.programs.samples import Sampler
from spmd_tasks.programs.training_loop import TrainingLoop
from spmd_tasks.runtime import Part, PartitionedModel

# A smaller state is on disk before the next step begins, so that a kill loses one interval at most; that takes about a
# second. A larger one is written while training goes on.
_WRITTEN_AT_ONCE_BYTES = 100_000_000


def is_multiple(step: int, every_steps: int | None) -> bool:
  """Returns whether a step ends an interval; never without an interval, nor at step 0."""
  return every_steps is not None and step > 0 and step % every_steps == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntervalActions:
  """The actions of one job. But for `compile`, call them with no step in flight: they read the loop's newest state.

  Attributes:
    experiment: gives intervals and time limits.
    model, part: the partitioned model, and the part of its state that checkpoints have.
    loop: its state, step and input position are saved, evaluated and sampled from.
    checkpointer, evaluator: save and evaluate.
    copies, sampler: copy the state in memory and generate texts; None where the experiment asks for none.
    early_end: gets the metrics of evals.
    watchdog, goodput, progress: bound the time, count it, and tell the user.
    should_stop: whether SIGTERM asks for an end.
  """

  experiment: Experiment
  model: PartitionedModel
  part: Part
  loop: TrainingLoop
  checkpointer: Checkpointer
  copies: PeerCopies | None
  evaluator: Evaluator
  sampler: Sampler | None
  early_end: EarlyEnd
  watchdog: StepWatchdog
  goodput: Goodput
  progress: Progress
  should_stop: Callable[[], bool]

  @contextlib.contextmanager
  def _timed(self, activity: str, cause: str) -> Iterator[None]:
    with self.watchdog.allow(activity, self.experiment.first_step_timeout_s), self.goodput.spend(cause):
      yield

  def compile(self) -> None:
    """Compiles now what would first be needed hours later: an eval that cannot be compiled should fail at the start."""
    with self._timed('compile', 'compilation'):
      self.evaluator.compile()
      if self.sampler is not None:
        self.sampler.compile()
      self.model.compile_conversions(self.part)
      self.checkpointer.prepare()

  def save(self) -> None:
    """Saves a checkpoint; a large one is still being written when this returns."""
    with self._timed('checkpoint', 'checkpoint_save'):
      self.checkpointer.save(self.loop.step, self.model.to_canonical(self.loop.state, self.part), self.loop.input_state)
      if num_bytes(self.part(self.model.canonical_state)) < _WRITTEN_AT_ONCE_BYTES:
        self.checkpointer.wait()
    self.goodput.mark(self.loop.step)

  def wait_for_save(self) -> None:
    """Returns when the last checkpoint is complete on disk."""
    with self._timed('checkpoint', 'checkpoint_save'):
      self.checkpointer.wait()

  def copy(self) -> None:
    """Copies the state to the memory of two processes each."""
    assert self.copies is not None
    newest = self.checkpointer.latest_step() if is_primary() else None
    with self._timed('copy', 'checkpoint_save'):
      self.copies.copy(self.loop.step, self.loop.state, self.loop.input_state, newest)
    self.goodput.mark(self.loop.step)

  def evaluate(self, names: Sequence[str] | None = None) -> bool:
    """Evaluates these sets (None: all); returns False if SIGTERM came before the last one was finished."""
    names = self.evaluator.names if names is None else names
    variables = self.model.task.evaluation_variables(self.loop.state)
    evals, start = {}, time.perf_counter()
    with self._timed('eval', 'evaluation'):
      for name, metrics in self.evaluator.evaluate(variables, self.loop.step, names):
        self.evaluator.record(name, self.loop.step, metrics)
        self.progress.message(f'step {self.loop.step}  eval {name}: ' + format_metrics(metrics))
        evals[name] = metrics
    if len(evals) == len(names):
      self.early_end.evals_done(self.loop.step, evals, time.perf_counter() - start)
    return len(evals) == len(names)

  def missing_evals(self) -> list[str]:
    """Returns the eval sets of the restored step that are due and not recorded: the last job was ended in that eval.

    These are all sets where their metrics together decide whether the job ends.
    """
    step = self.loop.step
    was_due = step >= self.experiment.num_train_steps or is_multiple(step, self.experiment.eval_every_steps)
    if step == 0 or not was_due:
      return []
    missing = primary_decides(
      lambda: [name for name in self.evaluator.names if not self.evaluator.is_recorded(name, step)],
      'missing_evals',
      limit_s=math.ceil(self.experiment.step_timeout_s),
    )
    return self.evaluator.names if missing and self.early_end.asks_after_evals() else missing

  def sample_if_due(self) -> bool:
    """Writes the sampled texts of the step unless they are written; returns False if SIGTERM came first."""
    step = self.loop.step
    due = is_multiple(step, self.experiment.sample_every_steps)
    if self.sampler is None or not due or self.sampler.is_recorded(step):
      return True
    with self._timed('sample', 'evaluation'):
      is_done = self.sampler.sample(self.model.task.decoding_variables(self.loop.state), step, self.should_stop)
    if is_done:
      self.progress.message(f'step {step}  samples: in {self.sampler.path}')
    return is_done
