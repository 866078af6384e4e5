"""Compiles steps once (CompiledStep), and counts XLA compilations (CompilationCounter)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import functools
import os
import time
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from spmd_tasks.activity import doing
from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.runtime.input_layout import InputLayout, InputSpec
from spmd_tasks.runtime.program_cache import compile_program
from spmd_tasks.runtime.tpu_options import invalid_option_error, tpu_options

# JAX (0.10 to 0.12) reports this event whenever a program is not in its in-memory caches. Reading a program from a
# persistent compilation cache counts too, because the step waits for it as well.
_BACKEND_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'

# The pass of XLA for CPUs that splits elementwise loops over several threads of one device.
_DISABLED_PASSES, _PARALLEL_LOOPS = 'xla_disable_hlo_passes', 'cpu-parallel-task-assigner'


def compiler_options(
  devices: Iterable[jax.Device], experiment_tpu_options: Mapping[str, str] | None = None
) -> dict[str, str] | None:
  """Returns compiler options for a train step on devices of one kind; None without devices.

  The experiment's options override the defaults. Options that LIBTPU_INIT_ARGS (XLA_FLAGS for CPUs) sets are left out.
  On CPUs with at most one core per device, each device computes on one thread, because a second one gains nothing.
  """
  devices = list(devices)
  if not devices or devices[0].platform not in ('cpu', 'tpu'):
    return None
  device = devices[0]
  if device.platform == 'tpu':
    return tpu_options(device.device_kind, experiment_tpu_options or {})
  num_devices = sum(other.process_index == device.process_index for other in devices)
  is_set = _DISABLED_PASSES in os.environ.get('XLA_FLAGS', '')
  return None if is_set or (os.cpu_count() or 1) > num_devices else {_DISABLED_PASSES: _PARALLEL_LOOPS}


class CompiledStep:
  """A step function that is compiled for one input layout, on its first call or by `compile()`.

  Attributes:
    layout: the layout of the step's batch on the mesh.
    place: `layout.place`, which puts this process's rows of a batch on the mesh.
    trace_seconds, compile_seconds: how long tracing and compiling took; 0 before they are done.
  """

  def __init__(
    self,
    jitted: Any,
    abstract_arguments: tuple[Any, ...],
    layout: InputLayout,
    numbers: Sequence[np.ndarray] | None = None,
  ):
    """Takes a jitted function and its abstract arguments, with shardings.

    If `numbers` are given, they are the function's last argument, a tuple, which calls of the step leave out.
    """
    self._jitted, self._abstract_arguments, self._numbers = jitted, abstract_arguments, numbers
    self._name = jitted.__name__.replace('_', ' ')
    self._compiled: Any = None
    self._lowered: Any = None
    self._compiling: Future[None] | None = None
    self.layout, self.place = layout, layout.place
    self.trace_seconds = self.compile_seconds = 0.0

  def lower(self) -> Any:
    """Returns the lowered program (jax.stages.Lowered), for inspection and planning."""
    return self._jitted.lower(*self._abstract_arguments)

  def make_jaxpr(self) -> tuple[Any, tuple[Any, ...]]:
    """Returns (the step's ClosedJaxpr, its abstract arguments with their shardings), for any mesh."""
    return self._jitted.trace(*self._abstract_arguments).jaxpr, self._abstract_arguments

  def start_compiling(self) -> None:
    """Lowers the program, and compiles it in a thread that `compile` waits for. Later calls do nothing.

    Lowering in the thread too would not save time, because Python runs one thread at a time.
    """
    if self._compiled is not None or self._compiling is not None:
      return
    thread = ThreadPoolExecutor(1, thread_name_prefix='compile')
    self.trace()
    self._compiling = thread.submit(self._compile)
    thread.shutdown(wait=False)

  def compile(self) -> Any:
    """Returns the compiled program (jax.stages.Compiled), which the first call compiles."""
    if self._compiling is not None:
      self._compiling.result()
    elif self._compiled is None:
      self._compile()
    return self._compiled

  def trace(self) -> None:
    """Lowers the program, once. Raises a UserError if the experiment's own code fails."""
    if self._lowered is not None or self._compiled is not None:
      return
    start = time.perf_counter()
    with doing(f'tracing the {self._name}'), own_code_errors(f'the {self._name}', keys=self.layout.spec):
      self._lowered = self.lower()
    self.trace_seconds = time.perf_counter() - start

  def _compile(self) -> None:
    self.trace()
    start = time.perf_counter()
    with doing(f'compiling the {self._name}'):
      try:
        self._compiled, self._lowered = compile_program(self._lowered, f'the {self._name}'), None
      except jax.errors.JaxRuntimeError as error:
        raise invalid_option_error(error) or error from error.__cause__
    self.compile_seconds = time.perf_counter() - start

  @functools.cached_property
  def _placed_numbers(self) -> tuple[Any, ...]:
    if self._numbers is None:
      return ()
    place = lambda number, x: jax.make_array_from_callback((), x.sharding, lambda _: number)
    return (tuple(map(place, self._numbers, self._abstract_arguments[-1])),)

  def __call__(self, *arguments: Any) -> Any:
    return (self._compiled or self.compile())(*arguments, *self._placed_numbers)


class StepOfSizes(CompiledStep):
  """A step for batches of several sizes. Its programs are compiled together, so that no later step waits for one.

  Inspection and planning see the first step's program and layout.
  """

  def __init__(self, steps: Sequence[CompiledStep]):
    """Takes one step per batch size. Raises a UserError if two sizes have the same size on the mesh."""
    super().__init__(steps[0]._jitted, steps[0]._abstract_arguments, steps[0].layout)
    self._steps: dict[int, CompiledStep] = {}  # by the number of rows on the mesh, zero rows included
    self._by_local_size: dict[int, CompiledStep] = {}
    for step in steps:
      name = next(name for name, x in step.layout.spec.items() if x.shape)
      size, padded_size = step.layout.spec[name].shape[0], step.layout.padded[name].shape[0]
      if (other := self._steps.setdefault(padded_size, step)) is not step:
        raise UserError(
          f'the batch sizes {other.layout.spec[name].shape[0]} and {size} both take {padded_size} rows on the devices: '
          'choose multiples of the number of devices, or one of the two.'
        )
      self._by_local_size[size // jax.process_count()] = step
    self.place = self._place

  def _place(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    num_rows = next((len(rows) for rows in batch.values() if getattr(rows, 'ndim', 0)), 0)
    step = self._by_local_size.get(num_rows)
    if step is None:
      raise UserError(f'a batch has {num_rows} rows on this process; the sizes are {[*self._by_local_size]}.')
    return step.place(batch)

  def trace(self) -> None:
    for step in self._steps.values():
      step.trace()
    self.trace_seconds = sum(step.trace_seconds for step in self._steps.values())

  def _compile(self) -> None:
    for step in self._steps.values():
      self._compiled = step.compile()
    self.compile_seconds = sum(step.compile_seconds for step in self._steps.values())

  def __call__(self, *arguments: Any) -> Any:
    batch = arguments[1]
    return self._steps[next(x.shape[0] for x in batch.values() if x.ndim)](*arguments)


Step = TypeVar('Step', bound=CompiledStep)


class StepsByShape(Generic[Step]):
  """Caches the steps of one function by the shapes of their batches."""

  def __init__(self, make: Callable[[InputSpec], Step]):
    self._make = make
    self._steps: dict[tuple[Any, ...], Step] = {}

  def of(self, batch: Mapping[str, Any]) -> Step:
    """Returns the step for a batch, or for its spec: a mapping from names to arrays or to jax.ShapeDtypeStruct."""
    key = tuple(sorted((name, tuple(rows.shape), str(rows.dtype)) for name, rows in batch.items()))
    if key not in self._steps:
      self._steps[key] = self._make({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()})
    return self._steps[key]


class CompilationCounter:
  """Counts the programs that this process compiles on any thread inside the context.

  Counters may nest and overlap. A counter that is entered again continues to count.
  """

  def __init__(self):
    self._seconds: list[float] = []

  @property
  def num_programs(self) -> int:
    """The number of programs compiled so far."""
    return len(self._seconds)

  def __enter__(self) -> Self:
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *exception: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **metadata: str | int) -> None:
    # Compilations end on many threads; list.append is atomic, `count += 1` is not.
    if event == _BACKEND_COMPILE_EVENT:
      self._seconds.append(duration_secs)
