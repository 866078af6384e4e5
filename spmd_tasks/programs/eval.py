"""--mode=eval: evaluates a checkpoint on every eval set, once or again for each new checkpoint.

Metrics go to the files that the training job's own evals write. A step that is recorded there already is shown and not
recorded again: the file keeps one line of it, from whichever job was first.

`Evaluator` is what this program and the training program share:

    for name, metrics in evaluator.evaluate(variables, step):
      evaluator.record(name, step, metrics)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import functools
import math
from typing import Any

from absl import logging
from clu import metrics as clu_metrics
from etils import epath
import jax
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.activity import doing
from spmd_tasks.distributed import (
  EmergencyExit,
  PreemptionGuard,
  StepWatchdog,
  is_primary,
  refuse_differences,
  watch_steps,
)
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, check_vocabulary, partition_job
from spmd_tasks.files import storage_errors
from spmd_tasks.inputs import Batches, Input, Prefetcher, State, data_of
from spmd_tasks.programs.progress import format_metrics, make_progress
from spmd_tasks.programs.restore import PreemptedError, checkpoints_to_use
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.runtime import (
  METRICS_FILE,
  CompiledStep,
  Metric,
  MetricsWriter,
  PartitionedModel,
  StepsByShape,
  finish_metrics,
  make_writer,
  read_jsonl,
)
from spmd_tasks.tuning.references import name_references

BatchMetrics = Mapping[str, clu_metrics.Metric]


def evaluate(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  step: int | None = None,
  watch: bool = False,
  poll_s: float = 10.0,
) -> int:
  """Evaluates one checkpoint, or every new one; returns an exit code: OK, or that of PreemptionGuard.

  Args:
    job: the built experiment.
    job_log_dir: a training job's directory, running or not; only `eval/` below it is written.
    emergency: the way out of a failure that other processes must hear of.
    step: the checkpoint's step; None takes the newest.
    watch: go on with every new checkpoint until that of `num_train_steps`.
    poll_s: seconds between two looks for a new checkpoint.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the experiment has no eval sets, or both `step` and `watch` are given.
  """
  experiment = job.experiment
  if watch and step is not None:
    raise UserError(f'--watch follows every new checkpoint, but --checkpoint_step {step} names one: give one of them.')
  if not job.eval_inputs:
    raise UserError(f'experiment {job.name} has no eval sets: return some from its eval_inputs().')
  check_vocabulary(job)
  job = name_references(job, job_log_dir)
  refuse_other_data(job.eval_inputs, math.ceil(experiment.first_step_timeout_s))
  model = partition_job(job)
  with contextlib.ExitStack() as stack, emergency.on_failure():
    watchdog = stack.enter_context(
      watch_steps(
        job_log_dir / 'eval',
        emergency,
        timeout_s=experiment.step_timeout_s,
        first_step_timeout_s=experiment.first_step_timeout_s,
      )
    )
    guard = PreemptionGuard()
    stack.callback(guard.stop)
    saved = SavedSteps(job_log_dir)
    checkpointer = saved.open_checkpoints(read_only=True)
    stack.callback(checkpointer.close)
    evaluator = open_evaluator(stack, job, model, job_log_dir, watchdog=watchdog, guard=guard)
    progress = make_progress(len(job.eval_inputs), 0, primary=is_primary())
    stack.callback(progress.close)
    try:
      for variables, restored in checkpoints_to_use(
        model,
        checkpointer,
        experiment,
        step=step,
        watch=watch,
        has_ended_at=saved.has_ended_at,
        poll_s=poll_s,
        watchdog=watchdog,
        should_stop=guard.should_stop,
      ):
        with watchdog.allow('compile', experiment.first_step_timeout_s):
          evaluator.compile()
        guard.start()  # up to here SIGTERM loses nothing, and need not wait for the compiler
        num_finished = 0
        for name, metrics in evaluator.evaluate(variables, restored):
          is_recorded = evaluator.is_recorded(name, restored)
          if not is_recorded:
            evaluator.record(name, restored, metrics)
          note = ' (not recorded: metrics.jsonl has this step)' if is_recorded else ''
          progress.message(f'step {restored}  eval {name}: {format_metrics(metrics)}{note}')
          num_finished += 1
        if num_finished < len(evaluator.names):
          raise PreemptedError
      return exit_codes.OK
    except PreemptedError:
      progress.message(f'{guard.cause}: the same command evaluates again.')
      return guard.exit_code


def open_evaluator(
  stack: contextlib.ExitStack,
  job: Job,
  model: PartitionedModel,
  job_log_dir: epath.Path,
  *,
  watchdog: StepWatchdog,
  guard: PreemptionGuard,
) -> 'Evaluator':
  """Makes the Evaluator of a job's eval sets, which `stack` closes: batches are beats, and SIGTERM ends an eval."""
  evaluator = Evaluator(
    model,
    job.eval_inputs,
    job_log_dir,
    tensorboard=job.experiment.tensorboard,
    input_timeout_s=job.experiment.input_timeout_s,
    on_batch=lambda step: watchdog.beat(step, 'eval'),
    should_stop=guard.should_stop,
  )
  stack.callback(evaluator.close)
  return evaluator


