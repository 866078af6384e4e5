"""ModuleCalls: what a model's modules get and return, in the order of the computation.

    calls = ModuleCalls(runner, batch)         # compiles the model with all inputs and outputs of modules as results
    calls.predictions(state, batch)            # {'logits': [B, T, V]}
    calls.values(state, batch)                 # [(the layer that computed them, [B, T, ...]), ...]

If a module's input differs between two batches and no earlier value does, the code of the module that called it made
the difference; if its output is the first, then its own code did.

Only arrays of numbers per token are recorded, [B, T, ...], in the order of the text. A pipeline on several stages
discards what its blocks record, so there a stack is one module; a stack that gets the tokens in another order
(`balances_tokens`) is part of the model. An NNX module within a transformation of JAX is part of the module around it.

Shapes: B rows, T sequence; also S sequence of an encoder.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
from typing import Any, NamedTuple

from flax import errors, traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.runtime import TrainState
from spmd_tasks.sharding.weights import leaves_by_name
from spmd_tasks.verification._runner import Leaves, Runner
from spmd_tasks.verification._settings import Batch

_COLLECTION = 'module_calls'


class ModuleCalls:
  """The compiled model of a Runner, without dropout, which also returns what its modules get and return."""

  def __init__(self, runner: Runner, batch: Batch):
    """`batch` gives the shapes of all batches."""
    names = [name for name in ('ids', 'encoder_ids') if name in batch]
    recorder = _Recorder(frozenset(batch[name].shape for name in names))
    self._place, self._shape, self._recorder = runner.place, batch['ids'].shape, recorder

    def predict(variables: Any, batch: Any) -> Any:
      with nn.intercept_methods(recorder), _intercepted_nnx(recorder):
        predictions, updates = runner.task.predict(variables, batch, mutable=[_COLLECTION])
      return predictions, updates.get(_COLLECTION, {})

    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    self._step = runner.model.batch_step('module_calls', spec, predict)

  def _run(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
    return self._step(self._place(state).variables, self._step.place(batch))

  def predictions(self, state: TrainState, batch: Batch) -> Leaves:
    """Returns the logits, or if there are none, all predictions of tokens, [B, T, ...], by name.

    Raises a UserError: the model does not predict anything per token.
    """
    predictions = self._run(state, batch)[0]
    if isinstance(predictions, Mapping) and 'logits' in predictions:
      predictions = {'logits': predictions['logits']}
    leaves = leaves_by_name({'predictions': predictions})
    if not (per_token := {name: x for name, x in leaves.items() if _is_per_token(x, {self._shape})}):
      raise UserError('the model does not predict anything per token [B, T, ...].')
    return {name: np.asarray(x) for name, x in per_token.items()}

  def values(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (the layer that computed it, its value [B, T, ...]) for each input and output of a module, in order."""
    arrays = {path[-1]: x for path, x in traverse_util.flatten_dict(self._run(state, batch)[1]).items()}
    records = [(self._recorder.records[key], np.asarray(arrays[key])) for key in sorted(arrays)]
    # Layers of a loop have their values in one array, [L, ...]: all values of layer 0 come first.
    for stacked, group in itertools.groupby(records, lambda pair: pair[1].shape[: pair[1].ndim - pair[0].num_dims]):
      members = list(group)
      for index in np.ndindex(stacked):
        of_layer = ', '.join(f'layer {number + 1} of {size}' for number, size in zip(index, stacked))
        for record, values in members:
          yield f'{record.layer}, {of_layer}' if of_layer else record.layer, values[index]


def _is_per_token(x: Any, shapes: Any) -> bool:
  is_array = isinstance(x, jax.Array | np.ndarray)  # arguments may be modules, too, some of which have a dtype
  return is_array and jnp.issubdtype(x.dtype, jnp.floating) and x.shape[:2] in shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
  """The layer that computed an array, and the array's number of dims in the call."""

  layer: str
  num_dims: int


class _Caller(NamedTuple):
  """A layer that is being called, the Linen module that stores its values, and names of NNX modules by id."""

  module: nn.Module
  layer: str
  nnx_names: Mapping[int, str] = {}


def _layer_name(path: str, module: Any) -> str:
  return f'{path or "the model"} ({type(module).__name__})'


class _Recorder:
  """Intercepts calls of Linen modules, and stores what they get and return as variables of the modules."""

  def __init__(self, shapes: frozenset[tuple[int, ...]]):
    self.records: dict[str, _Record] = {}
    self._shapes, self._callers = shapes, list[_Caller]()

  def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    # Linen also intercepts functions that it transforms, such as the body of a loop, under names of their own.
    is_method = hasattr(type(module), context.method_name) and context.method_name != 'setup'
    if module.scope is None or not is_method:
      return next_fun(*args, **kwargs)
    return self._call(_Caller(module, _layer_name('/'.join(module.path), module)), next_fun, args, kwargs)

  def call_nnx(self, module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a method of an NNX module; the Linen module around it stores what it gets and returns."""
    caller = self._callers[-1]
    names = caller.nnx_names or {
      id(child): '/'.join(map(str, path)) for path, child in sys.modules['flax.nnx'].iter_modules(module)
    }
    layer = _layer_name(names.get(id(module), '...'), module)
    return self._call(_Caller(caller.module, layer, names), functools.partial(function, module), args, kwargs)

  @property
  def is_called(self) -> bool:
    return bool(self._callers)

  def _call(self, called: '_Caller', function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    self._store(called.module, (self._callers[-1] if self._callers else called).layer, (args, kwargs))
    self._callers.append(called)
    try:
      returned = function(*args, **kwargs)
    finally:
      self._callers.pop()
    self._store(called.module, called.layer, returned)
    return returned

  def _store(self, module: nn.Module, layer: str, values: Any) -> None:
    if not module.is_mutable_collection(_COLLECTION) or current_layer_scope().balanced_tokens:
      return
    for x in jax.tree.leaves(values):
      if _is_per_token(x, self._shapes):
        key = f'{len(self.records):06d}'  # a layer may be traced several times; the last trace counts
        self.records[key] = _Record(layer=layer, num_dims=x.ndim)
        with contextlib.suppress(
          errors.JaxTransformError
        ):  # within a transformation of JAX that Linen does not know of
          module.put_variable(_COLLECTION, key, x)


@contextlib.contextmanager
def _intercepted_nnx(recorder: _Recorder) -> Iterator[None]:
  """Context in which the recorder also gets the calls of NNX modules; other threads may trace models meanwhile."""
  if 'flax.nnx' not in sys.modules:  # importing it takes a second
    yield
    return
  thread, classes, calls = threading.get_ident(), [sys.modules['flax.nnx'].Module], {}
  while classes:
    nnx_class = classes.pop()
    classes += nnx_class.__subclasses__()
    if inspect.isfunction(call := vars(nnx_class).get('__call__')):
      calls[nnx_class] = call

  def intercepted(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
      if threading.get_ident() != thread or not recorder.is_called:
        return call(module, *args, **kwargs)
      return recorder.call_nnx(module, call, args, kwargs)

    return run

  for nnx_class, call in calls.items():
    nnx_class.__call__ = intercepted(call)
  try:
    yield
  finally:
    for nnx_class, call in calls.items():
      nnx_class.__call__ = call
