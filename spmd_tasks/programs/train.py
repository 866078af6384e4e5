"""--mode=train: restores or initialises a state, trains it, and saves and evaluates at intervals."""

import contextlib
import functools
import json
import math

from etils import epath
import jax

from spmd_tasks import exit_codes
from spmd_tasks.activity import doing, set_activity
from spmd_tasks.checkpoints import RAM_DISK, PeerCopies
from spmd_tasks.distributed import (
  EmergencyExit,
  PreemptionGuard,
  PrimaryError,
  SlowestProcess,
  is_primary,
  primary_decides,
  watch_steps,
)
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import (
  Job,
  check_vocabulary,
  make_training_iterator,
  partition_job,
)
from spmd_tasks.files import storage_errors, write_durably
from spmd_tasks.inputs import InputIterator, Prefetcher
from spmd_tasks.learning import check_num_microbatches
from spmd_tasks.programs.early_end import EarlyEnd, check_early_stop
from spmd_tasks.programs.eval import open_evaluator, refuse_other_data
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.interval_actions import IntervalActions, is_multiple
from spmd_tasks.programs.job_directory import PARAMETERS_FILE, STARTUP_FILE, claim, write_config
from spmd_tasks.programs.logged_metrics import LoggedMetrics
from spmd_tasks.programs.progress import make_progress
from spmd_tasks.programs.restore import LOOK_LIMIT_S, newest_step, restore_or_init
from spmd_tasks.programs.samples import make_sampler
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.programs.timing import ProfileCapture, StartupClock, format_startup
from spmd_tasks.programs.training_loop import TrainingInputEndedError, TrainingLoop
from spmd_tasks.runtime import (
  CompilationCounter,
  PartitionedModel,
  base_of,
  check_state_fits,
  format_parameter_table,
  make_writer,
  saved_part,
)
from spmd_tasks.sharding import (
  SPLIT_BY_DEFAULT,
  even_spec,
  infer_partition_spec_based_on_rank,
  is_quantized,
  num_parts,
  spec_axes,
)
from spmd_tasks.tuning.references import compute_references, name_references, reads_references


