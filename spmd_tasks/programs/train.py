"""--mode=train: opens a job's directory, restores or initializes its state, makes its steps, and ends.

The loop (training_loop.py) knows only steps. A TrainHook (hooks.py) does everything beside them, in the order of
`job_hooks`.
"""

from collections.abc import Sequence
import contextlib
import dataclasses

from etils import epath
import jax
from jax.sharding import Mesh

from spmd_tasks import exit_codes, extensions
from spmd_tasks.activity import set_activity
from spmd_tasks.checkpoints import Retention
from spmd_tasks.distributed import EmergencyExit, is_primary
from spmd_tasks.distributed.agreement import PrimaryError, primary_decides
from spmd_tasks.distributed.preemption import PreemptedError, PreemptionGuard
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError, refuse_exit
from spmd_tasks.experiment import Job, check_vocabulary, make_training_iterator, partition_job
from spmd_tasks.files import storage_errors
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.hooks import (
  CompareInputs,
  CountGoodput,
  Evaluate,
  LogMetrics,
  Profile,
  ReportEnd,
  Sample,
  SaveCheckpoints,
  ShowProgress,
  Track,
  TrainHook,
  TrainRun,
)
from spmd_tasks.programs.job_directory import CONFIG_FILE, CheckpointRecord, claim, write_config
from spmd_tasks.programs.progress import Progress
from spmd_tasks.programs.restore import LOOK_LIMIT_S, newest_step, origin_of, restore_or_init
from spmd_tasks.programs.training_loop import TrainingInputEndedError, TrainingLoop
from spmd_tasks.runtime import TrainState
from spmd_tasks.runtime.origin import base_of
from spmd_tasks.runtime.parameter_table import check_state_fits


def job_hooks(job: Job) -> tuple[TrainHook, ...]:
  """Returns what a job does beside its steps, in the order in which each method of the hooks is called."""
  experiment = job.experiment
  return (
    CountGoodput(),  # first: time in the other hooks is not time in steps
    CompareInputs(),
    ShowProgress(),
    *extensions.train_hooks(job),
    *([Track()] if {*experiment.trackers} - {'tensorboard'} else []),
    LogMetrics(),
    SaveCheckpoints(),  # before evals: a checkpoint is written while they run, and an eval that fails loses nothing
    Evaluate(),
    *([Sample()] if experiment.sample_every_steps is not None else []),
    *experiment.hooks(),  # these read the evals of the step in `run.evals`
    Profile(),
    ReportEnd(),  # last: everything is done when it says so
  )


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
  """Runs a training job to its end; returns OK, or PreemptionGuard's exit code after SIGTERM, with everything saved.

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
    StorageError, TrainingDivergedError, TrainingInputEndedError: it cannot continue; complete steps are saved.
  """
  experiment, guard = job.experiment, PreemptionGuard()
  hooks = job_hooks(job) if hooks is None else tuple(hooks)
  goodput = Goodput(job_log_dir if is_primary() else None, begun=begun)
  # `on_failure` is inside `stack`: a process that fails exits at once, as closing `stack` would wait for the others.
  with contextlib.ExitStack() as stack, emergency.on_failure(), refuse_exit():
    # Check. Everything that can be refused is refused before anything is written.
    _check_hooks(job, hooks)
    check_vocabulary(job)
    model = partition_job(job, mesh)
    if any(hook.wants_examples for hook in hooks):
      model = dataclasses.replace(model, keeps_examples=True)
    check_state_fits(model)
    iterator = make_training_iterator(job)
    with goodput.spend('compilation'):
      model.train_step.trace()  # a loss or an optimizer that fails is refused, too
    run = TrainRun(
      job=job,
      job_log_dir=job_log_dir,
      model=model,
      iterator=iterator,
      hooks=hooks,
      goodput=goodput,
      guard=guard,
      stack=stack,
    )
    for hook in hooks:
      hook.prepare(run)

    # Open.
    record = _claim(run)
    run.watchdog = stack.enter_context(
      watch_steps(
        run.job_log_dir,
        emergency,
        timeout_s=experiment.step_timeout_s,
        first_step_timeout_s=experiment.first_step_timeout_s,
      )
    )
    stack.callback(guard.stop)
    if (base := base_of(model, experiment.origin())) is not None:
      run.base = base.identity
    for hook in hooks:
      hook.open(run)

    # Restore or initialize.
    _restore(run, record, config_json)
    for hook in hooks:
      hook.start(run)
    from_hooks = (hook.batches(run) for hook in hooks)
    run.batches = next((batches for batches in from_hooks if batches is not None), None) or run.read_ahead()
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
      saved = f'step {run.step} is saved' if run.step else 'before the first step'
      run.message(f'{guard.cause}: {saved}; the same command goes on from there.')
      return guard.exit_code


