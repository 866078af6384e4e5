"""LoggedMetrics: all metrics of a logged training step, those of the step itself and those of the job around it."""

from collections.abc import Mapping

import jax

from spmd_tasks.distributed import SlowestProcess
from spmd_tasks.errors import is_own
from spmd_tasks.experiment import Job
from spmd_tasks.inputs import Prefetcher, progress_of
from spmd_tasks.layers import RESERVED_METRICS
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.timing import StepRates
from spmd_tasks.programs.training_loop import TrainingLoop
from spmd_tasks.runtime import CompilationCounter, Metric, PartitionedModel, finish_metrics


class LoggedMetrics:
  """Adds to the metrics of a logged step what has happened since the one before."""

  def __init__(
    self,
    job: Job,
    model: PartitionedModel,
    goodput: Goodput,
    batches: Prefetcher,
    loop: TrainingLoop,
    slowest: SlowestProcess,
    compilations: CompilationCounter,
  ):
    self._input = job.train_input
    loss = getattr(job.task, 'loss', None)  # Pax' tasks have none
    self._is_own_loss = loss is not None and is_own(loss)
    self._model, self._goodput, self._batches, self._loop = model, goodput, batches, loop
    self._slowest, self._compilations = slowest, compilations
    self._rates = StepRates.of(model, goodput)
    self._num_programs = 0

  def start(self, step: int) -> None:
    """Counts from now on, after `step`, the first one: everything is compiled."""
    self._rates.start(step)
    self._num_programs = self._compilations.num_programs

  def own_names(self, step_metrics: Mapping[str, jax.Array]) -> list[str]:
    """Returns the names of those metrics of a step that a loss of the experiment's own has returned."""
    names = [name for name in step_metrics if not name.startswith(('loss/', 'loss_weight/'))]
    return [name for name in names if name not in (*RESERVED_METRICS, 'accuracy')] if self._is_own_loss else []

  def metrics(self, step: int, step_metrics: Mapping[str, jax.Array]) -> dict[str, Metric]:
    """Returns all metrics of a step; waits for the step. A collective call."""
    metrics = finish_metrics(jax.device_get(step_metrics))
    del metrics['skipped']
    metrics |= self._rates.since_last(step) | self._goodput.metrics()
    metrics |= self._slowest.update(
      step,
      loop_seconds=self._goodput.loop_seconds()[0],
      seconds_waited=self._batches.seconds_waited,
      seconds_blocked=self._loop.seconds_blocked,
    )
    metrics |= progress_of(self._input, self._loop.outcome_input_state)
    return metrics | {
      'num_skipped_steps': self._loop.num_skipped,
      'padding_waste': self._model.padding_waste,
      'num_compilations': self._compilations.num_programs - self._num_programs,
    }
