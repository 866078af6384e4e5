"""The hooks of a training job: TrainHook, their base class, TrainRun, which they see, and all hooks of the core.

    class Watched(MyExperiment):
      def hooks(self):
        return [BestLoss()]              # docs/hooks.md has this one

`job_hooks` in train.py lists the hooks of a job in order. The methods of TrainHook are in the order of a job's life; a
job calls each method on all hooks before it calls the next one.

Several processes call the same hooks after the same steps. A hook that computes with the state, compiles or
communicates does so on every process: it decides by the step, by metrics (all processes have the same) or by
`distributed.primary_decides`. Only process 0 writes (`is_primary()`).
"""

import abc
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import tempfile
import time
from typing import Any, NamedTuple

from etils import epath
import jax
import numpy as np

from spmd_tasks.activity import doing, set_activity
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.arrays import num_bytes
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import PrimaryError, gather, primary_decides
from spmd_tasks.distributed.preemption import PreemptedError, PreemptionGuard
from spmd_tasks.distributed.watchdog import StepWatchdog
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job, duration_s
from spmd_tasks.files import is_remote, make_directory, read_text, storage_errors, write_durably
from spmd_tasks.inputs import Batch, InputIterator, Prefetcher
from spmd_tasks.inputs.base import progress_of, source_names
from spmd_tasks.layers.losses import RESERVED_METRICS
from spmd_tasks.programs.evaluator import Evaluator, refuse_other_data
from spmd_tasks.programs.goodput import Goodput, steady_now
from spmd_tasks.programs.job_directory import (
  CONFIG_FILE,
  PARAMETERS_FILE,
  STARTUP_FILE,
  TRACKERS_FILE,
  CheckpointRecord,
)
from spmd_tasks.programs.progress import Progress, format_metrics
from spmd_tasks.programs.trackers import tracker_classes
from spmd_tasks.programs.training_loop import Outcome, TrainingLoop, is_spike
from spmd_tasks.runtime import PartitionedModel, TrainState, format_parameter_table
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.runtime.flops import model_flops, peak_flops
from spmd_tasks.runtime.input_layout import InputSpec
from spmd_tasks.runtime.media import Media, check_media_name
from spmd_tasks.runtime.metrics import (
  MEDIA_DIRECTORY,
  Metric,
  Metrics,
  finish_metrics,
  make_writer,
  scalars,
  split_summaries,
)
from spmd_tasks.runtime.origin import saved_part
from spmd_tasks.sharding import infer_partition_spec_based_on_rank
from spmd_tasks.sharding.specs import axes_of, even_spec, num_parts
from spmd_tasks.sharding.weights import SPLIT_BY_DEFAULT, is_quantized
from spmd_tasks.stores import upload

# A smaller state is on disk before the next step begins, so that a kill loses one interval at most; that takes about a
# second. A larger one is written while training continues.
_WRITTEN_AT_ONCE_BYTES = 100_000_000
_CHECK_INTERVAL_S = 10.0


class NewestEvals(NamedTuple):
  """The newest evals of all eval sets, after `step` (-1: none yet), and how long they took.

  `metrics`, `examples` and `media` are by eval set. `examples` has the loss's per-example outputs by name, if a hook
  `wants_examples`; `media` has its images, histograms and tables.
  """

  step: int = -1
  metrics: Mapping[str, Metrics] = {}
  seconds: float = 0.0
  examples: Mapping[str, Mapping[str, np.ndarray]] = {}
  media: Mapping[str, Mapping[str, Media]] = {}


class Logged(NamedTuple):
  """The newest logged metrics, by name, and their step (-1: none yet)."""

  step: int = -1
  metrics: Metrics = {}


class FirstState(NamedTuple):
  """The state to resume from after `step`, the input's position there, and a phrase about its origin."""

  step: int
  state: TrainState
  input_state: Any
  origin: str