def train(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  clock: StartupClock,
  config_json: str,
  begin_anew: bool = False,
) -> int:
  """Runs a training job to its end; returns an exit code: OK, or that of PreemptionGuard with all saved.

  Args:
    job: the built experiment.
    job_log_dir: gets checkpoints, metrics and events; claimed once everything else has been checked.
    emergency: ends this process and tells the others when it fails.
    clock: counting since the start of the process.
    config_json: the resolved config, saved as `config.json`.
    begin_anew: begins at step 0 if the checkpoints of a job that ran here are gone, with its other files set aside.

  Raises:
    UserError: the job does not fit the devices, its input or its directory; nothing is written then.
    StorageError: the disk is full, or fails otherwise.
    TrainingDivergedError: too many steps in a row were not finite.
    TrainingInputEndedError: the input has fewer batches than steps; the last step is saved.
  """
  job = name_references(job, job_log_dir)
  experiment = job.experiment
  # The inner context: a process of several that fails leaves at once, for closing would wait for the others.
  goodput = Goodput(job_log_dir if is_primary() else None, begun=clock.begun)
  with contextlib.ExitStack() as stack, emergency.on_failure():
    # Everything that can be refused is checked before anything is written.
    model, iterator = _check(job, clock)
    with goodput.spend('compilation'):
      model.train_step.trace()  # a loss or an optimizer that fails is refused, too
    sampler = make_sampler(job, model, job_log_dir)
    early_stop = experiment.early_stop(model, job_log_dir)
    check_early_stop(early_stop, experiment, has_eval_sets=bool(job.eval_inputs))
    early_end = EarlyEnd(early_stop, limit_s=math.ceil(experiment.first_step_timeout_s))
    saved = SavedSteps(job_log_dir)
    _claim(stack, job, job_log_dir, saved, begin_anew=begin_anew)
    stack.callback(goodput.close)

    # The job's parts, each closed in reverse order at the end.
    watchdog = stack.enter_context(
      watch_steps(
        job_log_dir,
        emergency,
        timeout_s=experiment.step_timeout_s,
        first_step_timeout_s=experiment.first_step_timeout_s,
      )
    )
    guard = PreemptionGuard()
    stack.callback(guard.stop)
    source = experiment.origin()
    base, part = base_of(model, source), saved_part(model, source)
    allow = functools.partial(watchdog.allow, 'base_digest', experiment.first_step_timeout_s)
    identity = None if base is None else base.start_identifying(job_log_dir, allow=allow)
    checkpointer = saved.open_checkpoints(
      base=identity,
      max_to_keep=experiment.checkpoint_max_to_keep,
      keep_every_n_steps=experiment.checkpoint_keep_every_steps,
      keep_every_hours=experiment.checkpoint_keep_every_hours,
    )
    stack.callback(checkpointer.close)
    copies = None
    if experiment.peer_copy_every_steps is not None:
      directory, limit_s = experiment.peer_copy_directory or RAM_DISK, math.ceil(experiment.first_step_timeout_s)
      copies = stack.enter_context(PeerCopies(directory, job_log_dir, model.padded_state, limit_s=limit_s))
    if source is None and experiment.init_from is None and newest_step(checkpointer) < 0:
      with goodput.spend('compilation'):
        model.train_step.start_compiling()  # while the new state is drawn
    with clock.phase('init or restore'), goodput.spend('checkpoint_restore'):
      state, first_step, origin = restore_or_init(model, checkpointer, job, iterator, copies, identity)
    if is_primary():  # now that the checkpoint has not refused the job
      with storage_errors(job_log_dir):
        write_config(job_log_dir, config_json)
        saved.record(checkpointer.latest_step() or 0)
    goodput.resume(first_step)
    notes: list[str] = []
    if reads_references(job, job_log_dir):
      with watchdog.allow('reference', experiment.first_step_timeout_s), goodput.spend('evaluation'):
        on_batch = functools.partial(watchdog.beat, first_step, 'reference')
        notes = compute_references(job, model, state, first_step, job_log_dir, on_batch=on_batch)
    batches = Prefetcher(
      iterator,
      model.train_step.place,
      depth=experiment.prefetch_batches,
      timeout_s=experiment.input_timeout_s,
      is_idle=lambda: loop.is_idle(),  # of the loop below, which takes the batches
    )
    stack.callback(batches.close)
    writer = make_writer(job_log_dir, tensorboard=experiment.tensorboard, primary=is_primary())
    stack.callback(writer.close)
    evaluator = open_evaluator(stack, job, model, job_log_dir, watchdog=watchdog, guard=guard)
    if sampler is not None:
      stack.callback(sampler.close)
      sampler.resume(first_step)
    progress = make_progress(experiment.num_train_steps, first_step, primary=is_primary())
    stack.callback(progress.close)
    profile = ProfileCapture(experiment.profile_steps, job_log_dir / 'profile')
    stack.callback(profile.close)
    slowest = SlowestProcess(on_change=progress.message, limit_s=math.ceil(experiment.first_step_timeout_s))
    intervals = (
      experiment.checkpoint_every_steps,
      experiment.peer_copy_every_steps,
      experiment.eval_every_steps,
      experiment.sample_every_steps,
    )
    loop = TrainingLoop(
      train_step=model.train_step,
      state=state,
      batches=batches,
      num_train_steps=experiment.num_train_steps,
      max_consecutive_skips=job.task.learner.max_consecutive_skips,
      is_awaited=lambda step: (
        early_end.asks_every_step() or any(is_multiple(step, every) for every in intervals) or profile.changes_at(step)
      ),
      platform=next(iter(state.step.devices())).platform,
      on_activity=watchdog.beat,
      should_stop=guard.should_stop,
    )
    compilations = stack.enter_context(CompilationCounter())
    logged = LoggedMetrics(job, model, goodput, batches, loop, slowest, compilations)

    actions = IntervalActions(
      experiment=experiment,
      model=model,
      part=part,
      loop=loop,
      checkpointer=checkpointer,
      copies=copies,
      evaluator=evaluator,
      sampler=sampler,
      early_end=early_end,
      watchdog=watchdog,
      goodput=goodput,
      progress=progress,
      should_stop=guard.should_stop,
    )

    def preempted() -> int:
      saved = f'step {loop.step} is saved' if loop.step else 'before the first step'
      progress.message(f'{guard.cause}: {saved}; the same command goes on from there.')
      return guard.exit_code

    def end() -> int:
      if loop.step < experiment.num_train_steps:
        progress.message(f'Ended after step {loop.step} of {experiment.num_train_steps}: {early_end.reason}.')
        if is_primary():
          with storage_errors(job_log_dir):
            saved.record(loop.step, is_last=True)
      progress.message(goodput.end())
      return exit_codes.OK

    # Before the first step: reports, compilation, evals that the last job was ended in.
    for line in (_describe(model, origin), *notes):
      progress.message(line)
    if copies is not None:
      progress.message(f'every {experiment.peer_copy_every_steps} steps the state is copied to memory: {copies}')
    if is_primary():
      with storage_errors(job_log_dir / PARAMETERS_FILE):
        write_durably(job_log_dir / PARAMETERS_FILE, format_parameter_table(model) + '\n')
    if first_step < experiment.num_train_steps:
      with goodput.spend('compilation'):
        model.train_step.compile()
      clock.add('trace', model.train_step.trace_seconds)
      clock.add('compile', model.train_step.compile_seconds)
    guard.start()  # not before: up to here SIGTERM loses nothing, and need not wait for the compiler
    missing = actions.missing_evals()
    if missing and not actions.evaluate(missing):
      return preempted()
    if not actions.sample_if_due():
      return preempted()
    if first_step >= experiment.num_train_steps:
      progress.message(f'Nothing to do: step {first_step} of {experiment.num_train_steps} is already saved.')
      return exit_codes.OK
    if missing and early_end.is_reached(first_step, {}):  # as it would have been, had the eval not been interrupted
      return end()

    # The loop. One step is in flight while this body looks at the step before it, unless that step is awaited (on CPU
    # devices each is).
    last_saved, last_evaluated = first_step, None
    profile.after_step(first_step)
    goodput.switch('steps')
    set_activity('running the first step')
    for step, is_skipped, step_metrics in loop:
      waited = batches.seconds_waited + slowest.seconds_waited_elsewhere
      goodput.step(step, is_skipped=is_skipped, seconds_waited=waited)
      if is_skipped:
        progress.message(
          f'skipped an update after step {step}: loss {float(step_metrics["loss"])}, gradient norm '
          f'{float(step_metrics["grad_norm"])}; weights and optimizer are unchanged'
        )
        continue

      progress.step(step)
      if step == first_step + 1:
        set_activity(None)
        phases = clock.finish()
        progress.message(format_startup(phases))
        if is_primary():
          with storage_errors(job_log_dir / STARTUP_FILE):
            write_durably(job_log_dir / STARTUP_FILE, json.dumps(phases) + '\n')
        with doing('compiling for evals and checkpoints'):
          actions.compile()
        logged.start(step)

      if step % experiment.log_every_steps == 0 or step in (first_step + 1, experiment.num_train_steps):
        metrics = logged.metrics(step, step_metrics)
        writer.write(step, metrics)
        progress.log(step, metrics, logged.own_names(step_metrics))

      # The checkpoint first: it is written while the eval runs, and a failing eval loses nothing.
      if is_multiple(step, experiment.checkpoint_every_steps):
        actions.save()
        last_saved = step
      if is_multiple(step, experiment.peer_copy_every_steps):
        actions.copy()
      if is_multiple(step, experiment.eval_every_steps) and actions.evaluate():
        last_evaluated = step
      actions.sample_if_due()
      profile.after_step(step)
      if step < experiment.num_train_steps and early_end.is_reached(step, step_metrics):
        break

    # The end: no step is in flight, whatever ended the loop.
    goodput.switch('program_end')
    if loop.step > last_saved:
      actions.save()
    actions.wait_for_save()
    if loop.input_has_ended:
      raise TrainingInputEndedError(
        f'the training input ended after step {loop.step} of {experiment.num_train_steps}; what was trained is saved. '
        'Let the input repeat itself (num_epochs or num_batches = None), or lower num_train_steps.'
      )
    if loop.step < experiment.num_train_steps and early_end.reason is None:
      return preempted()
    if not actions.sample_if_due():
      return preempted()
    if last_evaluated != loop.step and not actions.evaluate():
      return preempted()
    if loop.step >= experiment.num_train_steps:
      early_end.is_reached(loop.step, step_metrics)  # is told of the last evals too, and changes nothing any more
    return end()


