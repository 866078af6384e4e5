"""Evaluator: whole eval sets on given weights, each example counted once."""

from collections.abc import Callable, Mapping
from typing import Any

from clu import metrics as clu_metrics
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from spmd_tasks.runtime.compiled_step import CompiledStep
from spmd_tasks.runtime.metrics import MetricsWriter, finish_metrics, make_writer
from spmd_tasks.runtime.partition import PartitionedModel


class Evaluator:
  """Runs every eval set from its start and writes `<job_log_dir>/eval/<name>/metrics.jsonl` (and events).

  The last batch of a set is filled up with rows of weight 0, which no metric counts.
  """

  def __init__(
    self,
    model: PartitionedModel,
    eval_inputs: Mapping[str, Any],
    job_log_dir: epath.Path,
    *,
    tensorboard: bool,
    on_batch: Callable[[], None] = lambda: None,
  ):
    self._inputs = eval_inputs
    self._job_log_dir = job_log_dir
    self._tensorboard = tensorboard
    self._on_batch = on_batch
    self._steps = _compiled_steps(model, eval_inputs)
    self._writers: dict[str, MetricsWriter] = {}

  def evaluate(self, step: int, weights: Any) -> dict[str, dict[str, float]]:
    """Metrics by eval set at train step `step`, on padded weights as they live on the mesh."""
    results = {}
    for name, eval_input in self._inputs.items():
      results[name] = self._evaluate_set(name, self._steps[name], eval_input, weights)
      self._writer(name).write(step, results[name])
    return results

  def _writer(self, name: str) -> MetricsWriter:
    """Made when there is something to write: a run that ends before that leaves no trace."""
    if name not in self._writers:
      self._writers[name] = make_writer(
        self._job_log_dir / 'eval' / name, tensorboard=self._tensorboard, primary=jax.process_index() == 0
      )
    return self._writers[name]

  def _evaluate_set(self, name: str, eval_step: CompiledStep, eval_input: Any, weights: Any) -> dict[str, float]:
    iterator = eval_input.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
    totals: dict[str, clu_metrics.Average] | None = None
    num_batches = 0
    try:
      while (batch := _next_batch(iterator, eval_step)) is not None:
        averages = eval_step(weights, eval_step.place(batch))
        totals = averages if totals is None else {key: totals[key].merge(averages[key]) for key in totals}
        num_batches += 1
        self._on_batch()
    finally:
      iterator.close()
    if totals is None:
      raise ValueError(
        f'eval set {name!r} has no batch, its source is empty: correct eval_inputs.{name}, or leave it out of '
        'eval_inputs().'
      )
    return finish_metrics({key: float(average.compute()) for key, average in totals.items()}) | {
      'num_batches': num_batches
    }

  def close(self) -> None:
    for writer in self._writers.values():
      writer.close()


def _compiled_steps(model: PartitionedModel, eval_inputs: Mapping[str, Any]) -> dict[str, CompiledStep]:
  """One step per eval set; sets of the same element spec share one, so that it is compiled once."""
  by_spec: dict[tuple[Any, ...], CompiledStep] = {}
  steps = {}
  for name, eval_input in eval_inputs.items():
    spec = eval_input.element_spec()
    key = tuple(sorted((field, leaf.shape, str(leaf.dtype)) for field, leaf in spec.items()))
    steps[name] = by_spec.setdefault(key, model.eval_step(spec))
  return steps


def _next_batch(iterator: Any, eval_step: CompiledStep) -> dict[str, np.ndarray] | None:
  """The next batch of this process, None at the end of the set for all processes.

  A process whose shard ends before another's goes on with rows of weight 0, because every process must run every step.
  """
  batch = next(iterator, None)
  if jax.process_count() == 1:
    return batch
  if not multihost_utils.process_allgather(np.asarray(batch is not None)).any():
    return None
  if batch is None:
    batch = {
      name: np.zeros((leaf.shape[0] // jax.process_count(), *leaf.shape[1:]), leaf.dtype)
      for name, leaf in eval_step.layout.spec.items()
    }
  return batch