def _check_hooks(job: Job, hooks: Sequence[TrainHook]) -> None:
  """Raises a UserError for an object that is not a hook."""
  for hook in hooks:
    if not isinstance(hook, TrainHook):
      raise UserError(f'hooks() of {job.name} returns {hook!r}, which is not a TrainHook: see docs/hooks.md.')


def _claim(run: TrainRun) -> CheckpointRecord:
  """Claims the directory, on process 0 and until the job ends. Raises a UserError on every process."""
  record = CheckpointRecord(run.job_log_dir)

  def claim_here() -> None:
    record.claimed = run.stack.enter_context(claim(run.job_log_dir, experiment_name=run.job.name))

  try:
    primary_decides(claim_here, 'claim', limit_s=LOOK_LIMIT_S)
  except PrimaryError as error:
    raise UserError(str(error)) from error
  return record


def _restore(run: TrainRun, record: CheckpointRecord, config_json: str) -> None:
  """Opens the checkpoints, makes the loop with the first state, and records the config now that nothing is refused."""
  experiment = run.experiment
  retention = Retention(
    max_to_keep=experiment.checkpoint_max_to_keep,
    keep_every_n_steps=experiment.checkpoint_keep_every_steps,
    keep_every_hours=experiment.checkpoint_keep_every_hours,
  )
  run.checkpointer = record.open_checkpoints(retention=retention)
  run.stack.callback(run.checkpointer.close)
  with run.goodput.spend('checkpoint_restore'):
    state = _first_state(run)
  trains = run.first_step < experiment.num_train_steps or not run.is_saved
  if is_primary():
    with storage_errors(run.job_log_dir):
      if trains or not (run.job_log_dir / CONFIG_FILE).exists():  # config.json has the settings of the last steps
        write_config(run.job_log_dir, config_json)
      record.write(run.checkpointer.latest_step() or 0)
  run.progress = Progress(experiment.num_train_steps, run.first_step, primary=is_primary())
  run.stack.callback(run.progress.close)

  def before_step(batch: dict[str, jax.Array]) -> None:
    for hook in run.hooks:
      hook.before_step(run, batch)

  run.loop = TrainingLoop(
    train_step=run.model.train_step,
    state=state,
    num_train_steps=experiment.num_train_steps,
    max_consecutive_skips=run.job.task.max_consecutive_skips,
    is_awaited=run.is_awaited,
    platform=next(iter(state.step.devices())).platform,
    on_activity=run.watchdog.beat,
    should_stop=lambda: run.end_reason is not None or run.should_stop(),
    before_step=before_step,
  )
  if not run.is_saved:  # the first state may be saved before a step sets the position of the input
    run.loop.input_state = run.iterator.get_state()


def _first_state(run: TrainRun) -> TrainState:
  """Returns the first state: a hook's, the newest checkpoint's, or a new one; sets what `run` says about it."""
  newest = newest_step(run.checkpointer)
  for hook in run.hooks:
    if (restored := hook.restore(run, newest)) is not None:
      assert restored.input_state is not None
      run.iterator.set_state(restored.input_state)
      run.first_step, run.is_saved = restored.step, restored.step <= newest
      run.origin = f'resuming after step {restored.step} from {restored.origin}'
      return restored.state
  if newest < 0 and origin_of(run.experiment) is None:
    run.model.train_step.start_compiling()  # while the new state is drawn
  state, run.first_step, run.origin = restore_or_init(run.model, run.checkpointer, run.job, run.iterator)
  run.is_saved = newest >= 0 or run.first_step == 0
  return state


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
