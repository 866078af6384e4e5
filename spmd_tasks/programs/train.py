"""--mode=train: restore or initialise, train, evaluate and save at intervals, leave in good order."""

from collections.abc import Sequence
import contextlib
import json
import math

from etils import epath
import jax

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints.checkpointer import Checkpointer
from spmd_tasks.checkpoints.durable_files import write_durably
from spmd_tasks.checkpoints.orbax_arrays import num_bytes
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.emergency_exit import EmergencyExit
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.experiment import Job
from spmd_tasks.inputs.prefetch import Prefetcher
from spmd_tasks.learning.accumulation import check_num_microbatches
from spmd_tasks.programs.evaluation import Evaluator
from spmd_tasks.programs.job_directory import CONFIG_FILE, claim
from spmd_tasks.programs.job_setup import checkpoint_directory, is_primary, partition_job, restore_or_init, watch_steps
from spmd_tasks.programs.profile_capture import ProfileCapture
from spmd_tasks.programs.progress import format_metrics, make_progress
from spmd_tasks.programs.startup import StartupClock, format_startup
from spmd_tasks.programs.step_log import StepLog
from spmd_tasks.programs.training_loop import Interval, TrainingInputEndedError, TrainingLoop
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.runtime.metrics import make_writer
from spmd_tasks.runtime.parameter_table import format_parameter_table
from spmd_tasks.runtime.partition import PartitionedModel

# A smaller state is on disk before the next step begins, so that a kill loses one interval at most; that takes about a
# second. A larger one is written while training goes on.
_WRITTEN_AT_ONCE_BYTES = 100_000_000


def train(job: Job, job_log_dir: epath.Path, *, emergency: EmergencyExit, clock: StartupClock, config_json: str) -> int:
  """Runs a training job to its end; returns an exit code: OK, or PREEMPTED after SIGTERM with everything saved.

  Args:
    job: the built experiment.
    job_log_dir: where checkpoints, metrics and events go; claimed once everything else has been checked.
    emergency: the way out of a failure that other processes must hear of.
    clock: counting since the start of the process.
    config_json: the resolved config, saved as `config.json`.

  Raises:
    UserError: the job does not fit the devices, its input or its directory; nothing is written then.
    TrainingDivergedError: too many steps in a row were not finite.
  """
  # The inner context: a process of several that fails leaves at once, for closing would wait for the others.
  with contextlib.ExitStack() as stack, emergency.on_failure():
    trainer = _Trainer(job, job_log_dir, stack, emergency, clock, config_json)
    return trainer.run()


