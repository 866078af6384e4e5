"""Evaluator: evaluates whole eval sets, and records their metrics; --mode=eval and training jobs share it."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
from typing import Any, cast

from absl import logging
from clu import metrics as clu_metrics
from etils import epath
import jax
import numpy as np

from spmd_tasks.activity import doing
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.comparison import refuse_differences
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.files import storage_errors
from spmd_tasks.inputs import Prefetcher, State
from spmd_tasks.inputs.base import data_of, source_names
from spmd_tasks.layers.losses import StepOutputs
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.runtime.media import Media, check_media_name
from spmd_tasks.runtime.metrics import (
  METRICS_FILE,
  Metric,
  MultiWriter,
  finish_metrics,
  make_writer,
  read_places,
  split_summaries,
)
from spmd_tasks.runtime.partition import EvaluationStep

BatchMetrics = dict[str, Any]  # clu Metrics, and `outputs`


def refuse_other_data(topic: str, states: Mapping[str, State], limit_s: int) -> None:
  """Raises a UserError on a process whose inputs read other data than on process 0; `states` are their positions."""
  data = {f'fingerprint of {name}.{path}': value for name in states for path, value in data_of(states[name]).items()}
  refuse_differences(topic, data, limit_s=limit_s)


class Evaluator:
  """Evaluates whole eval sets and records their metrics in `<job_log_dir>/eval/<name>/metrics.jsonl` (and events).

  Each example counts once: the last batch of a set is filled up with rows of weight 0. Sums over batches are float64.
  """

  def __init__(self, job: Job, model: PartitionedModel, job_log_dir: epath.Path, *, keeps_examples: bool = False):
    """Makes an evaluator of a job's eval sets; each evaluation reads a set from its start. Nothing is compiled yet.

    With `keeps_examples`, `examples` has the loss's per-example outputs of each evaluated set.
    """
    self._inputs, self._train_spec = job.eval_inputs, model.input_layout.spec
    self.names = list(self._inputs)  # of the eval sets
    self._job_log_dir = job_log_dir
    self._trackers = job.experiment.trackers
    self._input_timeout_s = job.experiment.input_timeout_s
    self._limit_batches = job.experiment.eval_limit_batches
    judges = {name: getattr(eval_set, 'judge', None) for name, eval_set in self._inputs.items()}
    self._judges = None
    if any(judges.values()):
      from spmd_tasks.programs.judges import Judges  # with all of decoding: 0.7 s

      self._judges = Judges(job, model, {name: judge for name, judge in judges.items() if judge is not None})
      keeps_examples = keeps_examples or self._judges.want_scores
    self.examples: dict[str, dict[str, np.ndarray]] = {}
    self.media: dict[str, dict[str, Media]] = {}
    self._histograms: dict[str, dict[str, np.ndarray]] = {}
    self._steps_by_shape = StepsByShape(functools.partial(model.eval_step, keeps_examples=keeps_examples))
    self._steps = {name: self._steps_by_shape.of(eval_set.element_spec()) for name, eval_set in self._inputs.items()}
    self._iterators: dict[str, Any] = {}  # made before the first evaluation, which uses them
    self._writers: dict[str, MultiWriter] = {}

  def open(self, limit_s: int) -> None:
    """Makes the iterators of the first evaluation now, so that a missing or empty file ends a job before it trains.

    Raises a UserError, also on a process whose sets have other files, or another tokenizer, than on process 0.
    """
    self._iterators = {name: self._make_iterator(name) for name in self._inputs}
    if jax.process_count() > 1:
      states = {f'eval_inputs.{name}': iterator.get_state() for name, iterator in self._iterators.items()}
      refuse_other_data('data files of eval sets', states, limit_s)

  def check(self) -> None:
    """Traces the eval steps whose batches differ from training batches; `compile` uses the traces.

    Raises a UserError if the model or the loss does not take a set's batches.
    """
    for name, step in self._steps.items():
      if step.layout.spec != self._train_spec:
        with self._shapes_in_errors(name, step):
          step.trace()

  def compile(self, *, needs_examples: bool = False) -> None:
    """Compiles the eval steps now instead of in the first evaluation.

    Raises a UserError if `needs_examples` and the loss returns no per-example outputs.
    """
    for name, step in self._steps.items():
      with self._shapes_in_errors(name, step):
        outputs = step.compile().out_info.get('outputs')
      if needs_examples and (outputs is None or not outputs.per_example):
        raise UserError(
          f'--write_examples has nothing to write of eval set {name!r}, because the loss returns no per-example '
          'outputs: return LossOutput(loss=..., weight=..., per_example={NAME: [B, ...]}), or leave the flag out.'
        )
    if self._judges is not None:
      self._judges.compile()

  def evaluate(
    self, variables: Any, step: int, on_batch: Callable[[], None] = lambda: None
  ) -> Iterator[tuple[str, dict[str, Metric]]]:
    """Yields (eval set, its metrics) for each set.

    Args:
      variables: the model's, padded, on the mesh.
      step: the train step of the variables.
      on_batch: called before every batch, and by judges before every step of the generation; may raise to stop.
    """
    for name in self.names:
      yield name, self._evaluate_set(name, variables, step, on_batch)

  def record(self, name: str, step: int, metrics: Mapping[str, Metric], place: str | None = None) -> None:
    """Appends a set's metrics of train step `step` to its file; the last line of a step counts.

    `place` names where the weights come from, if not from a checkpoint of the job.
    """
    for metric, media in self.media.get(name, {}).items():
      check_media_name(metric)
      self._writer(name).write_media(step, metric, media)
    self._writer(name).write(step, metrics, place)
    self._writer(name).write_histograms(step, self._histograms.pop(name, {}))

  def is_recorded(self, name: str, step: int, place: str | None = None) -> bool:
    """Returns whether the set's metrics file has a line of `step` with weights from `place`."""
    directory = self._directory(name)
    with storage_errors(directory / METRICS_FILE), contextlib.suppress(FileNotFoundError):
      return (step, place) in read_places(directory)
    return False

  def close(self) -> None:
    """Closes the metrics files, and the iterators that no evaluation has used."""
    for iterator in self._iterators.values():
      iterator.close()
    for writer in self._writers.values():
      writer.close()

  def _writer(self, name: str) -> MultiWriter:
    """Returns the set's writer, made on first use: a run that ends before its first eval writes nothing."""
    if name not in self._writers:
      self._writers[name] = make_writer(self._directory(name), trackers=self._trackers, primary=is_primary())
    return self._writers[name]

  def _directory(self, name: str) -> epath.Path:
    return self._job_log_dir / 'eval' / name

  def _make_iterator(self, name: str) -> Any:
    eval_set = self._inputs[name]
    is_whole = getattr(eval_set, 'gives_whole_batches', False)  # of plain data (inputs/batches.py)
    return eval_set.make_iterator(*((0, 1) if is_whole else (jax.process_index(), jax.process_count())))

  def _evaluate_set(self, name: str, variables: Any, step: int, on_batch: Callable[[], None]) -> dict[str, Metric]:
    iterator = self._iterators.pop(name, None) or self._make_iterator(name)
    finished: list[BatchMetrics] = []
    in_flight: BatchMetrics | None = None
    num_launched = 0
    place = functools.partial(self._place, name)
    activity = lambda: f'evaluating {name}, {num_launched:,} of at most {self._limit_batches:,} batches'
    with doing(activity), Prefetcher(iterator, place, timeout_s=self._input_timeout_s) as batches:
      for (eval_step, batch), _ in batches:
        on_batch()
        if num_launched == self._limit_batches:
          logging.warning(
            'eval set %r has more than eval_limit_batches = %d batches, of which only these are evaluated: give a set '
            'that ends (num_epochs=1, max_batches, no repeat()), or raise eval_limit_batches.',
            *(name, num_launched),
          )
          break
        num_launched += 1
        with self._shapes_in_errors(name, eval_step):
          launched = eval_step.with_variables(variables, batch, np.int32(step))
        if in_flight is not None:  # read one batch late: the device always has the next one
          finished.append(jax.device_get(in_flight))
        in_flight = launched
    if in_flight is None:
      raise UserError(
        f'eval set {name!r} has no batch, its source is empty: correct eval_inputs.{name}, or leave it out of '
        'eval_inputs().'
      )
    finished.append(jax.device_get(in_flight))
    beside = [metrics.pop('outputs', None) for metrics in finished]
    outputs: list[StepOutputs] = [output for output in beside if output is not None]
    means = _mean_over_batches(finished)
    if not np.isfinite(means['loss']):
      look = f'look for ids or labels outside [0, vocab_size) in eval_inputs.{name}.'
      logging.warning('eval set %r: the loss of step %d is %s: %s', name, step, means['loss'], look)
    metrics = finish_metrics(means, source_names(self._inputs[name])) | {'num_batches': len(finished)}
    scalars, self._histograms[name], self.media[name] = split_summaries(outputs)
    metrics |= scalars
    parts = [output.examples() for output in outputs]
    self.examples[name] = {key: np.concatenate([part[key] for part in parts]) for key in (parts[0] if parts else ())}
    if self._judges is None:
      return metrics
    judged = self._judges.metrics(name, variables, step, outputs, on_batch)
    return metrics | {f'task_{key}' if key in metrics else key: value for key, value in judged.items()}

  @contextlib.contextmanager
  def _shapes_in_errors(self, name: str, step: EvaluationStep) -> Iterator[None]:
    """Adds to an error, such as one of the model, which arrays of a set are missing or have rows of another shape."""
    try:
      yield
    except Exception as error:
      train, own = self._train_spec, step.layout.spec
      other = [
        f'{key!r} {list(own[key].shape)}, train_input {list(train[key].shape)}'
        for key in own
        if key in train and own[key].shape[1:] != train[key].shape[1:]
      ]
      other += [f'no {key!r}, which train_input has' for key in train if key not in own]
      if not other:
        raise
      shapes = f'eval_inputs.{name} has {"; ".join(other)} (make their rows alike, unless the model takes both)'
      if isinstance(error, UserError):
        raise UserError(f'{shapes}; {error}') from error
      error.add_note(shapes)
      raise

  def _place(self, name: str, batch: Mapping[str, np.ndarray]) -> tuple[EvaluationStep, Any]:
    """Returns the step for a batch of a set, and the batch on the mesh."""
    step, eval_set = self._steps[name], cast(Any, self._inputs[name])
    if getattr(eval_set, 'gives_whole_batches', False):
      step = self._steps_by_shape.of(eval_set.spec_of(batch))  # a smaller last batch has a step of its own
      return step, step.place(step.layout.own_rows(batch))
    if getattr(eval_set, 'shapes_may_vary', False):
      step = self._steps_by_shape.of(batch)
    return step, step.place(batch)


def _mean_over_batches(batches: list[BatchMetrics]) -> dict[str, np.ndarray]:
  """Computes the weighted means over all batches, scalars or [E]; 0 if no batch has any weight.

  Metrics of other kinds than Average are merged; values that are neither a number nor a vector are left out.
  """
  means = {}
  for name, first in batches[0].items():
    if type(first) is clu_metrics.Average:
      total, count = (
        sum(np.asarray(getattr(batch[name], part), np.float64) for batch in batches) for part in ('total', 'count')
      )
      means[name] = np.divide(total, count, out=np.zeros_like(total), where=count != 0)
    else:
      value = functools.reduce(lambda merged, batch: merged.merge(batch[name]), batches[1:], first).compute()
      if isinstance(value, jax.Array | np.ndarray | np.generic | float | int) and np.ndim(value) <= 1:
        means[name] = np.asarray(value, np.float64)
  return means
