"""Evaluator: whole eval sets on given weights, each example counted once."""

from collections.abc import Callable, Mapping
from typing import Any

from clu import metrics as clu_metrics
from etils import epath
import jax
import numpy as np

from spmd_tasks.inputs.prefetch import Prefetcher
from spmd_tasks.runtime.compiled_step import CompiledStep
from spmd_tasks.runtime.metrics import Metric, MetricsWriter, finish_metrics, make_writer
from spmd_tasks.runtime.partition import PartitionedModel

Averages = Mapping[str, clu_metrics.Average]


class Evaluator:
  """Runs every eval set from its start and writes `<job_log_dir>/eval/<name>/metrics.jsonl` (and events).

  The last batch of a set is filled up with rows of weight 0, which no metric counts. Sums over batches are float64.
  """

  def __init__(
    self,
    model: PartitionedModel,
    eval_inputs: Mapping[str, Any],
    job_log_dir: epath.Path,
    *,
    tensorboard: bool,
    input_timeout_s: float,
    on_batch: Callable[[], None] = lambda: None,
  ):
    self._inputs = eval_inputs
    self._job_log_dir = job_log_dir
    self._tensorboard = tensorboard
    self._input_timeout_s = input_timeout_s
    self._on_batch = on_batch
    self._steps = _compiled_steps(model, eval_inputs)
    self._writers: dict[str, MetricsWriter] = {}

  def compile(self) -> None:
    """Compiles what the first evaluation would otherwise compile."""
    for step in self._steps.values():
      step.compile()

  def evaluate(self, step: int, weights: Any) -> dict[str, dict[str, Metric]]:
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

  def _evaluate_set(self, name: str, eval_step: CompiledStep, eval_input: Any, weights: Any) -> dict[str, Metric]:
    iterator = eval_input.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
    finished: list[Averages] = []
    in_flight: Averages | None = None
    with Prefetcher(iterator, eval_step.place, timeout_s=self._input_timeout_s) as batches:
      for batch, _ in batches:
        launched = eval_step(weights, batch)
        if in_flight is not None:  # read one batch late: the device always has the next one
          finished.append(jax.device_get(in_flight))
        in_flight = launched
        self._on_batch()
    if in_flight is None:
      raise ValueError(
        f'eval set {name!r} has no batch, its source is empty: correct eval_inputs.{name}, or leave it out of '
        'eval_inputs().'
      )
    finished.append(jax.device_get(in_flight))
    return finish_metrics(_mean_over_batches(finished)) | {'num_batches': len(finished)}

  def close(self) -> None:
    for writer in self._writers.values():
      writer.close()


def _mean_over_batches(batches: list[Averages]) -> dict[str, np.ndarray]:
  """The weighted means over all batches, scalars or [E]; 0 where no batch has any weight."""

  def mean(name: str) -> np.ndarray:
    total, count = (
      sum(np.asarray(getattr(batch[name], part), np.float64) for batch in batches) for part in ('total', 'count')
    )
    return total / count if count else np.zeros_like(total)

  return {name: mean(name) for name in batches[0]}


def _compiled_steps(model: PartitionedModel, eval_inputs: Mapping[str, Any]) -> dict[str, CompiledStep]:
  """One step per eval set; sets of the same element spec share one, so that it is compiled once."""
  by_spec: dict[tuple[Any, ...], CompiledStep] = {}
  steps = {}
  for name, eval_input in eval_inputs.items():
    spec = eval_input.element_spec()
    key = tuple(sorted((field, leaf.shape, str(leaf.dtype)) for field, leaf in spec.items()))
    steps[name] = by_spec.setdefault(key, model.eval_step(spec))
  return steps