class TrainHook:
  """Base class of hooks; its methods do nothing. An exception in a method ends the job, a UserError in one sentence.

  Attributes:
    wants_examples: whether the hook reads the loss's per-example outputs (`outcome.outputs.examples()` of a step and
      `run.evals.examples` of evals), which are then copied to every process.
  """

  wants_examples: bool = False

  def prepare(self, run: 'TrainRun') -> None:
    """Checks that the hook has what it needs, and raises a UserError if not. Nothing may be written yet."""

  def open(self, run: 'TrainRun') -> None:
    """Opens files, threads and connections in the claimed job directory; `run.stack` closes them when the job ends."""

  def restore(self, run: 'TrainRun', newest_checkpoint: int) -> FirstState | None:
    """Returns a state to resume from instead of the newest checkpoint (-1: none), or None. The first answer counts."""
    return None

  def start(self, run: 'TrainRun') -> None:
    """Called with the first state, after step `run.first_step`, which may be the last step."""

  def batches(self, run: 'TrainRun') -> Any:
    """Returns an iterator of batches in place of `run.read_ahead(...)`, or None. The first answer counts.

    It yields (placed batch, position after it) and has the attribute `seconds_waited`, like a Prefetcher.
    """
    return None

  def before_loop(self, run: 'TrainRun') -> None:
    """Redoes work that was interrupted when an earlier process ended. From here on SIGTERM sets `run.should_stop()`.

    Raises PreemptedError if `run.should_stop()` came first.
    """

  def needs_state(self, step: int) -> bool:
    """Returns whether `after_step` reads `run.state` after this step; the next step then waits for the hooks.

    Must depend on `step` alone, so that all processes agree. If no hook needs the state, the device already computes
    the next step while the hooks run, and `run.state` raises a RuntimeError.
    """
    return False

  def before_step(self, run: 'TrainRun', batch: dict[str, jax.Array]) -> None:
    """Called with the placed batch before a step. An exception cancels the step. `run.state` needs `needs_state`."""

  def after_first_step(self, run: 'TrainRun') -> None:
    """Called after this process's first step. Compile here what an interval needs later, so that it fails early."""

  def after_step(self, run: 'TrainRun', outcome: Outcome) -> None:
    """Called after a step that counts: `outcome.step` updates are applied, and its metrics are on the devices.

    Return early if `run.should_stop()`; the loop then ends after this step.
    """

  def after_skipped_step(self, run: 'TrainRun', outcome: Outcome) -> None:
    """Called after a skipped step, whose loss or gradients were not finite, or a spike."""

  def after_loop(self, run: 'TrainRun') -> None:
    """Called when the loop has ended, for any reason. `run.state` is the state after `run.step`."""

  def finish(self, run: 'TrainRun') -> None:
    """Called when training is complete. Raises PreemptedError if `run.should_stop()` came first."""


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainRun:
  """A running training job, as its hooks see it. Fields are in the order in which they are set."""

  job: Job
  job_log_dir: epath.Path
  model: PartitionedModel
  iterator: InputIterator  # of this process's rows of the training input; `batches` reads from it
  hooks: tuple[TrainHook, ...]  # all hooks of the job, in order
  goodput: Goodput  # counts where the time goes
  guard: PreemptionGuard
  stack: contextlib.ExitStack  # closes what hooks have opened, newest first, when the job ends
  end_reason: str | None = None  # why the job ends before its last step

  watchdog: StepWatchdog = dataclasses.field(init=False)  # from `open` on: ends processes that make no progress
  # Returns what each checkpoint records about weights that it leaves out; a hook may set it in `open`.
  base: Callable[[], Mapping[str, str]] | None = None

  checkpointer: Checkpointer = dataclasses.field(init=False)  # from `restore` on

  progress: Progress = dataclasses.field(init=False)  # from `start` on: shows steps, metrics and messages
  first_step: int = -1  # the step that this process resumes from
  origin: str = ''  # a phrase about where the first state is from
  is_saved: bool = True  # whether the first state is in a checkpoint; True at step 0 too, which is never saved
  loop: TrainingLoop = dataclasses.field(init=False)  # launches the steps; has the state and the counts

  batches: Any = dataclasses.field(init=False)  # from `before_loop` on: a Prefetcher, or the iterator of a hook
  evals: NewestEvals = dataclasses.field(default_factory=NewestEvals)
  logged: Logged = dataclasses.field(default_factory=Logged)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # from hooks, written with the next logged step
  # What `log` calls on process 0, from `start` on: (step, name, media).
  media_writers: list[Callable[[int, str, Media], None]] = dataclasses.field(default_factory=list)

  @property
  def experiment(self) -> Experiment:
    """The experiment of the job, whose fields are its config."""
    return self.job.experiment

  @property
  def limit_s(self) -> int:
    """How long processes wait for each other."""
    return math.ceil(self.experiment.first_step_timeout_s)

  @property
  def step(self) -> int:
    """The number of updates so far: the step of the last outcome."""
    return self.loop.step

  @property
  def state(self) -> TrainState:
    """The live, padded state after `step`; the next step donates its arrays.

    Raises a RuntimeError: no hook `needs_state` after this step, so the next step may have been launched already.
    """
    if self.loop.is_running and not self.is_awaited(self.step):
      raise RuntimeError(f'the state of step {self.step} may be donated: a hook must return True from needs_state.')
    return self.loop.state

  def is_awaited(self, step: int) -> bool:
    """Returns whether a hook needs the state after this step, or there is no step after it."""
    return step >= self.experiment.num_train_steps or any(hook.needs_state(step) for hook in self.hooks)

  def should_stop(self) -> bool:
    """Whether SIGTERM or Ctrl-C asks the job to end. Calls are counted: processes must call it at the same points."""
    return self.guard.should_stop()

  def beat(self, activity: str) -> None:
    """Called before each part of an activity, such as a batch of an eval. Raises PreemptedError if `should_stop()`."""
    self.watchdog.beat(self.step, activity)
    if self.should_stop():
      raise PreemptedError

  def end_early(self, reason: str) -> None:
    """Ends the job after this step, or after the next one if it is launched already.

    Every process must call it after the same step. The job ends as after its last step.
    """
    self.end_reason = reason

  def read_ahead(self, place: Callable[[Batch], Any] | None = None) -> Prefetcher:
    """Starts to read batches ahead until the job ends; `place` puts one on the devices (None: as the step takes it)."""
    count, timeout_s = self.experiment.prefetch_batches, self.experiment.input_timeout_s
    place = place or self.model.train_step.place
    batches = Prefetcher(self.iterator, place, count, timeout_s, is_idle=self.loop.is_idle)
    self.stack.callback(batches.close)
    return batches

  def log(self, name: str, media: Media) -> None:
    """Logs an image, a histogram or a table of this step (runtime/media.py); only process 0 writes it.

    Raises a UserError: the name, which is also a directory's, has other characters than letters, digits, _, - and /.
    """
    check_media_name(name)
    for write in self.media_writers:
      write(self.step, name, media)

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


