"""StartupClock: measures where the time goes between the start of a process and its first training step."""

from collections.abc import Iterator
import contextlib
import os
import time


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
