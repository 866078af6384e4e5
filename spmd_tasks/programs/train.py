"""--mode=train: opens a job, restores or initialises its state, runs its steps, and ends.

The loop knows only steps. Everything that is done beside them is a TrainHook (hooks.py), in the order of `job_hooks`.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import math
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh

from spmd_tasks import exit_codes, extensions
from spmd_tasks.activity import set_activity
from spmd_tasks.distributed import EmergencyExit, is_primary
from spmd_tasks.distributed.agreement import PrimaryError, primary_decides
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError, refuse_exit
from spmd_tasks.experiment import Job, check_vocabulary, make_training_iterator, partition_job
from spmd_tasks.files import storage_errors
from spmd_tasks.inputs import Batch, InputIterator, Prefetcher
from spmd_tasks.programs.evaluator import refuse_other_data
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.hooks import PreemptedError, TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import Evaluate, SaveCheckpoints
from spmd_tasks.programs.job_directory import SavedSteps, claim, write_config
from spmd_tasks.programs.progress import Progress
from spmd_tasks.programs.report_hooks import CountGoodput, LogMetrics, ProfileOnRequest, ReportEnd, ShowProgress
from spmd_tasks.programs.restore import LOOK_LIMIT_S, newest_step, origin_of, restore_or_init
from spmd_tasks.programs.training_loop import TrainingInputEndedError, TrainingLoop
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.origin import base_of
from spmd_tasks.runtime.parameter_table import check_state_fits


def job_hooks(job: Job) -> tuple[TrainHook, ...]:
  """Returns what a job does beside its steps, in the order in which each method of the hooks is called."""
  return (
    CountGoodput(),  # first: the time of the others is not that of steps
    ShowProgress(),
    *extensions.train_hooks(job),
    *_if_asked({*job.experiment.trackers} - {'tensorboard'} or None, 'spmd_tasks.programs.trackers:Track'),
    LogMetrics(),
    SaveCheckpoints(),  # before evals: a checkpoint is written while they run, and one that fails loses nothing
    Evaluate(),
    *_if_asked(job.experiment.sample_every_steps, 'spmd_tasks.programs.samples:Sample'),
    *_own_hooks(job),  # these find the evals of the step in `run.evals`
    *_if_asked(job.experiment.profile_steps, 'spmd_tasks.programs.profiling:Profile'),
    ProfileOnRequest(),
    ReportEnd(),  # last: all is done when it says so
  )


def _if_asked(setting: Any, hook: str) -> list[TrainHook]:
  """Returns a hook that few jobs have, which is imported for those alone."""
  return [] if setting is None else [extensions.load(hook)()]


def train(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  begun: float,
  config_json: str,
  hooks: Sequence[TrainHook] | None = None,
  mesh: Mesh | None = None,
) -> int:
  """Runs a training job to its end; returns an exit code: OK, or that of PreemptionGuard with all saved.

  Args:
    job: the built experiment.
    job_log_dir: gets checkpoints, metrics and events; claimed once everything else has been checked.
    emergency: ends this process and tells the others when it fails.
    begun: when the job's command was started, in seconds since the epoch.
    config_json: the resolved config, saved as `config.json`.
    hooks: what is done beside the steps; None: `job_hooks(job)`.
    mesh: None makes the experiment's mesh of all devices.

  Raises:
    UserError: the job does not fit the devices, its input or its directory; nothing is written then.
    StorageError, TrainingDivergedError, TrainingInputEndedError: it cannot go on; what was complete is saved.
  """
  experiment, guard = job.experiment, PreemptionGuard()
  hooks = job_hooks(job) if hooks is None else tuple(hooks)
  goodput = Goodput(job_log_dir if is_primary() else None, begun=begun)
  # The inner context: a process of several that fails leaves at once, for closing would wait for the others.
  with contextlib.ExitStack() as stack, emergency.on_failure(), refuse_exit():
    # Open. Everything that can be refused is refused before anything is written.
    keeps_examples = any(hook.wants_examples for hook in hooks)
    model, iterator = _check(job, goodput, mesh, keeps_examples=keeps_examples)
    run = TrainRun(
      job=job, job_log_dir=job_log_dir, model=model, hooks=hooks, goodput=goodput, guard=guard, stack=stack
    )
    for hook in hooks:
      hook.prepare(run)
    saved = _claim(run)
    limits = {'timeout_s': experiment.step_timeout_s, 'first_step_timeout_s': experiment.first_step_timeout_s}
    run.watchdog = stack.enter_context(watch_steps(job_log_dir, emergency, **limits))
    stack.callback(guard.stop)
    if (base := base_of(model, experiment.origin())) is not None:
      run.base = base.identity
    for hook in hooks:
      hook.open(run)

    # Restore.
    _restore(run, saved, iterator, config_json)
    for hook in hooks:
      hook.start(run)
    run.batches = _start_input(run, iterator)
    is_done = run.first_step >= experiment.num_train_steps
    if not is_done:
      with goodput.spend('compilation'):
        model.train_step.compile()
    guard.start()  # not before: up to here SIGTERM loses nothing, and need not wait for the compiler
    try:
      for hook in hooks:
        hook.before_loop(run)
      if is_done and run.is_saved:
        run.message(f'Nothing to do: step {run.first_step} of {experiment.num_train_steps} is already saved.')
        return exit_codes.OK

      # Loop.
      if not is_done:
        _run_steps(run)

      # End.
      for hook in hooks:
        hook.after_loop(run)
      if run.loop.input_has_ended:
        raise TrainingInputEndedError(
          f'the training input ended after step {run.step} of {experiment.num_train_steps}; what was trained is saved. '
          'Let the input repeat itself (num_epochs or num_batches = None), or lower num_train_steps.'
        )
      if run.step < experiment.num_train_steps and run.end_reason is None:
        raise PreemptedError
      for hook in hooks:
        hook.finish(run)
      return exit_codes.OK
    except PreemptedError:
      kept = f'step {run.step} is saved' if run.step else 'before the first step'
      run.message(f'{guard.cause}: {kept}; the same command goes on from there.')
      return guard.exit_code


def _own_hooks(job: Job) -> list[TrainHook]:
  """Returns the hooks of the experiment."""
  hooks = list(job.experiment.hooks())
  for hook in hooks:
    if not isinstance(hook, TrainHook):
      raise UserError(f'hooks() of {job.name} returns {hook!r}, which is no TrainHook: see docs/hooks.md.')
  return hooks


def _check(
  job: Job, goodput: Goodput, mesh: Mesh | None, *, keeps_examples: bool
) -> tuple[PartitionedModel, InputIterator]:
  """Returns the partitioned model and the training input's iterator. Raises UserError for what cannot be trained."""
  check_vocabulary(job)
  model = partition_job(job, mesh)
  if keeps_examples:
    model = dataclasses.replace(model, keeps_examples=True)
  check_state_fits(model)
  if (num_microbatches := job.task.learner.num_microbatches) > 1:
    from spmd_tasks.learning.accumulation import check_num_microbatches

    check_num_microbatches(next(iter(model.input_layout.spec.values())).shape[0], num_microbatches)
  iterator = make_training_iterator(job)
  if jax.process_count() > 1:
    limit_s = math.ceil(job.experiment.first_step_timeout_s)
    refuse_other_data('data files', {'train_input': iterator.get_state()}, limit_s)
  with goodput.spend('compilation'):
    model.train_step.trace()  # a loss or an optimizer that fails is refused, too
  return model, iterator