class CountGoodput(TrainHook):
  """Counts the time spent in steps, and in everything else by cause (goodput.py)."""

  def open(self, run: TrainRun) -> None:
    run.stack.callback(run.goodput.close)

  def start(self, run: TrainRun) -> None:
    run.goodput.resume(run.first_step)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.goodput.step(outcome.step, is_skipped=outcome.skipped, seconds_waited=run.batches.seconds_waited)

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self.after_step(run, outcome)

  def after_loop(self, run: TrainRun) -> None:
    run.goodput.switch('program_end')


class CompareInputs(TrainHook):
  """Refuses a process whose training input has other files, or another tokenizer, than on process 0."""

  def prepare(self, run: TrainRun) -> None:
    if jax.process_count() > 1:
      refuse_other_data('data files', {'train_input': run.iterator.get_state()}, run.limit_s)


class ShowProgress(TrainHook):
  """Describes the model, and reports the time until the first step, and each finished or skipped step."""

  def start(self, run: TrainRun) -> None:
    interval = describe_interval(run.experiment.checkpoint_every)
    run.message(f'{_describe(run.model, run.origin)}; a checkpoint {interval}')
    if is_primary():
      with storage_errors(run.job_log_dir / PARAMETERS_FILE):
        write_durably(run.job_log_dir / PARAMETERS_FILE, format_parameter_table(run.model) + '\n')

  def after_first_step(self, run: TrainRun) -> None:
    set_activity(None)
    run.progress.step(run.step)
    step, total = run.model.train_step, steady_now() - run.goodput.begun
    phases = {'trace': step.trace_seconds, 'compile': step.compile_seconds, 'total': total}
    run.message(
      f'first step finished {total:.1f} s after the start, of which {step.trace_seconds:.1f} s traced and '
      f'{step.compile_seconds:.1f} s compiled it'
    )
    if is_primary():
      with storage_errors(run.job_log_dir / STARTUP_FILE):
        write_durably(run.job_log_dir / STARTUP_FILE, json.dumps(phases) + '\n')

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.progress.step(outcome.step)

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    spike = ', a spike' if is_spike(outcome.metrics) else ''
    run.message(
      f'skipped an update after step {outcome.step}: loss {float(outcome.metrics["loss"])}, gradient norm '
      f'{float(outcome.metrics["grad_norm"])}{spike}; weights and optimizer are unchanged. `--mode replay '
      f'--job_log_dir {run.job_log_dir} --step {outcome.step + 1}` shows its rows'
    )


