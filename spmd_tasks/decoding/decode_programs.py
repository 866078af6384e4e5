"""DecodePrograms: compiles functions of a DecodeModel, each one once for inputs of the same shapes.

    programs = DecodePrograms(model, layout)
    state = programs.init_state()
    state, outputs = programs.update(('step', 32), step, inputs)(variables, state, inputs)
    scores = programs.compute(('score', 8, 64), score, batch)(variables, batch)

As in training, stored arrays are padded: a program slices variables and state to their true shapes, and pads the state
that it returns. The state is donated, so that it is updated in place. Every process passes the same inputs, as host
arrays. Outputs are replicated.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.activity import doing
from spmd_tasks.decoding.decode_layout import DecodeLayout, sharding_or_format
from spmd_tasks.decoding.decode_model import DecodeModel
from spmd_tasks.decoding.decode_state import DecodeState
from spmd_tasks.runtime.program_cache import compile_program
from spmd_tasks.sharding import padding

_COMPILED_AT_ONCE = 8  # programs
# Platform -> an option of the compiler, which XLA_FLAGS may set too. XLA would make one product of those with a layer's
# queries, keys and values, for which it copies the three kernels: a tenth of what a step of 32 texts reads.
_COMPILER_OPTIONS = {'gpu': ('xla_gpu_dot_merger_threshold_mb', '0')}


class DecodePrograms:
  """Compiled programs by name. A name begins with a word and has whatever distinguishes the shapes of the inputs.

  Attributes:
    model: the model that the programs call.
    layout: the layout of the state that they update.
  """

  def __init__(self, model: DecodeModel, layout: DecodeLayout):
    self.model = model
    self.layout = layout
    self._replicated = NamedSharding(model.mesh, PartitionSpec())
    self._compiled: dict[Any, Any] = {}
    self._pool: concurrent.futures.Executor | None = None

  def init_state(self) -> DecodeState:
    """Returns the state in which no slot is active."""
    padded = self.layout.padded_state

    def empty():
      return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), padded)

    return self._compile('init', lambda: self._lower(empty, out=self.layout.state_shardings))()

  def compute(self, name: tuple[Any, ...], function: Callable[..., Any], *inputs: Any) -> Any:
    """Compiles `function(forward, variables, *inputs)`; the program takes (stored variables, *inputs)."""
    model = self.model

    def compute(stored, *inputs):
      return function(model.forward, model.true_variables(stored), *inputs)

    return self._compile(name, lambda: self._lower(compute, (model.variables,), inputs, out=self._replicated))

  def update(self, name: tuple[Any, ...], function: Callable[..., Any], *inputs: Any) -> Any:
    """Compiles `function(forward, variables, state, *inputs)`, which returns (state, outputs).

    The program takes (stored variables, state, *inputs).
    """
    return self._compile(name, lambda: self.lower_update(function, *inputs))

  def lower_update(self, function: Callable[..., Any], *inputs: Any) -> Any:
    """Lowers what `update` compiles."""
    model, layout = self.model, self.layout

    def update(stored, padded_state, *inputs):
      state = padding.unpad(padded_state, layout.abstract_state)
      state, outputs = function(model.forward, model.true_variables(stored), state, *inputs)
      return padding.pad(state, layout.padded_state), outputs

    on_mesh, out = (model.variables, layout.padded_state), (layout.state_shardings, self._replicated)
    return self._lower(update, on_mesh, inputs, out=out, donated=1)

  @contextlib.contextmanager
  def in_threads(self) -> Iterator[None]:
    """Context in which programs are compiled in threads, at once. (A CPU's compiler uses all cores for each.)"""
    if self.model.platform == 'cpu' or jax.process_count() > 1:  # all processes compile in one order
      yield
      return
    earlier = dict(self._compiled)
    programs: dict[Any, Any] = {}
    try:
      with concurrent.futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as self._pool:
        yield
      programs = {name: future.result() for name, future in self._compiled.items() if name not in earlier}
    finally:
      self._pool, self._compiled = None, earlier | programs

  def _compile(self, name: Any, lower: Callable[[], Any]) -> Any:
    if name not in self._compiled:
      parts = name if isinstance(name, tuple) else (name,)
      text = f'the decoding program {" ".join(str(part) for part in parts if type(part) in (str, int))}'
      with doing(f'compiling {text}'):
        lowered = lower()
        pool = self._pool
        self._compiled[name] = _compile(lowered, text) if pool is None else pool.submit(_compile, lowered, text)
    return self._compiled[name]

  def _lower(
    self,
    function: Callable[..., Any],
    on_mesh: tuple[Any, ...] = (),
    inputs: tuple[Any, ...] = (),
    *,
    out: Any,
    donated: int | tuple[int, ...] = (),
  ) -> Any:
    """Lowers `function(*on_mesh, *inputs)`: the former are trees of arrays on the mesh, the latter of host arrays."""

    def scoped(*args):
      with self.model.scope():
        return function(*args)

    jitted = jax.jit(
      scoped,
      in_shardings=(
        *jax.tree.map(sharding_or_format, on_mesh),
        *jax.tree.map(lambda _: self._replicated, inputs),
      ),
      out_shardings=out,
      donate_argnums=donated,
      compiler_options=_compiler_options(self.model.platform),
    )
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
    return jitted.lower(*on_mesh, *abstract)


def _compile(lowered: Any, name: str) -> Any:
  with doing(f'compiling {name}'):
    return compile_program(lowered, name)


def _compiler_options(platform: str) -> dict[str, str] | None:
  option = _COMPILER_OPTIONS.get(platform)
  return None if option is None or option[0] in os.environ.get('XLA_FLAGS', '') else dict([option])
