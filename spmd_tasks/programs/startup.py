"""StartupClock: where the time goes between the start of the process and its first finished step."""

from collections.abc import Iterator
import contextlib
import os
import time


def process_start_time() -> float:
  """When this process began, in seconds since the epoch; to about 10 ms, on Linux only (elsewhere: now)."""
  try:
    with open('/proc/self/stat', encoding='ascii') as file:
      ticks = float(file.read().rpartition(')')[2].split()[19])
    with open('/proc/uptime', encoding='ascii') as file:
      uptime = float(file.read().split()[0])
  except OSError:
    return time.time()
  return time.time() - uptime + ticks / os.sysconf('SC_CLK_TCK')


class StartupClock:
  """Named phases, in seconds; what no phase covers is `other`."""

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
    self.phases[name] = self.phases.get(name, 0.0) + seconds

  def finish(self) -> dict[str, float]:
    """All phases, `other` and `total`, at the moment when the first step has finished."""
    total = time.time() - self._begun
    return self.phases | {'other': max(0.0, total - sum(self.phases.values())), 'total': total}


def format_startup(phases: dict[str, float]) -> str:
  """One line for people."""
  parts = ', '.join(f'{name} {seconds:.1f}' for name, seconds in phases.items() if name != 'total' and seconds >= 0.05)
  return f'first step finished {phases["total"]:.1f} s after the start of the process ({parts})'
