"""Evaluator: whole eval sets on given weights, each example counted once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import json
from typing import Any

from clu import metrics as clu_metrics
from etils import epath
import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.base import Input
from spmd_tasks.inputs.prefetch import Prefetcher
from spmd_tasks.runtime.compiled_step import CompiledStep
from spmd_tasks.runtime.metrics import Metric, MetricsWriter, finish_metrics, make_writer
from spmd_tasks.runtime.partition import PartitionedModel

Averages = Mapping[str, clu_metrics.Average]


class Evaluator:
  """Runs eval sets from their start and records metrics in `<job_log_dir>/eval/<name>/metrics.jsonl` (and events).

  The last batch of a set is filled up with rows of weight 0, which no metric counts. Sums over batches are float64.
  """

  def __init__(
    self,
    model: PartitionedModel,
    eval_inputs: Mapping[str, Input],
    job_log_dir: epath.Path,
    *,
    tensorboard: bool,
    input_timeout_s: float,
    on_batch: Callable[[], None],
    should_stop: Callable[[], bool],
  ):
    self._inputs = eval_inputs
    self._job_log_dir = job_log_dir
    self._tensorboard = tensorboard
    self._input_timeout_s = input_timeout_s
    self._on_batch = on_batch
    self._should_stop = should_stop
    self._steps = _compiled_steps(model, eval_inputs)
    self._writers: dict[str, MetricsWriter] = {}

  def compile(self) -> None:
    """Compiles what the first evaluation would otherwise compile."""
    for step in self._steps.values():
      step.compile()

  @property
  def names(self) -> list[str]:
    """The eval sets."""
    return list(self._inputs)

  def evaluate(self, weights: Any, names: Iterable[str] | None = None) -> Iterator[tuple[str, dict[str, Metric]]]:
    """(eval set, its metrics) one by one, on padded weights as they live on the mesh; `names`: not all sets but these.

    Ends early where `should_stop` is true: a set that is not finished gives no metrics.
    """
    for name in self.names if names is None else names:
      metrics = self._evaluate_set(name, weights)
      if metrics is None:
        return
      yield name, metrics

  def record(self, name: str, step: int, metrics: Mapping[str, Metric]) -> None:
    """Writes a set's metrics of train step `step`; where the file has some already, the last count."""
    self._writer(name).write(step, metrics)

  def is_recorded(self, name: str, step: int) -> bool:
    """Whether the set's metrics file has a line of `step`; False in a remote directory, which has no such file."""
    path = self._directory(name) / 'metrics.jsonl'
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True) if path.exists() else []
    # The last line may be half there: another job is writing it, or was killed.
    return any(json.loads(line)['step'] == step for line in lines if line.endswith('\n'))

  def _writer(self, name: str) -> MetricsWriter:
    """Made when there is something to write: a run that ends before that leaves no trace."""
    if name not in self._writers:
      self._writers[name] = make_writer(
        self._directory(name), tensorboard=self._tensorboard, primary=jax.process_index() == 0
      )
    return self._writers[name]

  def _directory(self, name: str) -> epath.Path:
    return self._job_log_dir / 'eval' / name

  def _evaluate_set(self, name: str, weights: Any) -> dict[str, Metric] | None:
    """The set's metrics; None where it was given up."""
    eval_step = self._steps[name]
    iterator = self._inputs[name].make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
    finished: list[Averages] = []
    in_flight: Averages | None = None
    with Prefetcher(iterator, eval_step.place, timeout_s=self._input_timeout_s) as batches:
      for batch, _ in batches:
        if self._should_stop():
          return None
        launched = eval_step(weights, batch)
        if in_flight is not None:  # read one batch late: the device always has the next one
          finished.append(jax.device_get(in_flight))
        in_flight = launched
        self._on_batch()
    if in_flight is None:
      raise UserError(
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


def _compiled_steps(model: PartitionedModel, eval_inputs: Mapping[str, Input]) -> dict[str, CompiledStep]:
  """One step per eval set; sets of the same element spec share one, so that it is compiled once."""
  by_spec: dict[tuple[Any, ...], CompiledStep] = {}
  steps = {}
  for name, eval_input in eval_inputs.items():
    spec = eval_input.element_spec()
    key = tuple(sorted((field, leaf.shape, str(leaf.dtype)) for field, leaf in spec.items()))
    steps[name] = by_spec.setdefault(key, model.eval_step(spec))
  return steps
