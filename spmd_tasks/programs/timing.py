"""Measures where a training job's time goes: until its first step, from step to step, and within a few steps.

clock = StartupClock()                        # phases before the first step
with clock.phase('partition'):
  ...
rates = StepRates.of(model, seconds_waited)   # steps and tokens per second, MFU, waiting for the input
profile = ProfileCapture((10, 12), directory) # a trace of steps [10, 12) by JAX's profiler
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import os
import time

from etils import epath
import jax

from spmd_tasks.runtime import PartitionedModel, model_flops_per_train_step, peak_flops_per_device


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

  The time before the clock was made is the phase `imports`. Time that no phase covers is `other`.
  """

  def __init__(self):
    self._begun = process_start_time()
    self.phases: dict[str, float] = {'imports': time.time() - self._begun}

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
    total = time.time() - self._begun
    return self.phases | {'other': max(0.0, total - sum(self.phases.values())), 'total': total}


def format_startup(phases: dict[str, float]) -> str:
  """Formats the phases of a StartupClock as one line for people."""
  parts = ', '.join(f'{name} {seconds:.1f}' for name, seconds in phases.items() if name != 'total' and seconds >= 0.05)
  return f'first step finished {phases["total"]:.1f} s after the start of the process ({parts})'


@dataclasses.dataclass(kw_only=True)
class StepRates:
  """Measures rates from one logged step to the next.

  Attributes:
    tokens_per_step: positions of a training batch.
    peak_steps_per_second: steps per second at the devices' peak FLOP/s; None where the peak is not known.
    seconds_waited: returns how long the loop has waited for its input so far.
  """

  tokens_per_step: int
  peak_steps_per_second: float | None
  seconds_waited: Callable[[], float]
  _last_step: int = -1
  _last_time: float = 0.0
  _last_waited: float = 0.0

  @classmethod
  def of(cls, model: PartitionedModel, seconds_waited: Callable[[], float]) -> 'StepRates':
    """Makes the rates of a model's training."""
    return cls(
      tokens_per_step=_num_tokens(model),
      peak_steps_per_second=_peak_steps_per_second(model),
      seconds_waited=seconds_waited,
    )

  def start(self, step: int) -> None:
    """Starts to measure after `step`, the first one, so that compilation is left out."""
    self._last_step, self._last_time, self._last_waited = step, time.perf_counter(), self.seconds_waited()

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Leaves the time inside the context out of the rates."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._last_time += time.perf_counter() - start

  def since_last(self, step: int) -> dict[str, float]:
    """Returns steps and tokens per second, host-wait fraction and MFU since the last call; {} if no step was made."""
    now, waited, num_steps = time.perf_counter(), self.seconds_waited(), step - self._last_step
    if num_steps <= 0:
      return {}
    seconds = now - self._last_time
    rates = {
      'steps_per_second': num_steps / seconds,
      'tokens_per_second': num_steps * self.tokens_per_step / seconds,
      'host_wait_fraction': (waited - self._last_waited) / seconds,
    }
    if self.peak_steps_per_second is not None:
      rates['mfu'] = num_steps / seconds / self.peak_steps_per_second
    self._last_step, self._last_time, self._last_waited = step, now, waited
    return rates


def _num_tokens(model: PartitionedModel) -> int:
  """Counts the tokens of a batch: the size of the largest input's first two dims, padding included."""
  return max(math.prod(spec.shape[:2]) for spec in model.input_layout.spec.values())


def _peak_steps_per_second(model: PartitionedModel) -> float | None:
  """Returns the steps per second of devices that do nothing but model FLOPs at their peak; None for unknown devices."""
  peak = peak_flops_per_device(jax.devices()[0].device_kind)
  if peak is None:
    return None
  flops = model_flops_per_train_step(model.task, model.input_layout.spec, model.abstract_state.weights)
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
      jax.profiler.start_trace(str(self._directory))
      self._running = True
    elif not is_inside:
      self.close()

  def close(self) -> None:
    """Ends the capture, if one is running."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