class _Trainer:
  """The parts of one training job, made in order and closed in reverse."""

  def __init__(
    self,
    job: Job,
    job_log_dir: epath.Path,
    stack: contextlib.ExitStack,
    emergency: EmergencyExit,
    clock: StartupClock,
    config_json: str,
  ):
    self._experiment = experiment = job.experiment
    self._clock = clock
    self._job_log_dir = job_log_dir
    with clock.phase('partition'):
      self._model = partition_job(job)
    check_num_microbatches(_batch_size(self._model), job.task.learner.num_microbatches)
    for eval_input in job.eval_inputs.values():
      eval_input.element_spec()  # refuses bad settings now, not at the first eval
    with clock.phase('input'):
      iterator = job.train_input.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
    primary = is_primary()
    if primary:
      stack.enter_context(claim(job_log_dir, experiment_name=job.name))
    self._watchdog = watch_steps(stack, experiment, job_log_dir, emergency)
    self._guard = stack.enter_context(PreemptionGuard())
    self._checkpointer = checkpointer = Checkpointer(
      checkpoint_directory(job_log_dir),
      max_to_keep=experiment.checkpoint_max_to_keep,
      keep_every_n_steps=experiment.checkpoint_keep_every_steps,
    )
    stack.callback(checkpointer.close)
    with clock.phase('init or restore'):
      state, self._first_step, self._start = restore_or_init(self._model, checkpointer, job, iterator)
    if primary:  # now that the checkpoint has not refused it
      write_durably(job_log_dir / CONFIG_FILE, config_json)
    self._batches = Prefetcher(
      iterator, self._model.train_step.place, depth=experiment.prefetch_batches, timeout_s=experiment.input_timeout_s
    )
    stack.callback(self._batches.close)
    self._writer = make_writer(job_log_dir, tensorboard=experiment.tensorboard, primary=primary)
    stack.callback(self._writer.close)
    self._evaluator = Evaluator(
      self._model,
      job.eval_inputs,
      job_log_dir,
      tensorboard=experiment.tensorboard,
      input_timeout_s=experiment.input_timeout_s,
      on_batch=self._on_eval_batch,
      should_stop=self._guard.should_stop,
    )
    stack.callback(self._evaluator.close)
    self._progress = make_progress(experiment.num_train_steps, self._first_step, primary=primary)
    stack.callback(self._progress.close)
    self._compilations = stack.enter_context(CompilationCounter())
    self._num_compiled_at_start = 0
    self._profile = ProfileCapture(experiment.profile_steps, job_log_dir / 'profile')
    stack.callback(self._profile.close)
    self._last_saved = self._first_step
    self._last_evaluated: int | None = None
    self._loop = TrainingLoop(
      train_step=self._model.train_step,
      state=state,
      batches=self._batches,
      num_train_steps=experiment.num_train_steps,
      max_consecutive_skips=job.task.learner.max_consecutive_skips,
      intervals=[
        # The checkpoint first: it is written while the eval runs, and a failing eval loses nothing.
        Interval(experiment.checkpoint_every_steps, self._save),
        Interval(experiment.eval_every_steps, self._evaluate),
      ],
      on_launch=self._on_launch,
      on_step=self._on_step,
      on_skip=self._on_skip,
      should_stop=self._guard.should_stop,
    )
    self._log = StepLog.of(self._model, seconds_waited=lambda: self._batches.seconds_waited)

  def run(self) -> int:
    model, experiment = self._model, self._experiment
    self._progress.message(_describe(model, self._start))
    if is_primary():
      (self._job_log_dir / 'parameters.txt').write_text(format_parameter_table(model) + '\n')
    if not self._evaluate_what_is_missing():
      return self._preempted()
    if self._first_step >= experiment.num_train_steps:
      self._progress.message(
        f'Nothing to do: step {self._first_step} of {experiment.num_train_steps} is already saved.'
      )
      return exit_codes.OK
    model.train_step.compile()
    self._clock.add('trace', model.train_step.trace_seconds)
    self._clock.add('compile', model.train_step.compile_seconds)
    try:
      finished = self._loop.run()
    except TrainingInputEndedError:
      self._save_the_last()
      raise
    self._save_the_last()
    if finished and self._last_evaluated != self._loop.step:
      self._evaluate(self._loop.step, self._loop)
      finished = self._last_evaluated == self._loop.step
    return exit_codes.OK if finished else self._preempted()

  def _preempted(self) -> int:
    saved = f'step {self._loop.step} is saved' if self._loop.step else 'before the first step'
    self._progress.message(f'Preempted: {saved}; the same command goes on from there.')
    return exit_codes.PREEMPTED

  def _evaluate_what_is_missing(self) -> bool:
    """Evaluates the restored step where that was due and the last job was ended in it; False if this one is, too."""
    step, every = self._first_step, self._experiment.eval_every_steps
    if step == 0 or not (step >= self._experiment.num_train_steps or (every is not None and step % every == 0)):
      return True
    missing = primary_decides(
      lambda: [name for name in self._evaluator.names if not self._evaluator.is_recorded(name, step)],
      'missing_evals',
      limit_s=math.ceil(self._experiment.step_timeout_s),
    )
    if missing:
      self._evaluate(step, self._loop, missing)
    return not missing or self._last_evaluated == step

  def _save_the_last(self) -> None:
    self._loop.settle()
    if self._loop.step > self._last_saved:
      self._save(self._loop.step, self._loop)
    with self._watchdog.allow('checkpoint', self._experiment.first_step_timeout_s):
      self._checkpointer.wait()

  def _on_launch(self, step: int, activity: str) -> None:
    self._watchdog.beat(step, activity)
    if activity == 'step':
      self._profile.before_step(step, self._loop.settle)

  def _on_eval_batch(self) -> None:
    self._watchdog.beat(self._loop.step, 'eval')

  def _on_step(self, step: int, metrics: dict[str, jax.Array]) -> None:
    self._progress.step(step)
    if step == self._first_step + 1:
      phases = self._clock.finish()
      self._progress.message(format_startup(phases))
      if is_primary():
        (self._job_log_dir / 'startup.json').write_text(json.dumps(phases) + '\n')
      # Now rather than at the first use, hours later: an eval that cannot be compiled should fail here.
      with self._watchdog.allow('compile', self._experiment.first_step_timeout_s):
        self._evaluator.compile()
        self._model.compile_conversions()
      self._log.start(step)
      self._num_compiled_at_start = self._compilations.num_programs
    experiment = self._experiment
    if step % experiment.log_every_steps == 0 or step in (self._first_step + 1, experiment.num_train_steps):
      finished = self._log.finish(step, metrics) | {
        'num_skipped_steps': self._loop.num_skipped,
        'padding_waste': self._model.padding_waste,
        'num_compilations': self._compilations.num_programs - self._num_compiled_at_start,
      }
      finished.pop('skipped')
      self._writer.write(step, finished)
      self._progress.log(step, finished)

  def _on_skip(self, step: int, metrics: dict[str, jax.Array]) -> None:
    self._progress.message(
      f'skipped an update after step {step}: loss {float(metrics["loss"])}, gradient norm '
      f'{float(metrics["grad_norm"])}; weights and optimizer are unchanged'
    )

  def _evaluate(self, step: int, loop: TrainingLoop, names: Sequence[str] | None = None) -> None:
    names = self._evaluator.names if names is None else names
    weights = self._model.task.evaluation_weights(loop.state.weights, loop.state.learner)
    num_evaluated = 0
    with self._watchdog.allow('eval', self._experiment.first_step_timeout_s), self._log.pause():
      for name, metrics in self._evaluator.evaluate(weights, names):
        self._evaluator.record(name, step, metrics)
        self._progress.message(f'step {step}  eval {name}: ' + format_metrics(metrics))
        num_evaluated += 1
    self._last_evaluated = step if num_evaluated == len(names) else None

  def _save(self, step: int, loop: TrainingLoop) -> None:
    with self._watchdog.allow('checkpoint', self._experiment.first_step_timeout_s), self._log.pause():
      self._checkpointer.save(step, self._model.to_canonical(loop.state), loop.input_state)
      if num_bytes(self._model.canonical_state) < _WRITTEN_AT_ONCE_BYTES:
        self._checkpointer.wait()
    self._last_saved = step


def _describe(model: PartitionedModel, start: str) -> str:
  axes = ' x '.join(f'{name} {size}' for name, size in model.mesh.shape.items())
  padding = f', {100 * model.padding_waste:.1f}% of them stored again as padding' if model.padding_waste else ''
  padded = [
    f'{name}: {true.shape[0]} rows padded to {model.input_layout.padded[name].shape[0]}'
    for name, true in model.input_layout.spec.items()
    if true.shape != model.input_layout.padded[name].shape
  ]
  return (
    f'{model.total_num_params:,} parameters{padding}, mesh {axes} ({model.mesh.size} {jax.devices()[0].platform} '
    f'devices), {start}' + (f'; the batch is smaller than the mesh wants ({padded[0]})' if padded else '')
  )


def _batch_size(model: PartitionedModel) -> int:
  return next(iter(model.input_layout.spec.values())).shape[0]