def _claim(run: TrainRun) -> SavedSteps:
  """Claims the directory, on process 0 and until the job ends. Raises UserError on every process."""
  saved = SavedSteps(run.job_log_dir)

  def claim_here() -> None:
    saved.claimed = run.stack.enter_context(claim(run.job_log_dir, experiment_name=run.job.name))

  try:
    primary_decides(claim_here, 'claim', limit_s=LOOK_LIMIT_S)
  except PrimaryError as error:
    raise UserError(str(error)) from error
  return saved


def _restore(run: TrainRun, saved: SavedSteps, iterator: InputIterator, config_json: str) -> None:
  """Opens the checkpoints, gives `run` its first state, and records config and newest step now that nothing refuses."""
  job, experiment = run.job, run.experiment
  run.checkpointer = saved.open_checkpoints(
    base=run.base,
    max_to_keep=experiment.checkpoint_max_to_keep,
    keep_every_n_steps=experiment.checkpoint_keep_every_steps,
    keep_every_hours=experiment.checkpoint_keep_every_hours,
  )
  run.stack.callback(run.checkpointer.close)
  with run.goodput.spend('checkpoint_restore'):
    state, run.first_step, run.origin, run.is_saved = _first_state(run, iterator)
  if is_primary():
    with storage_errors(run.job_log_dir):
      write_config(run.job_log_dir, config_json)
      saved.record(run.checkpointer.latest_step() or 0)
  run.progress = Progress(experiment.num_train_steps, run.first_step, primary=is_primary())
  run.stack.callback(run.progress.close)

  def before_step(batch: dict[str, jax.Array]) -> None:
    for hook in run.hooks:
      hook.before_step(run, batch)

  run.loop = TrainingLoop(
    train_step=run.model.train_step,
    state=state,
    num_train_steps=experiment.num_train_steps,
    max_consecutive_skips=job.task.learner.max_consecutive_skips,
    is_awaited=run.is_awaited,
    platform=next(iter(state.step.devices())).platform,
    on_activity=run.watchdog.beat,
    should_stop=lambda: run.end_reason is not None or run.should_stop(),
    before_step=before_step,
  )
  if not run.is_saved:  # it may be saved before a step has taken a batch
    run.loop.input_state = iterator.get_state()


