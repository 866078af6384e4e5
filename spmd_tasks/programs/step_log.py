"""StepLog: the metrics of logged steps on the host, with rates."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import time

import jax

from spmd_tasks.runtime.flops import model_flops_per_train_step, peak_flops_per_device
from spmd_tasks.runtime.metrics import Metric, finish_metrics
from spmd_tasks.runtime.partition import PartitionedModel


@dataclasses.dataclass(kw_only=True)
class StepLog:
  """Brings the metrics of logged steps to the host, and adds rates over the time since the last logged step."""

  tokens_per_step: int
  peak_steps_per_second: float | None
  seconds_waited: Callable[[], float]
  _last_step: int = -1
  _last_time: float = 0.0
  _last_waited: float = 0.0

  @classmethod
  def of(cls, model: PartitionedModel, seconds_waited: Callable[[], float]) -> 'StepLog':
    """The log of a model's training; `seconds_waited` is the time spent so far in waiting for the input."""
    return cls(
      tokens_per_step=_num_tokens(model),
      peak_steps_per_second=_peak_steps_per_second(model),
      seconds_waited=seconds_waited,
    )

  def start(self, step: int) -> None:
    """Rates count from here; called after the first step, so that compilation is left out."""
    self._last_step, self._last_time, self._last_waited = step, time.perf_counter(), self.seconds_waited()

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Leaves the time inside the context out of the rates."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._last_time += time.perf_counter() - start

  def finish(self, step: int, metrics: dict[str, jax.Array]) -> dict[str, Metric]:
    """The step's metrics as numbers and lists, with steps and tokens per second, host-wait fraction and MFU."""
    finished = finish_metrics(jax.device_get(metrics))
    now, waited, num_steps = time.perf_counter(), self.seconds_waited(), step - self._last_step
    if num_steps > 0:
      seconds = now - self._last_time
      finished['steps_per_second'] = num_steps / seconds
      finished['tokens_per_second'] = num_steps * self.tokens_per_step / seconds
      finished['host_wait_fraction'] = (waited - self._last_waited) / seconds
      if self.peak_steps_per_second is not None:
        finished['mfu'] = num_steps / seconds / self.peak_steps_per_second
      self._last_step, self._last_time, self._last_waited = step, now, waited
    return finished


def _num_tokens(model: PartitionedModel) -> int:
  """Tokens per batch: the size of the largest input's first two dims, padding included."""
  return max(math.prod(spec.shape[:2]) for spec in model.input_layout.spec.values())


def _peak_steps_per_second(model: PartitionedModel) -> float | None:
  """Steps per second if all devices did nothing but model FLOPs at their peak; None where the peak is not known."""
  peak = peak_flops_per_device(jax.devices()[0].device_kind)
  if peak is None:
    return None
  flops = model_flops_per_train_step(model.task, model.input_layout.spec, model.abstract_state.weights)
  return peak * model.mesh.size / flops
