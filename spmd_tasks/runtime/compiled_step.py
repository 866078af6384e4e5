"""CompiledStep: a jitted step with its input layout, compiled once, with the time that took."""

import time
from typing import Any

from spmd_tasks.runtime.input_layout import InputLayout


class CompiledStep:
  """A step function compiled for one input layout, on its first call or by `compile()`."""

  def __init__(self, jitted: Any, abstract_arguments: tuple[Any, ...], layout: InputLayout):
    self._jitted = jitted
    self._abstract_arguments = abstract_arguments
    self._compiled: Any = None
    self.layout = layout
    self.place = layout.place
    self.trace_seconds = 0.0
    self.compile_seconds = 0.0

  def lower(self) -> Any:
    """The lowered program (jax.stages.Lowered): for inspection and planning."""
    return self._jitted.lower(*self._abstract_arguments)

  def compile(self) -> Any:
    """The compiled program (jax.stages.Compiled), made once."""
    if self._compiled is None:
      start = time.perf_counter()
      lowered = self.lower()
      traced = time.perf_counter()
      self._compiled = lowered.compile()
      self.trace_seconds, self.compile_seconds = traced - start, time.perf_counter() - traced
    return self._compiled

  def __call__(self, *arguments: Any) -> Any:
    return (self._compiled or self.compile())(*arguments)
