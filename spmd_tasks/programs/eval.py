"""--mode=eval: a checkpoint's weights on every eval set, once, or again for each new checkpoint of a running job."""

import time

from etils import epath

from spmd_tasks.experiment import Job
from spmd_tasks.programs.evaluation import Evaluator
from spmd_tasks.programs.progress import format_metrics, make_progress
from spmd_tasks.programs.restoring import (
  checkpoint_directory,
  is_primary,
  partition_job,
  restore_evaluation_weights,
)
from spmd_tasks.runtime import exit_codes
from spmd_tasks.runtime.checkpoints import Checkpointer


def evaluate(
  job: Job, job_log_dir: epath.Path, *, step: int | None = None, watch: bool = False, poll_s: float = 10.0
) -> int:
  """Evaluates one checkpoint (None: the newest); returns an exit code.

  Args:
    job: the built experiment.
    job_log_dir: a training job's directory, running or not; only `eval/` below it is written.
    step: the checkpoint's step.
    watch: go on with every new checkpoint until that of `num_train_steps`.
    poll_s: seconds between two looks for a new checkpoint.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    ValueError: the experiment has no eval sets, or both `step` and `watch` are given.
  """
  if watch and step is not None:
    raise ValueError(f'--watch follows every new checkpoint, but --checkpoint_step {step} names one: give one of them.')
  if not job.eval_inputs:
    raise ValueError(f'experiment {job.name} has no eval sets: return some from its eval_inputs().')
  model = partition_job(job)
  checkpointer = Checkpointer(checkpoint_directory(job_log_dir), read_only=True)
  evaluator = Evaluator(
    model,
    job.eval_inputs,
    job_log_dir,
    tensorboard=job.experiment.tensorboard,
    input_timeout_s=job.experiment.input_timeout_s,
  )
  progress = make_progress(len(job.eval_inputs), 0, primary=is_primary())
  try:
    evaluated = -1
    while True:
      if not watch or (checkpointer.latest_step() or -1) > evaluated:
        weights, restored = restore_evaluation_weights(model, checkpointer, step)
        if restored > evaluated:  # not where the newest is damaged, and the one before it has been evaluated
          evaluated = restored
          for name, metrics in evaluator.evaluate(restored, weights).items():
            progress.message(f'step {restored}  eval {name}: {format_metrics(metrics)}')
      if not watch or evaluated >= job.experiment.num_train_steps:
        return exit_codes.OK
      time.sleep(poll_s)
  finally:
    progress.close()
    evaluator.close()
    checkpointer.close()