def refuse_other_data(inputs: Mapping[str, Input], limit_s: int, states: Mapping[str, State] | None = None) -> None:
  """Raises a UserError on a process whose inputs read other files, or with another tokenizer, than those of process 0.

  `states` are positions of inputs that have an iterator already.
  """
  states = dict(states or {})
  if jax.process_count() > 1:
    for name, each in inputs.items():
      iterator = each.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
      if hasattr(iterator, 'get_state'):
        states[f'eval_inputs.{name}'] = iterator.get_state()
      if hasattr(iterator, 'close'):
        iterator.close()
  data = {f'fingerprint of {name}.{path}': value for name in states for path, value in data_of(states[name]).items()}
  refuse_differences('data files', data, limit_s=limit_s)


class Evaluator:
  """Evaluates whole eval sets and records their metrics in `<job_log_dir>/eval/<name>/metrics.jsonl` (and events).

  Each example counts once: the last batch of a set is filled up with rows of weight 0. Sums over batches are float64.
  """

  def __init__(
    self,
    model: PartitionedModel,
    eval_inputs: Mapping[str, Input],
    job_log_dir: epath.Path,
    *,
    tensorboard: bool,
    input_timeout_s: float,
    on_batch: Callable[[int], None],
    should_stop: Callable[[], bool],
  ):
    """Makes an evaluator; nothing is compiled or written yet.

    Args:
      model: whose eval step runs.
      eval_inputs: eval sets by name, each read from its start every time.
      job_log_dir: gets the metrics.
      tensorboard: write event files too.
      input_timeout_s: how long one batch may take.
      on_batch: called with the train step after every launched batch.
      should_stop: asked before every batch; True ends the evaluation.
    """
    self._inputs = eval_inputs
    self._job_log_dir = job_log_dir
    self._tensorboard = tensorboard
    self._input_timeout_s = input_timeout_s
    self._on_batch = on_batch
    self._should_stop = should_stop
    self._steps_by_shape = StepsByShape(model.eval_step)
    self._steps = {name: self._steps_by_shape.of(each.element_spec()) for name, each in eval_inputs.items()}
    self._writers: dict[str, MetricsWriter] = {}

  def compile(self) -> None:
    """Compiles the eval steps now instead of in the first evaluation."""
    for step in self._steps.values():
      step.compile()

  @property
  def names(self) -> list[str]:
    """The eval sets."""
    return list(self._inputs)

  def evaluate(
    self, variables: Any, step: int, names: Iterable[str] | None = None
  ) -> Iterator[tuple[str, dict[str, Metric]]]:
    """Yields (eval set, its metrics) for each set. Ends early if `should_stop`: an unfinished set gives no metrics.

    Args:
      variables: of the model, padded, on the mesh.
      step: their train step.
      names: evaluate only these sets; None evaluates all.
    """
    for name in self.names if names is None else names:
      metrics = self._evaluate_set(name, variables, step)
      if metrics is None:
        return
      yield name, metrics

  def record(self, name: str, step: int, metrics: Mapping[str, Metric]) -> None:
    """Appends a set's metrics of train step `step` to its file; the last line of a step counts."""
    self._writer(name).write(step, metrics)

  def is_recorded(self, name: str, step: int) -> bool:
    """Returns whether the set's metrics file has a line of `step`; False in a remote directory, which has no file."""
    path = self._directory(name) / METRICS_FILE
    with storage_errors(path):
      return path.exists() and step in read_jsonl(path.parent)

  def close(self) -> None:
    """Closes the metrics files."""
    for writer in self._writers.values():
      writer.close()

  def _writer(self, name: str) -> MetricsWriter:
    """Returns the set's writer, made on first use: a run that ends before its first eval writes nothing."""
    if name not in self._writers:
      self._writers[name] = make_writer(self._directory(name), tensorboard=self._tensorboard, primary=is_primary())
    return self._writers[name]

  def _directory(self, name: str) -> epath.Path:
    return self._job_log_dir / 'eval' / name

  def _evaluate_set(self, name: str, variables: Any, step: int) -> dict[str, Metric] | None:
    """Returns the set's metrics; None if `should_stop` ended the evaluation."""
    is_whole = isinstance(self._inputs[name], Batches) and self._inputs[name].gives_whole_batches
    shard = (0, 1) if is_whole else (jax.process_index(), jax.process_count())
    iterator = self._inputs[name].make_iterator(*shard)
    finished: list[BatchMetrics] = []
    in_flight: BatchMetrics | None = None
    place = functools.partial(self._place, name)
    with doing(f'evaluating {name}'), Prefetcher(iterator, place, timeout_s=self._input_timeout_s) as batches:
      for (eval_step, batch), _ in batches:
        if self._should_stop():
          return None
        launched = eval_step(variables, batch, np.int32(step))
        if in_flight is not None:  # read one batch late: the device always has the next one
          finished.append(jax.device_get(in_flight))
        in_flight = launched
        self._on_batch(step)
    if in_flight is None:
      raise UserError(
        f'eval set {name!r} has no batch, its source is empty: correct eval_inputs.{name}, or leave it out of '
        'eval_inputs().'
      )
    finished.append(jax.device_get(in_flight))
    means = _mean_over_batches(finished)
    if not np.isfinite(means['loss']):
      logging.warning(
        'eval set %r: the loss of step %d is %s: look for ids or labels outside [0, vocab_size) in eval_inputs.%s.',
        name,
        step,
        means['loss'],
        name,
      )
    return finish_metrics(means) | {'num_batches': len(finished)}

  def _place(self, name: str, batch: Mapping[str, np.ndarray]) -> tuple[CompiledStep, Any]:
    """Returns the step for a batch of a set, and the batch on the mesh."""
    step = self._steps[name]
    if isinstance(given := self._inputs[name], Batches) and given.gives_whole_batches:
      batch = given.as_specified(batch)
      step = self._steps_by_shape.of(batch)  # a smaller last batch has a step of its own
      return step, step.place(step.layout.own_rows(batch))
    if getattr(self._inputs[name], 'shapes_may_vary', False):
      step = self._steps_by_shape.of(batch)
    return step, step.place(batch)


def _mean_over_batches(batches: list[BatchMetrics]) -> dict[str, np.ndarray]:
  """Computes the weighted means over all batches, scalars or [E]; 0 if no batch has any weight.

  Metrics of other kinds than Average are merged; those whose value is no number and no vector are left out.
  """
  means = {}
  for name, first in batches[0].items():
    if type(first) is clu_metrics.Average:
      total, count = (
        sum(np.asarray(getattr(batch[name], part), np.float64) for batch in batches) for part in ('total', 'count')
      )
      means[name] = total / count if count else np.zeros_like(total)
    else:
      merged = first
      for batch in batches[1:]:
        merged = merged.merge(batch[name])
      value = merged.compute()
      if isinstance(value, jax.Array | np.ndarray | np.generic | float | int) and np.ndim(value) <= 1:
        means[name] = np.asarray(value, np.float64)
  return means
