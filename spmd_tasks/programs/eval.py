"""--mode=eval: evaluates a checkpoint on every eval set, once or again for each new checkpoint.

Metrics go to the files that the training job's own evals write. A step that is recorded there already is shown and not
recorded again: the file keeps one line per step, from whichever job was first. A job without a checkpoint evaluates the
weights that it would start from, such as `init_from`; their lines name the place. evaluator.py does the work.
"""

from collections.abc import Mapping
import functools
import json
import math

from etils import epath
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.distributed import EmergencyExit, is_primary
from spmd_tasks.distributed.preemption import PreemptedError
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, check_vocabulary, partition_job
from spmd_tasks.files import make_directory, storage_errors, write_durably
from spmd_tasks.programs.evaluator import Evaluator
from spmd_tasks.programs.progress import Progress, format_metrics
from spmd_tasks.programs.restored_weights import open_reader


def evaluate(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  step: int | None = None,
  watch: bool = False,
  poll_s: float = 10.0,
  writes_examples: bool = False,
) -> int:
  """Evaluates one checkpoint, or every new one; returns an exit code: OK, or PreemptionGuard's.

  Args:
    job: the built experiment.
    job_log_dir: a training job's directory, running or not, or a new one; only `eval/` below it is written.
    emergency: ends this process and tells the others when it fails.
    step, watch, poll_s: see `CheckpointReader.checkpoints`.
    writes_examples: write the loss's per-example outputs to `eval/<name>/step_<N>.jsonl`, one line for each example.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the experiment has no eval sets; both `step` and `watch` are given; or the loss returns no per-example
      outputs to write.
  """
  if watch and step is not None:
    raise UserError(f'--watch follows every new checkpoint, but --checkpoint_step {step} names one: give one of them.')
  if not job.eval_inputs:
    raise UserError(f'experiment {job.name} has no eval sets: return some from its eval_inputs().')
  check_vocabulary(job)
  model = partition_job(job)
  evaluator = Evaluator(job, model, job_log_dir, keeps_examples=writes_examples)
  evaluator.open(math.ceil(job.experiment.first_step_timeout_s))
  with open_reader(job, model, job_log_dir, 'eval', emergency) as reader:
    reader.stack.callback(evaluator.close)
    progress = Progress(len(job.eval_inputs), 0, primary=is_primary())
    reader.stack.callback(progress.close)
    try:
      compile_steps = functools.partial(evaluator.compile, needs_examples=writes_examples)
      for variables, restored, place in reader.checkpoints(compile_steps, step=step, watch=watch, poll_s=poll_s):
        origin = '' if place is None else f' of {place}'
        on_batch = functools.partial(reader.beat, restored, 'eval')
        for name, metrics in evaluator.evaluate(variables, restored, on_batch):
          is_recorded = evaluator.is_recorded(name, restored, place)
          note = ' (not recorded: metrics.jsonl has this step)' if is_recorded else ''
          progress.message(f'step {restored}{origin}  eval {name}: {format_metrics(metrics)}{note}')
          if not is_recorded:
            evaluator.record(name, restored, metrics, place)
          if writes_examples:
            _write_examples(job_log_dir / 'eval' / name / f'step_{restored}.jsonl', evaluator.examples[name])
      return exit_codes.OK
    except PreemptedError:
      progress.message(f'{reader.guard.cause}: the same command evaluates again.')
      return reader.guard.exit_code


def _write_examples(path: epath.Path, columns: Mapping[str, np.ndarray]) -> None:
  """Writes one line for each example, on process 0."""
  rows = zip(*(values.tolist() for values in columns.values()), strict=True)
  lines = [json.dumps({'index': index, **dict(zip(columns, row))}) + '\n' for index, row in enumerate(rows)]
  if is_primary():
    with storage_errors(path):
      make_directory(path.parent)
      write_durably(path, ''.join(lines))