def _check(job: Job, clock: StartupClock) -> tuple[PartitionedModel, InputIterator]:
  """Returns the partitioned model and the training input's iterator. Raises UserError for what cannot be trained."""
  check_vocabulary(job)
  with clock.phase('partition'):
    model = partition_job(job)
  check_state_fits(model)
  check_num_microbatches(_batch_size(model), job.task.learner.num_microbatches)
  for eval_input in job.eval_inputs.values():
    eval_input.element_spec()  # refuses bad settings now, not at the first eval
  with clock.phase('input'):
    iterator = make_training_iterator(job)
    states = {'train_input': iterator.get_state()} if jax.process_count() > 1 else {}
    refuse_other_data(job.eval_inputs, LOOK_LIMIT_S, states)
    return model, iterator


def _claim(
  stack: contextlib.ExitStack, job: Job, job_log_dir: epath.Path, saved: SavedSteps, *, begin_anew: bool
) -> None:
  """Claims the directory, on process 0 and until the stack is closed. Raises UserError on every process."""

  def claim_here() -> None:
    stack.enter_context(claim(job_log_dir, experiment_name=job.name))
    if begin_anew:
      saved.begin_anew()

  try:
    primary_decides(claim_here, 'claim', limit_s=LOOK_LIMIT_S)
  except PrimaryError as error:
    raise UserError(str(error)) from error


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
    trained += f', {whole:,} of them in kernels without split dims, whole on every device'
  by_default = [spec for spec in specs if SPLIT_BY_DEFAULT in spec.tags]
  if by_default and model.mesh.size > 1:
    count, name = sum(math.prod(spec.shape) for spec in by_default), next(filter(None, by_default[0].split_dims))
    trained += f', {count:,} of them in kernels without split dims, whose largest dim is split as {name!r}'
  devices = f'{model.mesh.size} {jax.devices()[0].platform} devices'
  return (
    f'{model.total_num_params:,} parameters{trained}{padding}, mesh {axes} ({devices}), {origin}{_uneven_rows(model)}'
  )


def _uneven_rows(model: PartitionedModel) -> str:
  """Says so if the devices that split a batch, or a microbatch of the learner, do not divide its rows."""
  mesh, true = model.mesh, next(iter(model.input_layout.spec.values()))
  spec = infer_partition_spec_based_on_rank(
    len(true.shape), model.inputs_split_mapping, mesh.axis_names, model.axis_rules
  )
  if spec is None:
    return ''
  num_microbatches = model.task.learner.num_microbatches
  num_rows = true.shape[0] // num_microbatches
  even = even_spec(spec, (num_rows,), mesh.shape)
  wanted, used = (num_parts(spec_axes(each, len(each))[0], mesh.shape) for each in (spec, even))
  if wanted == used:
    return ''
  part = 'microbatch' if num_microbatches > 1 else 'batch'
  return (
    f'; the rows of a {part}, {num_rows}, are no multiple of the {wanted} devices that split them, so each computes '
    f'{num_rows // used}: a multiple of {wanted} is faster'
  )


def _batch_size(model: PartitionedModel) -> int:
  return next(iter(model.input_layout.spec.values())).shape[0]
