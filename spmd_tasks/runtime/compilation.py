"""CompilationCounter: how many programs XLA was asked to compile, so that a run can show that it did so only once.

Usage:

    with CompilationCounter() as compilations:
      first_step()
      warm = compilations.num_programs
      ...
      print(compilations.num_programs - warm, 'programs compiled after the first step')
"""

from typing import Self

import jax

# What JAX (0.10 and 0.11) reports each time that a program is missing from its caches in memory; reading the program
# back from a persistent compilation cache counts too, since the step waits for that as well.
_BACKEND_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
  """Counts the compilations of this process, on every thread, between entering and leaving it.

  Counters may nest and overlap, and one may be entered again, where it counts on. Only what runs between `__enter__`
  and `__exit__` is seen.
  """

  def __init__(self):
    self._seconds: list[float] = []

  @property
  def num_programs(self) -> int:
    return len(self._seconds)

  def __enter__(self) -> Self:
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *exception: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **metadata: str | int) -> None:
    # Compilations end on many threads; list.append is atomic where `count += 1` is not.
    if event == _BACKEND_COMPILE_EVENT:
      self._seconds.append(duration_secs)
