"""Defines TrainHook, what a training job does beside its steps (checkpoints, evals, logs), and TrainRun, what it sees.

    class BestLoss(TrainHook):
      '''Notes the smallest eval loss.'''

      best = float('inf')

      def after_step(self, run, outcome):
        if run.evals.step == outcome.step:                   # there was an eval after this step
          self.best = min(self.best, run.evals.metrics['valid']['loss'])

      def finish(self, run):
        run.message(f'the best eval loss was {self.best:.4f}')

    class MyExperiment(Base):
      def hooks(self):
        return [BestLoss()]

A job has its hooks in one declared order (`job_hooks` in train.py), and each method below is called on all of them in
that order before the next one is called on any. The methods, in the order of a job's life:

    prepare            the whole config is known; nothing is written yet
    open               the directory is the job's own; no state yet
    restore            asked before the store: may give the state to go on from
    start              there is a state; the train step may not be compiled yet
    batches            asked before the input is read: may give the loop its batches
    before_loop        everything is compiled, and SIGTERM is kept for `should_stop`
    before_step        a batch is there, and the step on it is about to be launched
    after_first_step   of this process, before `after_step` of the same step
    after_step         every step that counts; `after_skipped_step` for one that was not finite and changed nothing
    after_loop         whatever has ended the loop: the last step, SIGTERM, an early end, the end of the input
    finish             only if the training is complete: after the last step or an early end

Several processes call the same hooks at the same steps. A hook that computes with the state, compiles or communicates
does that on every process, after the same steps: it decides by the step, by metrics (all processes have the same) or by
`distributed.primary_decides`. Only process 0 writes (`is_primary()`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from spmd_tasks.activity import doing

if TYPE_CHECKING:
  import jax
  import numpy as np

  from spmd_tasks.checkpoints import Checkpointer
  from spmd_tasks.checkpoints.peer_copies import RestoredCopy
  from spmd_tasks.distributed.preemption import PreemptionGuard
  from spmd_tasks.distributed.watchdog import StepWatchdog
  from spmd_tasks.experiment import Experiment, Job
  from spmd_tasks.inputs import InputIterator, Prefetcher
  from spmd_tasks.programs.goodput import Goodput
  from spmd_tasks.programs.progress import Progress
  from spmd_tasks.programs.training_loop import Outcome, TrainingLoop
  from spmd_tasks.runtime import PartitionedModel, TrainState
  from spmd_tasks.runtime.metrics import Metrics


class PreemptedError(Exception):
  """Ends a program after SIGTERM, from the point where the program noticed the signal."""


class NewestEvals(NamedTuple):
  """The newest evals of all eval sets of a job.

  Attributes:
    step: after which they were made; -1: there were none yet.
    metrics: by eval set.
    seconds: how long they took.
    examples: by eval set, where a hook `wants_examples`: name -> one value per example, of the loss.
  """

  step: int = -1
  metrics: 'Mapping[str, Metrics]' = {}
  seconds: float = 0.0
  examples: 'Mapping[str, Mapping[str, np.ndarray]]' = {}


class Logged(NamedTuple):
  """The newest metrics that were written: after which step (-1: none yet), and all of them by name."""

  step: int = -1
  metrics: 'Metrics' = {}


class TrainHook:
  """Base class of hooks: every method does nothing. See the module's docstring for when each is called.

  What a method raises ends the job; a UserError does so in one sentence, with exit code 2.

  Attributes:
    wants_examples: whether it reads the loss's per-example outputs, `outcome.outputs.examples()` of a step and
      `run.evals.examples` of evals, which are then copied to every process.
  """

  wants_examples: bool = False

  def prepare(self, run: 'TrainRun') -> None:
    """Checks what the hook needs, and raises a UserError if it is not there. Nothing may be written."""

  def open(self, run: 'TrainRun') -> None:
    """Opens files, threads and connections; `run.stack` closes them at the job's end."""

  def restore(self, run: 'TrainRun', newest_checkpoint: int) -> 'RestoredCopy | None':
    """Returns a state to go on from instead of the newest checkpoint (-1: there is none); the first answer counts."""
    return None

  def start(self, run: 'TrainRun') -> None:
    """Does what needs the first state, of step `run.first_step`, which may be that of the last step."""

  def batches(self, run: 'TrainRun', iterator: 'InputIterator') -> Any:
    """Returns what the loop takes its batches from in place of reading the input ahead; the first answer counts.

    It is an iterator of (placed batch, position after it) with the attribute `seconds_waited`, as a Prefetcher.
    """
    return None

  def before_loop(self, run: 'TrainRun') -> None:
    """Does what an earlier process of the job was ended in. Raises PreemptedError if `run.should_stop()` came first."""

  def needs_state(self, step: int) -> bool:
    """Returns whether `after_step` reads `run.state` after this step. The next step is launched only then.

    Decides by `step` alone, so that all processes answer alike. Otherwise the device already computes the next step
    while the hook runs, and `run.state` raises a RuntimeError.
    """
    return False

  def before_step(self, run: 'TrainRun', batch: 'dict[str, jax.Array]') -> None:
    """Looks at the placed batch of the next step, which what it raises prevents; `run.state` needs `needs_state`."""

  def after_first_step(self, run: 'TrainRun') -> None:
    """Compiles now what is first needed at an interval: what cannot be compiled should fail at the start."""

  def after_step(self, run: 'TrainRun', outcome: 'Outcome') -> None:
    """Does what is due after a step: `outcome.step` updates are applied, `outcome.metrics` are on the devices.

    Returns early if `run.should_stop()`: the loop then ends after this step.
    """

  def after_skipped_step(self, run: 'TrainRun', outcome: 'Outcome') -> None:
    """Hears that a step changed nothing, because its loss or a gradient was not finite."""

  def after_loop(self, run: 'TrainRun') -> None:
    """Keeps what is to be kept: no step is in flight, and `run.state` is that of `run.step`."""

  def finish(self, run: 'TrainRun') -> None:
    """Does what is due at the end of the training. Raises PreemptedError if `run.should_stop()` came first."""