class Track(TrainHook):
  """Sends metrics to the services of `trackers` (trackers.py), one step late. A service that fails ends no job."""

  _logged_step = _eval_step = -1
  _is_complete = False

  def prepare(self, run: TrainRun) -> None:
    """Raises a UserError for a tracker that is not known or not installed."""
    self._classes = tracker_classes(run.experiment.trackers)

  def start(self, run: TrainRun) -> None:
    self._trackers: dict[str, Any] = {}
    if not is_primary():
      return
    self._eval_step = run.first_step
    path = run.job_log_dir / TRACKERS_FILE
    ids = json.loads(read_text(path)) if path.exists() else {}
    config = {'experiment': run.job.name} | json.loads(read_text(run.job_log_dir / CONFIG_FILE))['config']
    directory = tempfile.mkdtemp(prefix='spmd_tasks_') if is_remote(run.job_log_dir) else str(run.job_log_dir)
    for name, tracker_class in self._classes.items():
      with self._drop_if_it_fails(run, name):
        tracker = self._trackers[name] = tracker_class(run.job_log_dir.name, config, directory, ids.get(name))
        ids[name] = tracker.id
    write_durably(path, json.dumps(ids) + '\n')
    run.media_writers.append(functools.partial(self._log_media, run))
    run.stack.callback(self._close, run)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    del outcome
    self._report(run)

  def finish(self, run: TrainRun) -> None:
    self._is_complete = True

  def _report(self, run: TrainRun) -> None:
    if run.logged.step > self._logged_step:
      self._logged_step = run.logged.step
      self._log(run, run.logged.step, run.logged.metrics)
    if run.evals.step > self._eval_step:
      self._eval_step = run.evals.step
      for name, metrics in run.evals.metrics.items():
        self._log(run, run.evals.step, {f'eval/{name}/{metric}': value for metric, value in metrics.items()})
        for metric, media in run.evals.media.get(name, {}).items():
          self._log_media(run, run.evals.step, f'eval/{name}/{metric}', media)

  def _log(self, run: TrainRun, step: int, metrics: Mapping[str, Any]) -> None:
    numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}
    for name in list(self._trackers):
      with self._drop_if_it_fails(run, name):
        self._trackers[name].log(step, numbers)

  def _log_media(self, run: TrainRun, step: int, name: str, media: Media) -> None:
    for service, tracker in self._trackers.items():
      try:
        tracker.log_media(step, name, media)
      except Exception as error:  # such as W&B without Pillow
        run.message(f'{service} does not get {name}, which is in {MEDIA_DIRECTORY}: {type(error).__name__}: {error}')

  def _close(self, run: TrainRun) -> None:
    self._report(run)  # the evals at the end
    for name in list(self._trackers):
      with self._drop_if_it_fails(run, name):
        self._trackers[name].close(is_complete=self._is_complete)

  @contextlib.contextmanager
  def _drop_if_it_fails(self, run: TrainRun, name: str) -> Iterator[None]:
    """Stops sending to a service that fails, with a message; the job continues."""
    try:
      yield
    except Exception as error:
      self._trackers.pop(name, None)
      run.message(f'{name} gets no metrics from here on, metrics.jsonl has them all: {type(error).__name__}: {error}')


@dataclasses.dataclass(kw_only=True)
class StepRates:
  """Measures rates from one logged step to the next."""

  unit: str  # 'tokens', or 'examples' if batches have no tokens
  units_per_step: int  # in a training batch
  flops_per_step: int  # model FLOPs, see runtime/flops.py
  peak_flops_per_second: float | None  # of all devices; None if it is unknown
  goodput: Goodput  # counts the time in the loop
  _last: tuple[int, float, float] = (-1, 0.0, 0.0)

  def start(self, step: int) -> None:
    """Starts to measure after `step`, one of the first, so that compilation is left out."""
    self._last = step, *self.goodput.loop_seconds()

  def since_last(self, step: int, batch_share: float = 1.0) -> dict[str, float]:
    """Returns rates per second, the fraction of waiting, and MFU since the last call; {} without a step since.

    `batch_share` is the size of these steps' batches, relative to `units_per_step`.
    """
    last_step, last_seconds, last_waited = self._last
    if step <= last_step:
      return {}
    self.start(step)
    steps_per_second = (step - last_step) / (self._last[1] - last_seconds)
    rates = {
      'steps_per_second': steps_per_second,
      f'{self.unit}_per_second': steps_per_second * self.units_per_step * batch_share,
      'flops_per_second': steps_per_second * self.flops_per_step * batch_share,
      'host_wait_fraction': (self._last[2] - last_waited) / (self._last[1] - last_seconds),
    }
    if self.peak_flops_per_second is not None:
      rates['mfu'] = rates['flops_per_second'] / self.peak_flops_per_second
    return rates


def count_batch(spec: InputSpec) -> tuple[str, int]:
  """Returns ('tokens', the positions of a batch's largest integer input [B, T]), or else ('examples', its rows).

  Positions of padding count, too.
  """
  texts = [x.shape for x in spec.values() if len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)]
  return ('tokens', max(map(math.prod, texts))) if texts else ('examples', next(iter(spec.values())).shape[0])


