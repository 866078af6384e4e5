"""--mode=eval: a checkpoint's weights on every eval set, once, or again for each new checkpoint of a running job.

Metrics go where the training job's own evals go. A step that is recorded there is shown only: the file keeps one line
for it, whoever was first.
"""

import contextlib
import time

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints.checkpointer import Checkpointer
from spmd_tasks.distributed.emergency_exit import EmergencyExit
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.programs.evaluation import Evaluator
from spmd_tasks.programs.job_setup import (
  checkpoint_directory,
  is_primary,
  newest_step,
  partition_job,
  restore_evaluation_weights,
  watch_steps,
)
from spmd_tasks.programs.progress import format_metrics, make_progress


def evaluate(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  step: int | None = None,
  watch: bool = False,
  poll_s: float = 10.0,
) -> int:
  """Evaluates one checkpoint (None: the newest); returns an exit code: OK, or PREEMPTED after SIGTERM.

  Args:
    job: the built experiment.
    job_log_dir: a training job's directory, running or not; only `eval/` below it is written.
    emergency: the way out of a failure that other processes must hear of.
    step: the checkpoint's step.
    watch: go on with every new checkpoint until that of `num_train_steps`.
    poll_s: seconds between two looks for a new checkpoint.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the experiment has no eval sets, or both `step` and `watch` are given.
  """
  if watch and step is not None:
    raise UserError(f'--watch follows every new checkpoint, but --checkpoint_step {step} names one: give one of them.')
  if not job.eval_inputs:
    raise UserError(f'experiment {job.name} has no eval sets: return some from its eval_inputs().')
  model = partition_job(job)
  with contextlib.ExitStack() as stack, emergency.on_failure():
    watchdog = watch_steps(stack, job.experiment, job_log_dir / 'eval', emergency)
    guard = stack.enter_context(PreemptionGuard())
    checkpointer = Checkpointer(checkpoint_directory(job_log_dir), read_only=True)
    stack.callback(checkpointer.close)
    evaluator = Evaluator(
      model,
      job.eval_inputs,
      job_log_dir,
      tensorboard=job.experiment.tensorboard,
      input_timeout_s=job.experiment.input_timeout_s,
      on_batch=lambda: watchdog.beat(evaluated, 'eval'),
      should_stop=guard.should_stop,
    )
    stack.callback(evaluator.close)
    progress = make_progress(len(job.eval_inputs), 0, primary=is_primary())
    stack.callback(progress.close)
    evaluated = -1
    while not guard.should_stop():
      watchdog.beat(evaluated, 'waiting for a checkpoint')
      if not watch or newest_step(checkpointer) > evaluated:
        with watchdog.allow('restore', job.experiment.first_step_timeout_s):
          weights, restored = restore_evaluation_weights(model, checkpointer, step)
        if restored > evaluated:  # not where the newest is damaged, and the one before it has been evaluated
          evaluated = restored
          num_finished = 0
          for name, metrics in evaluator.evaluate(weights):
            is_recorded = evaluator.is_recorded(name, restored)
            if not is_recorded:
              evaluator.record(name, restored, metrics)
            note = ' (not recorded: metrics.jsonl has this step)' if is_recorded else ''
            progress.message(f'step {restored}  eval {name}: {format_metrics(metrics)}{note}')
            num_finished += 1
          if num_finished < len(evaluator.names):
            break
      if not watch or evaluated >= job.experiment.num_train_steps:
        return exit_codes.OK
      time.sleep(poll_s)
    progress.message('Preempted: the same command evaluates again.')
    return exit_codes.PREEMPTED