def _first_state(run: TrainRun, iterator: InputIterator) -> tuple[TrainState, int, str, bool]:
  """Returns the first state: of a hook, the newest checkpoint, or a new one.

  Returns (state, its step, a phrase about its origin, whether it needs no checkpoint).
  """
  newest = newest_step(run.checkpointer)
  for hook in run.hooks:
    if (restored := hook.restore(run, newest)) is not None:
      assert restored.input_state is not None
      iterator.set_state(restored.input_state)
      phrase = f'resuming after step {restored.step} from {restored.origin}'
      return restored.state, restored.step, phrase, restored.step <= newest
  if newest < 0 and origin_of(run.experiment) is None:
    run.model.train_step.start_compiling()  # while the new state is drawn
  state, step, phrase = restore_or_init(run.model, run.checkpointer, run.job, iterator)
  return state, step, phrase, newest >= 0 or step == 0


def _start_input(run: TrainRun, iterator: InputIterator) -> Prefetcher:
  """Starts to read batches ahead, or takes those of a hook."""
  for hook in run.hooks:
    if (made := hook.batches(run, iterator)) is not None:
      return made
  return read_ahead(run, iterator, run.model.train_step.place)


def read_ahead(run: TrainRun, iterator: InputIterator, place: Callable[[Batch], Any]) -> Prefetcher:
  """Starts to read batches ahead and to `place` them, as the experiment's settings say, until the job ends."""
  settings = run.experiment
  batches = Prefetcher(iterator, place, settings.prefetch_batches, settings.input_timeout_s, is_idle=run.loop.is_idle)
  run.stack.callback(batches.close)
  return batches


def _run_steps(run: TrainRun) -> None:
  """Runs steps to the last one, to an early end, SIGTERM, or the end of the input; afterwards none is in flight."""
  run.goodput.switch('steps')
  set_activity('running the first step')
  has_stepped = False
  for outcome in run.loop.run(run.batches):
    if not outcome.skipped and not has_stepped:
      has_stepped = True
      for hook in run.hooks:
        hook.after_first_step(run)
    for hook in run.hooks:
      (hook.after_skipped_step if outcome.skipped else hook.after_step)(run, outcome)