class LogMetrics(TrainHook):
  """Writes and shows metrics of the first step, every `log_every_steps`, and of the last step.

  Rates are over the steps since the last logged one; other metrics are the step's own.
  """

  def start(self, run: TrainRun) -> None:
    """Opens the metric files. All processes must call it."""
    self._writer = make_writer(run.job_log_dir, trackers=run.experiment.trackers, primary=is_primary())
    run.stack.callback(self._writer.close)
    if is_primary():
      config = json.loads(read_text(run.job_log_dir / CONFIG_FILE))
      self._writer.write_settings(config.get('overrides', {}))
      run.media_writers.append(self._writer.write_media)
    spec = run.model.input_layout.spec
    unit, number = count_batch(spec)
    self._batch_size = max(x.shape[0] for x in spec.values() if x.shape)
    self._rates = StepRates(
      unit=unit,
      units_per_step=number,
      flops_per_step=model_flops(run.model),
      peak_flops_per_second=peak_flops(run.model.mesh.size),
      goodput=run.goodput,
    )
    # Rates leave out the first step, and on accelerators the second: it runs while the hooks of the first one compile.
    self._num_unmeasured = 1 if jax.devices()[0].platform == 'cpu' else 2

  def before_loop(self, run: TrainRun) -> None:
    self._compilations = run.stack.enter_context(CompilationCounter())

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    step, experiment = outcome.step, run.experiment
    if run.first_step < step <= run.first_step + self._num_unmeasured:
      self._rates.start(step)
    if step == run.first_step + 1:  # everything is compiled now
      self._num_programs = self._compilations.num_programs
    if step % experiment.log_every_steps == 0 or step in (run.first_step + 1, experiment.num_train_steps):
      metrics = self._metrics(run, outcome)
      summaries, histograms, media = split_summaries([jax.device_get(outcome.outputs)] if outcome.outputs else [])
      metrics |= summaries
      for name, value in media.items():
        run.log(name, value)  # before the line of the step, which names them
      self._writer.write(step, metrics)
      run.logged = Logged(step, metrics)
      self._writer.write_histograms(step, histograms)
      usual = (*RESERVED_METRICS, 'accuracy')
      shown = [name for name in outcome.metrics if name not in usual] if run.job.task.shows_metrics else []
      run.progress.log(step, metrics, shown)

  def _metrics(self, run: TrainRun, outcome: Outcome) -> dict[str, Metric]:
    """Waits for a step and returns all its metrics. All processes must call it."""
    metrics = finish_metrics(jax.device_get(outcome.metrics), source_names(run.job.train_input))
    del metrics['skipped']
    counts = {
      'num_skipped_steps': run.loop.num_skipped,
      'padding_waste': run.model.padding_waste,
      'num_compilations': self._compilations.num_programs - self._num_programs,
    }
    progress = progress_of(run.job.train_input, run.loop.outcome_input_state)
    rates = self._rates.since_last(outcome.step, progress.get('batch_size', self._batch_size) / self._batch_size)
    if jax.process_count() > 1 and rates:  # devices wait for the slowest host
      waits = gather(rates['host_wait_fraction'], 'host_waits', limit_s=run.limit_s)
      rates |= {'host_wait_fraction': max(waits), 'slowest_host': waits.index(max(waits))}
    return metrics | rates | run.goodput.metrics() | progress | run.metrics | counts


def is_multiple(step: int, every_steps: int | None) -> bool:
  """Returns whether a step ends an interval. Step 0 does not, and without an interval no step does."""
  return every_steps is not None and step > 0 and step % every_steps == 0


class SaveCheckpoints(TrainHook):
  """Saves a checkpoint as often as `checkpoint_every` says, and when the loop has ended.

  If `checkpoint_every` is a time, process 0 checks the clock, and all processes save after the step in which the time
  passes. They agree on that step, and on the step of the next check, at most `_CHECK_INTERVAL_S` later. No save begins
  while an earlier checkpoint is still being written.
  """

  def prepare(self, run: TrainRun) -> None:
    every = run.experiment.checkpoint_every
    self._every_s = duration_s(every, 'checkpoint_every') if isinstance(every, str) else None
    self._every_steps = run.experiment.checkpoint_keep_every_steps if isinstance(every, str) else every
    self._part = saved_part(run.model, run.experiment.origin())

  def start(self, run: TrainRun) -> None:
    self._last_saved = run.first_step if run.is_saved else -1
    self._due: int | None = None  # the step to save because the time has passed

  def before_loop(self, run: TrainRun) -> None:
    self._saved_s = self._checked_s = time.monotonic()
    self._checked_step, self._next_check = run.first_step, run.first_step + 1

  def needs_state(self, step: int) -> bool:
    return step == self._due or is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      run.model.compile_conversions(self._part)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if self.needs_state(outcome.step):
      self._save(run)
    if self._every_s is not None and outcome.step >= self._next_check:
      check = functools.partial(self._check_time, run, outcome.step)
      self._due, self._next_check = primary_decides(check, 'checkpoint_due', limit_s=run.limit_s)

  def _check_time(self, run: TrainRun, step: int) -> tuple[int | None, int]:
    """Returns the next step if it is to be saved, else None, and the step of the next check."""
    assert self._every_s is not None
    now = time.monotonic()
    step_s = (now - self._checked_s) / max(1, step - self._checked_step)
    self._checked_s, self._checked_step = now, step
    left_s = self._saved_s + self._every_s - now
    if left_s <= step_s and not run.checkpointer.is_saving:
      return step + 1, step + 2
    # A single process checks after every step: it has nobody to agree with.
    ahead_s = 0.0 if jax.process_count() == 1 else min(left_s / 2, _CHECK_INTERVAL_S)
    return None, step + max(1, int(ahead_s / max(step_s, 1e-6)))

  def after_loop(self, run: TrainRun) -> None:
    if run.step > self._last_saved:
      self._save(run)
    with run.timed('checkpoint', 'checkpoint_save'):
      run.checkpointer.wait()

  def _save(self, run: TrainRun) -> None:
    """Saves a checkpoint; a large one is still being written when this returns."""
    self._saved_s = time.monotonic()
    with run.timed('checkpoint', 'checkpoint_save'):
      state = run.model.to_canonical(run.state, self._part)
      run.checkpointer.save(run.step, state, run.loop.input_state, base=run.base)
      if num_bytes(self._part(run.model.canonical_state)) < _WRITTEN_AT_ONCE_BYTES:
        run.checkpointer.wait()
    run.goodput.mark(run.step)
    self._last_saved = run.step