class TrainRun:
  """A running training job, as its hooks see it. Attributes are in the order of the job's life.

  Attributes:
    job, job_log_dir: the built experiment, and the job's directory.
    model: the partitioned model.
    hooks: all hooks of the job, in their order.
    goodput: counts where the time goes.
    stack: closes at the job's end, newest first, what hooks have opened: `run.stack.enter_context(...)`.
    end_reason: why the job ends before its last step; None: it does not.

    watchdog: ends processes that make no progress (from `open` on).
    base: waits for what each checkpoint says about weights that it leaves out; a hook may set it in `open`.

    checkpointer: saves and restores (from `restore` on).

    progress: shows steps, metrics and messages (from `start` on).
    first_step, origin: the step after which this process goes on, and a phrase about where its state is from.
    loop: launches the steps; has the state, the input's position and counts.
    batches: takes them from the input (from `before_loop` on).
    evals: the newest ones.
    logged: the metrics that were written last.
    metrics: of hooks, scalars by name; they are written with those of the next logged step.
  """

  watchdog: 'StepWatchdog'
  checkpointer: 'Checkpointer'
  progress: 'Progress'
  loop: 'TrainingLoop'
  batches: 'Prefetcher'

  def __init__(
    self,
    *,
    job: 'Job',
    job_log_dir: epath.Path,
    model: 'PartitionedModel',
    hooks: Sequence[TrainHook],
    goodput: 'Goodput',
    guard: 'PreemptionGuard',
    stack: contextlib.ExitStack,
  ):
    self.job = job
    self.job_log_dir = job_log_dir
    self.model = model
    self.hooks = tuple(hooks)
    self.goodput = goodput
    self.stack = stack
    self.end_reason: str | None = None
    self.base: Callable[[], Mapping[str, str]] | None = None
    self.first_step, self.origin = -1, ''
    self.evals = NewestEvals()
    self.logged = Logged()
    self.metrics: dict[str, float] = {}
    self._guard = guard

  @property
  def experiment(self) -> 'Experiment':
    """The experiment of the job, whose fields are its config."""
    return self.job.experiment

  @property
  def limit_s(self) -> int:
    """How long processes wait for each other."""
    return math.ceil(self.experiment.first_step_timeout_s)

  @property
  def step(self) -> int:
    """How many updates are applied: the step of the last outcome."""
    return self.loop.step

  @property
  def state(self) -> 'TrainState':
    """The live, padded state after `step`; the next step uses up its arrays.

    Raises:
      RuntimeError: the device may be computing the next step already, because no hook `needs_state` after this one.
    """
    if self.loop.is_running and not self.is_awaited(self.step):
      raise RuntimeError(f'the state of step {self.step} may be gone: needs_state({self.step}) is False of all hooks.')
    return self.loop.state

  def is_awaited(self, step: int) -> bool:
    """Returns whether a hook needs the state after this step, or there is no step after it."""
    return step >= self.experiment.num_train_steps or any(hook.needs_state(step) for hook in self.hooks)

  def should_stop(self) -> bool:
    """Whether SIGTERM or Ctrl-C asks for an end. Every process asks at the same points, because calls are counted."""
    return self._guard.should_stop()

  def end_early(self, reason: str) -> None:
    """Ends the job after this step, or after the next one if that is launched already.

    Every process calls it after the same step. The job ends like one that has made all its steps.
    """
    self.end_reason = reason

  def message(self, text: str) -> None:
    """Shows a line to the user, on process 0."""
    self.progress.message(text)

  @contextlib.contextmanager
  def timed(self, activity: str, cause: str) -> Iterator[None]:
    """Bounds the time inside by `first_step_timeout_s` instead of `step_timeout_s`, and counts it as lost.

    Args:
      activity: a word for messages about a process that hangs.
      cause: one of goodput's CAUSES.
    """
    with self.watchdog.allow(activity, self.experiment.first_step_timeout_s), self.goodput.spend(cause):
      yield

  @contextlib.contextmanager
  def compiling(self) -> Iterator[None]:
    """Bounds and counts the time inside, in which `after_first_step` compiles."""
    with doing('compiling for evals and checkpoints'), self.timed('compile', 'compilation'):
      yield
