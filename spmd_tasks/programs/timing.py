"""Measures where a training job's time goes: until its first step, from step to step, and within a few steps.

clock = StartupClock()                        # phases before the first step
with clock.phase('partition'):
  ...
rates = StepRates.of(model, goodput)          # steps, tokens or examples per second, MFU, waiting for the input
profile = ProfileCapture((10, 12), directory) # a trace of steps [10, 12) by JAX's profiler
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import math
import os
import time

from etils import epath
import jax
import numpy as np

from spmd_tasks.files import storage_errors
from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.runtime import InputSpec, PartitionedModel, model_flops_per_train_step, peak_flops_per_device


def process_start_time() -> float:
  """Returns when this process began, in seconds since the epoch; to about 10 ms, on Linux only (elsewhere: now)."""
  try:
    with open('/proc/self/stat', encoding='ascii') as file:
      ticks = float(file.read().rpartition(')')[2].split()[19])
    with open('/proc/uptime', encoding='ascii') as file:
      uptime = float(file.read().split()[0])
  except OSError:
    return time.time()
  return time.time() - uptime + ticks / os.sysconf('SC_CLK_TCK')


class StartupClock:
  """Adds up named phases between the start of the process and its first finished step, in seconds.

  The time before the clock was made is the phase `imports`. Time that no phase covers is `other`. Phases may overlap: a
  new job compiles its train step while it draws its first state.

  Attributes:
    begun: when the process was started, in seconds since the epoch.
    phases: seconds by name.
  """

  def __init__(self):
    self.begun = process_start_time()
    self.phases: dict[str, float] = {'imports': time.time() - self.begun}

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Adds the time inside the context to the phase."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self.add(name, time.perf_counter() - start)

  def add(self, name: str, seconds: float) -> None:
    """Adds seconds to the phase."""
    self.phases[name] = self.phases.get(name, 0.0) + seconds

  def finish(self) -> dict[str, float]:
    """Returns all phases, `other` and `total`; to be called when the first step has finished."""
    total = time.time() - self.begun
    return self.phases | {'other': max(0.0, total - sum(self.phases.values())), 'total': total}


def format_startup(phases: dict[str, float]) -> str:
  """Formats the phases of a StartupClock as one line for people."""
  parts = ', '.join(f'{name} {seconds:.1f}' for name, seconds in phases.items() if name != 'total' and seconds >= 0.05)
  return f'first step finished {phases["total"]:.1f} s after the start of the process ({parts})'


@dataclasses.dataclass(kw_only=True)
class StepRates:
  """Measures rates from one logged step to the next.

  Attributes:
    counted: what is counted beside steps: 'tokens', or 'examples' of batches without tokens.
    counted_per_step: how many of them a training batch has.
    peak_steps_per_second: steps per second at the devices' peak FLOP/s; None where the peak is not known.
    goodput: counts the time in the loop.
  """

  counted: str
  counted_per_step: int
  peak_steps_per_second: float | None
  goodput: Goodput
  _last: tuple[int, float, float] = (-1, 0.0, 0.0)

  @classmethod
  def of(cls, model: PartitionedModel, goodput: Goodput) -> 'StepRates':
    """Makes the rates of a model's training."""
    counted, number = count_batch(model.input_layout.spec)
    peak = _peak_steps_per_second(model)
    return cls(counted=counted, counted_per_step=number, peak_steps_per_second=peak, goodput=goodput)

  def start(self, step: int) -> None:
    """Starts to measure after `step`, the first one, so that compilation is left out."""
    self._last = step, *self.goodput.loop_seconds()

  def since_last(self, step: int) -> dict[str, float]:
    """Returns steps and what is counted per second, waiting and MFU since the last call; {} if no step was made."""
    last_step, last_seconds, last_waited = self._last
    if step <= last_step:
      return {}
    self.start(step)
    steps_per_second = (step - last_step) / (self._last[1] - last_seconds)
    rates = {
      'steps_per_second': steps_per_second,
      f'{self.counted}_per_second': steps_per_second * self.counted_per_step,
      'host_wait_fraction': (self._last[2] - last_waited) / (self._last[1] - last_seconds),
    }
    if self.peak_steps_per_second is not None:
      rates['mfu'] = steps_per_second / self.peak_steps_per_second
    return rates


def count_batch(spec: InputSpec) -> tuple[str, int]:
  """Counts what a batch has: 'tokens', the positions of its largest integer input [B, T], or else 'examples', its rows.

  Positions that a text does not fill count as well.
  """
  tokens = [
    math.prod(each.shape) for each in spec.values() if len(each.shape) == 2 and np.issubdtype(each.dtype, np.integer)
  ]
  return ('tokens', max(tokens)) if tokens else ('examples', next(iter(spec.values())).shape[0])


def _peak_steps_per_second(model: PartitionedModel) -> float | None:
  """Returns the steps per second of devices that do nothing but model FLOPs at their peak; None for unknown devices."""
  peak = peak_flops_per_device(jax.devices()[0].device_kind)
  if peak is None:
    return None
  flops = model_flops_per_train_step(
    model.task, model.input_layout.spec, model.abstract_state.variables, model.weight_specs
  )
  return peak * model.mesh.size / flops


class ProfileCapture:
  """Captures steps [first, last) with JAX's profiler into a directory that TensorBoard and XProf read."""

  def __init__(self, steps: tuple[int, int] | None, directory: epath.Path):
    self._steps, self._directory, self._running = steps, directory, False

  def changes_at(self, step: int) -> bool:
    """Returns whether the capture starts or ends after `step`: no step may be in flight then."""
    return self._steps is not None and step in self._steps

  def after_step(self, step: int) -> None:
    """Starts or ends the capture at its borders; to be called before the first step too, with the step restored."""
    is_inside = self._steps is not None and self._steps[0] <= step < self._steps[1]
    if is_inside and not self._running:
      with storage_errors(self._directory):
        jax.profiler.start_trace(str(self._directory))
      self._running = True
    elif not is_inside:
      self.close()

  def close(self) -> None:
    """Ends the capture, if one is running."""
    if self._running:
      self._running = False
      with storage_errors(self._directory):
        jax.profiler.stop_trace()