class Evaluate(TrainHook):
  """Evaluates all eval sets every `eval_every_steps` and at the end of training; sets `run.evals`.

  A resumed job repeats the evals of its first step if they were interrupted.
  """

  def prepare(self, run: TrainRun) -> None:
    self._every_steps = run.experiment.eval_every_steps
    keeps_examples = any(hook.wants_examples for hook in run.hooks)
    self._evaluator = Evaluator(run.job, run.model, run.job_log_dir, keeps_examples=keeps_examples)
    self._evaluator.open(run.limit_s)
    with run.goodput.spend('compilation'):
      self._evaluator.check()

  def open(self, run: TrainRun) -> None:
    run.stack.callback(self._evaluator.close)

  def before_loop(self, run: TrainRun) -> None:
    if self._evals_were_interrupted(run):
      self._evaluate(run)

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._evaluator.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if is_multiple(outcome.step, self._every_steps):
      with contextlib.suppress(PreemptedError):
        self._evaluate(run)

  def finish(self, run: TrainRun) -> None:
    if run.evals.step != run.step:
      self._evaluate(run)

  def _evals_were_interrupted(self, run: TrainRun) -> bool:
    """Returns whether evals were due at the restored step, and some are not recorded."""
    step, evaluator = run.first_step, self._evaluator
    if step == 0 or not (step >= run.experiment.num_train_steps or is_multiple(step, self._every_steps)):
      return False
    return primary_decides(
      lambda: not all(evaluator.is_recorded(name, step) for name in evaluator.names),
      'missing_evals',
      limit_s=run.limit_s,
    )

  def _evaluate(self, run: TrainRun) -> None:
    """Evaluates all sets. Raises PreemptedError if SIGTERM came before the last set was finished."""
    evals, start = {}, time.perf_counter()
    with run.timed('eval', 'evaluation'):
      variables = run.model.task.evaluation_variables(run.state)
      for name, metrics in self._evaluator.evaluate(variables, run.step, functools.partial(run.beat, 'eval')):
        if run.step > run.first_step or not self._evaluator.is_recorded(name, run.step):
          self._evaluator.record(name, run.step, metrics)
        run.message(f'step {run.step}  eval {name}: ' + format_metrics(metrics))
        evals[name] = metrics
    run.evals = NewestEvals(
      run.step, evals, time.perf_counter() - start, dict(self._evaluator.examples), dict(self._evaluator.media)
    )


