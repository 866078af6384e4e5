"""Defines TrainHook, what a training job does beside its steps (checkpoints, evals, logs), and TrainRun, what it sees.

    class Watched(MyExperiment):
      def hooks(self):
        return [BestLoss()]              # docs/hooks.md has this one

A job has its hooks in one declared order (`job_hooks` in train.py). The methods of TrainHook stand in the order of a
job's life; each is called on all hooks in their order before the next one is called on any.

Several processes call the same hooks at the same steps. A hook that computes with the state, compiles or communicates
does that on every process, after the same steps: it decides by the step, by metrics (all processes have the same) or by
`distributed.primary_decides`. Only process 0 writes (`is_primary()`).
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from spmd_tasks.activity import doing

if TYPE_CHECKING:
  import jax
  import numpy as np

  from spmd_tasks.checkpoints import Checkpointer
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
  """The newest evals of all eval sets of a job, after `step` (-1: there were none yet), and how long they took.

  `metrics` and `examples` are by eval set; `examples` has one value of the loss's per example, by name, where a hook
  `wants_examples`.
  """

  step: int = -1
  metrics: 'Mapping[str, Metrics]' = {}
  seconds: float = 0.0
  examples: 'Mapping[str, Mapping[str, np.ndarray]]' = {}


class Logged(NamedTuple):
  """The newest metrics that were written: after which step (-1: none yet), and all of them by name."""

  step: int = -1
  metrics: 'Metrics' = {}


class FirstState(NamedTuple):
  """The state that a job goes on from after `step`, the input's position there, and a phrase about its origin."""

  step: int
  state: 'TrainState'
  input_state: Any
  origin: str


class TrainHook:
  """Base class of hooks, whose methods do nothing. An exception of a method ends the job, a UserError in one sentence.

  Attributes:
    wants_examples: whether the hook reads the loss's per-example outputs (`outcome.outputs.examples()` of a step and
      `run.evals.examples` of evals), which are then copied to every process.
  """

  wants_examples: bool = False

  def prepare(self, run: 'TrainRun') -> None:
    """Checks that the hook has what it needs, and raises a UserError if not. Nothing may be written yet."""

  def open(self, run: 'TrainRun') -> None:
    """Opens files, threads and connections in the claimed job directory; `run.stack` closes them when the job ends."""

  def restore(self, run: 'TrainRun', newest_checkpoint: int) -> 'FirstState | None':
    """Returns a state to resume from instead of the newest checkpoint (-1: none), or None. The first answer counts."""
    return None

  def start(self, run: 'TrainRun') -> None:
    """Called with the first state, after step `run.first_step`, which may be the last step."""

  def batches(self, run: 'TrainRun', iterator: 'InputIterator') -> Any:
    """Returns an iterator of batches in place of a Prefetcher of the input, or None. The first answer counts.

    It yields (placed batch, position after it) and has the attribute `seconds_waited`, like a Prefetcher.
    """
    return None

  def before_loop(self, run: 'TrainRun') -> None:
    """Finishes what an earlier process of the job was stopped in. All is compiled; SIGTERM sets `run.should_stop()`.

    Raises PreemptedError if `run.should_stop()` came first.
    """

  def needs_state(self, step: int) -> bool:
    """Returns whether `after_step` reads `run.state` after this step; the next step is then launched afterwards.

    Must depend on `step` alone, so that all processes agree. If no hook needs the state, the device already computes
    the next step while the hooks run, and `run.state` raises a RuntimeError.
    """
    return False

  def before_step(self, run: 'TrainRun', batch: 'dict[str, jax.Array]') -> None:
    """Called with the placed batch before a step. An exception cancels the step. `run.state` needs `needs_state`."""

  def after_first_step(self, run: 'TrainRun') -> None:
    """Called after this process's first step. Compile here what an interval needs later, so that it fails early."""

  def after_step(self, run: 'TrainRun', outcome: 'Outcome') -> None:
    """Called after a step that counts: `outcome.step` updates are applied, and its metrics are on the devices.

    Return early if `run.should_stop()`; the loop then ends after this step.
    """

  def after_skipped_step(self, run: 'TrainRun', outcome: 'Outcome') -> None:
    """Called after a skipped step, whose loss or gradients were not finite."""

  def after_loop(self, run: 'TrainRun') -> None:
    """Called when the loop has ended, for whatever reason. `run.state` is the state after `run.step`."""

  def finish(self, run: 'TrainRun') -> None:
    """Called at the end of a complete training. Raises PreemptedError if `run.should_stop()` came first."""


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainRun:
  """A running training job, as its hooks see it. Fields are in the order of the job's life."""

  job: 'Job'  # as it was built
  job_log_dir: epath.Path
  model: 'PartitionedModel'
  hooks: tuple[TrainHook, ...]  # all of the job's, in their order
  goodput: 'Goodput'  # counts where the time goes
  guard: 'PreemptionGuard'
  stack: contextlib.ExitStack  # closes at the job's end, newest first, what hooks have opened
  end_reason: str | None = None  # why the job ends before its last step

  watchdog: 'StepWatchdog' = dataclasses.field(init=False)  # from `open` on: ends processes that make no progress
  # Waits for what each checkpoint says about weights that it leaves out; a hook may set it in `open`.
  base: Callable[[], Mapping[str, str]] | None = None

  checkpointer: 'Checkpointer' = dataclasses.field(init=False)  # from `restore` on

  progress: 'Progress' = dataclasses.field(init=False)  # from `start` on: shows steps, metrics and messages
  first_step: int = -1  # after which this process goes on
  origin: str = ''  # a phrase about where its state is from
  is_saved: bool = True  # whether the first state needs no checkpoint: one of the job has it, or it is at step 0
  loop: 'TrainingLoop' = dataclasses.field(init=False)  # launches the steps; has the state, the counts

  batches: 'Prefetcher' = dataclasses.field(init=False)  # from `before_loop` on
  evals: NewestEvals = dataclasses.field(default_factory=NewestEvals)
  logged: Logged = dataclasses.field(default_factory=Logged)  # the metrics that were written last
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # of hooks, written with the next logged step's

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

    Raises a RuntimeError: the device may be computing the next step already, as no hook `needs_state` after this one.
    """
    if self.loop.is_running and not self.is_awaited(self.step):
      raise RuntimeError(f'the state of step {self.step} may be gone: needs_state({self.step}) is False of all hooks.')
    return self.loop.state

  def is_awaited(self, step: int) -> bool:
    """Returns whether a hook needs the state after this step, or there is no step after it."""
    return step >= self.experiment.num_train_steps or any(hook.needs_state(step) for hook in self.hooks)

  def should_stop(self) -> bool:
    """Whether SIGTERM or Ctrl-C asks for an end. Every process asks at the same points, because calls are counted."""
    return self.guard.should_stop()

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
