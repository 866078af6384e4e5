"""ProfileCapture: a range of training steps through JAX's profiler."""

from collections.abc import Callable

from etils import epath
import jax


class ProfileCapture:
  """Captures steps [first, last) with JAX's profiler into a directory that TensorBoard and XProf read."""

  def __init__(self, steps: tuple[int, int] | None, directory: epath.Path):
    self._steps, self._directory, self._running = steps, directory, False

  def before_step(self, step: int, settle: Callable[[], None]) -> None:
    """Starts or ends the capture at its borders; `settle` waits for the step in flight."""
    is_inside = self._steps is not None and self._steps[0] <= step < self._steps[1]
    if is_inside == self._running:
      return
    settle()
    if is_inside:
      jax.profiler.start_trace(str(self._directory))
      self._running = True
    else:
      self.close()

  def close(self) -> None:
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