class Sample(TrainHook):
  """Writes texts that the model generates from the sample prompts, every `sample_every_steps` (samples.py)."""

  def prepare(self, run: TrainRun) -> None:
    from spmd_tasks.programs.samples import SampleWriter  # with all of decoding: 0.7 s

    self._every_steps = run.experiment.sample_every_steps
    self._writer = SampleWriter(run.job, run.model, run.job_log_dir)

  def start(self, run: TrainRun) -> None:
    self._writer.open(run.first_step)
    run.stack.callback(self._writer.close)

  def before_loop(self, run: TrainRun) -> None:
    self._sample_if_due(run)

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._writer.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    with contextlib.suppress(PreemptedError):
      self._sample_if_due(run)

  def finish(self, run: TrainRun) -> None:
    self._sample_if_due(run)

  def _sample_if_due(self, run: TrainRun) -> None:
    """Writes the texts of the step unless they are written. Raises PreemptedError if SIGTERM came first."""
    if not is_multiple(run.step, self._every_steps) or self._writer.newest_step == run.step:
      return
    with run.timed('sample', 'evaluation'):
      variables = run.model.task.decoding_variables(run.state)
      self._writer.sample(variables, run.step, functools.partial(run.beat, 'sample'))
    run.message(f'step {run.step}  samples: in {self._writer.path}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
  """What is known after a training step."""

  step: int  # updates applied
  metrics: Mapping[str, jax.Array]  # on the devices; {} if a resumed job repeats an eval
  evals: Mapping[str, Metrics]  # by eval set; {} if there was no eval after this step
  eval_seconds: float  # how long the evals took


class EarlyEnd(TrainHook, abc.ABC):
  """Ends a job before its last step when a subclass finds a reason; the step is saved, as at the end.

  Process 0 decides for all processes. The same command resumes the job until the next reason. An object lives as long
  as its process, and may remember earlier steps.
  """

  every_step: bool = False  # whether to ask after every step, not only after evals; the next step then waits
  _last_metrics: Mapping[str, jax.Array] = {}

  @abc.abstractmethod
  def reason(self, report: StepReport) -> str | None:
    """Returns why the job ends after this step, as a phrase, or None to continue. Called on process 0 only."""

  def prepare(self, run: TrainRun) -> None:
    """Checks that evals will be made. Raises a UserError if not."""
    if self.every_step or (run.job.eval_inputs and run.experiment.eval_every_steps is not None):
      return
    missing = 'eval_every_steps is None' if run.job.eval_inputs else 'the experiment has no eval sets'
    raise UserError(
      f'hooks() returns {self}, which is asked after evals, but {missing}: set eval_every_steps and return eval sets '
      'from eval_inputs().'
    )

  def before_loop(self, run: TrainRun) -> None:
    if run.evals.step == run.first_step < run.experiment.num_train_steps:  # `Evaluate` has repeated interrupted evals
      self._ask_and_end(run, run.first_step)

  def needs_state(self, step: int) -> bool:
    return self.every_step

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._last_metrics = outcome.metrics
    if outcome.step < run.experiment.num_train_steps:
      self._ask_and_end(run, outcome.step)

  def finish(self, run: TrainRun) -> None:
    if run.step >= run.experiment.num_train_steps:
      self._ask(run, run.step)  # it sees the last evals, too; its answer changes nothing

  def _ask_and_end(self, run: TrainRun, step: int) -> None:
    if (reason := self._ask(run, step)) is not None:
      run.end_early(reason)

  def _ask(self, run: TrainRun, step: int) -> str | None:
    evals = run.evals if run.evals.step == step else NewestEvals()
    if not (evals.metrics or self.every_step):
      return None
    report = StepReport(step=step, metrics=self._last_metrics, evals=evals.metrics, eval_seconds=evals.seconds)
    try:
      return primary_decides(lambda: self.reason(report), 'early_end', limit_s=run.limit_s)
    except PrimaryError as error:
      raise UserError(str(error)) from error


@dataclasses.dataclass(kw_only=True)
class EvalTarget(EarlyEnd):
  """Ends a job as soon as a metric of an eval set has reached an upper or a lower limit.

  In an experiment:

      def hooks(self):
        return [EvalTarget(eval_set='valid', metric='loss', at_most=2.0)]
  """

  eval_set: str  # a name of `eval_inputs()`
  metric: str = 'loss'  # a scalar, such as 'loss' or 'accuracy'
  at_most: float | None = None
  at_least: float | None = None

  def __post_init__(self):
    if (self.at_most is None) == (self.at_least is None):
      raise UserError(
        f'EvalTarget has at_most = {self.at_most} and at_least = {self.at_least}: give one of them, the value of '
        f'{self.metric} at which the job ends.'
      )

  def reason(self, report: StepReport) -> str | None:
    """Returns the metric and the limit that it has reached. Raises a UserError if there is no such metric."""
    if self.eval_set not in report.evals:
      known = ', '.join(sorted(report.evals))
      raise UserError(f'EvalTarget.eval_set = {self.eval_set!r} is not an eval set: choose one of {known}.')
    metrics = scalars(report.evals[self.eval_set])
    if self.metric not in metrics:
      raise UserError(
        f'EvalTarget.metric = {self.metric!r} is not a scalar metric of eval set {self.eval_set!r}: choose one of '
        f'{sorted(metrics)}.'
      )
    value = metrics[self.metric]
    reached = f'{self.metric} of {self.eval_set} is {value:.6g}'
    if self.at_most is not None and value <= self.at_most:
      return f'{reached}, at most {self.at_most:g}'
    if self.at_least is not None and value >= self.at_least:
      return f'{reached}, at least {self.at_least:g}'
    return None


class Profile(TrainHook):
  """Captures steps with JAX's profiler: `profile_steps`, and the steps that a file in the job's directory asks for.

  The file is read every two seconds (in an object store every minute):

      echo 5 > runs/mine/profile_now          # the next five steps of a running job, as process 0 sees them
      echo 5 3 > runs/mine/profile_now        # as process 3 does
  """

  _requested: tuple[int, int] | None = None
  _is_running = False
  _checked_s = 0.0

  def prepare(self, run: TrainRun) -> None:
    self._planned = run.experiment.profile_steps
    self._directory = run.job_log_dir / 'profile'

  def before_loop(self, run: TrainRun) -> None:
    run.stack.callback(self._stop)
    self._start_or_stop(run.first_step)

  def needs_state(self, step: int) -> bool:
    return step in (self._planned or ())  # no step may be in flight when the profiler starts or stops

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if not self._is_running and time.monotonic() - self._checked_s > (60 if is_remote(run.job_log_dir) else 2):
      self._checked_s = time.monotonic()
      if (request := run.job_log_dir / 'profile_now').exists():
        self._requested = take_request(run, request, outcome.step)
    self._start_or_stop(outcome.step)

  def _start_or_stop(self, step: int) -> None:
    is_inside = any(steps and steps[0] <= step < steps[1] for steps in (self._planned, self._requested))
    if not is_inside:
      self._stop()
    elif not self._is_running:
      # JAX writes to local disks only.
      self._local = tempfile.mkdtemp(prefix='spmd_tasks_profile_') if is_remote(self._directory) else self._directory
      with storage_errors(self._directory), contextlib.suppress(RuntimeError):  # another profiler is running
        make_directory(self._directory)
        jax.profiler.start_trace(str(self._local))
        self._is_running = True

  def _stop(self) -> None:
    if self._is_running:
      self._is_running = False
      with storage_errors(self._directory):
        jax.profiler.stop_trace()
        if is_remote(self._directory):
          upload(self._local, self._directory)


def take_request(run: TrainRun, request: epath.Path, step: int) -> tuple[int, int] | None:
  """Returns the steps that a file asks this process to profile, and removes the file; None if it asks for none."""
  try:
    words = read_text(request).split()
    words += ['5', '0'][len(words) :]
    process = int(words[1][:9]) if words[1].isdecimal() else -1
    answering = process if process in range(jax.process_count()) else 0  # process 0 answers an invalid request
    if answering != jax.process_index():
      return None
    request.unlink(missing_ok=True)
  except FileNotFoundError:  # another process has just taken it
    return None
  except (OSError, ValueError) as error:  # another user's file, or not text: no reason to end the job
    run.message(f'{request} cannot be read: {error}')
    with contextlib.suppress(OSError):
      request.unlink(missing_ok=True)
    return None
  is_number = words[0].isdecimal() and len(words[0]) < 10 and int(words[0]) > 0
  if process != jax.process_index() or not is_number:
    wanted = f'write a number of steps and a process, if not 0, of {jax.process_count()}'
    run.message(f'{request} asks for {" ".join(words)!r}: {wanted}.')
    return None
  run.message(f'profiling {words[0]} steps of process {words[1]}: see {run.job_log_dir / "profile"}')
  return step, step + int(words[0])


class ReportEnd(TrainHook):
  """Reports that training is complete, and why if it ended early."""

  def finish(self, run: TrainRun) -> None:
    if run.step < run.experiment.num_train_steps:
      run.message(f'Ended after step {run.step} of {run.experiment.num_train_steps}: {run.end_reason}.')
      if is_primary():
        with storage_errors(run.job_log_dir):
          CheckpointRecord(run.job_log_dir).write(run.step, is_last=True)
    run.message(run.goodput.end())


def _describe(model: PartitionedModel, origin: str) -> str:
  axes = ' x '.join(f'{name} {size}' for name, size in model.mesh.shape.items())
  padding = f', {100 * model.padding_waste:.1f}% more stored as padding' if model.padding_waste else ''
  trained = ''
  if model.has_frozen_weights:
    share = model.num_trained_params / model.total_num_params
    trained = f', {model.num_trained_params:,} of them trained ({share:.2%})'
  specs = [spec for spec in jax.tree.leaves(model.weight_specs, is_leaf=is_quantized) if not is_quantized(spec)]
  whole = sum(math.prod(spec.shape) for spec in specs if len(spec.shape) > 1 and not any(spec.split_dims))
  if whole and model.mesh.size > 1:
    trained += f', {whole:,} of them in kernels without split dims, replicated on every device'
  by_default = [spec for spec in specs if SPLIT_BY_DEFAULT in spec.tags]
  if by_default and model.mesh.size > 1:
    count, name = sum(math.prod(spec.shape) for spec in by_default), next(filter(None, by_default[0].split_dims))
    trained += f', {count:,} of them in kernels without split dims, sharded on their largest dim over {name!r}'
  devices = f'{model.mesh.size} {jax.devices()[0].platform} devices'
  return (
    f'{model.total_num_params:,} parameters{trained}{padding}, mesh {axes} ({devices}), {origin}{_uneven_rows(model)}'
  )


def _uneven_rows(model: PartitionedModel) -> str:
  """Returns a remark if the rows of a batch, or of a microbatch, are not divisible by the devices that split them."""
  mesh, shape = model.mesh, next(iter(model.input_layout.spec.values())).shape
  spec = infer_partition_spec_based_on_rank(len(shape), model.inputs_split_mapping, mesh.axis_names, model.axis_rules)
  if spec is None:
    return ''
  num_microbatches = model.task.num_microbatches
  num_rows = shape[0] // num_microbatches
  even = even_spec(spec, (num_rows,), mesh.shape)
  num_shards, num_even_shards = (num_parts(axes_of(row_spec[0]), mesh.shape) for row_spec in (spec, even))
  if num_shards == num_even_shards:
    return ''
  part = 'microbatch' if num_microbatches > 1 else 'batch'
  return (
    f'; the {num_rows} rows of a {part} are not divisible by the {num_shards} devices that split them, so each '
    f'computes {num_rows // num_even_shards}: a multiple of {num_shards} is faster'
  )


def describe_interval(every: int | str | None) -> str:
  """Returns `checkpoint_every` in words."""
  if every is None:
    return 'at the end only'
  if isinstance(every, int):
    return f'every {every:,} steps' if every > 1 else 'every step'
  number, unit = int(every[:-1]), {'s': 'second', 'm': 'minute', 'h': 'hour', 'd': 'day'}[every[-1]]
  return f'every {number} {unit}s' if number > 1 else f'every {unit}'
