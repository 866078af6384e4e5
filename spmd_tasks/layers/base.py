"""What every layer uses: declared weights, templates of sublayers, statistics, and the scope of a call.

`Linear` (linear.py) is a short example of a layer. Shapes: L layers.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, MutableMapping
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
from typing import Any, NamedTuple, cast

from absl import logging
from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError, is_own
from spmd_tasks.sharding import SplitDims, WeightSpec
from spmd_tasks.sharding.weights import Initializer


def declare_weight(
  module: nn.Module,
  name: str,
  *,
  shape: tuple[int, ...],
  init: Initializer,
  split_dims: SplitDims,
  tags: tuple[str, ...] = (),
  num_input_dims: int | None = None,
) -> jax.Array:
  """Declares a float32 weight of a Linen module, within `setup` or an `@nn.compact` method, and returns its value.

  Args:
    module: the module that has the weight.
    name, shape: of the weight.
    init: draws the initial value, init(rng, shape, dtype).
    split_dims: one entry per dim, or None for a weight that is not sharded.
    tags, num_input_dims: see WeightSpec.

  Raises:
    UserError: `split_dims` has more or fewer entries than the weight has dims.
  """
  if split_dims is not None:
    split_dims = (split_dims,) if isinstance(split_dims, str) else tuple(split_dims)
  if split_dims is not None and len(split_dims) != len(shape):
    path = '/'.join((*module.path, name))
    raise UserError(f'weight {path} of shape {shape} has split dims {split_dims}: give one entry per dim.')
  spec = WeightSpec(shape=shape, init=init, split_dims=split_dims, tags=tags, num_input_dims=num_input_dims)
  # Linen unboxes the WeightBox that the initializer returns; the types do not say so.
  return cast(jax.Array, module.param(name, spec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FanInNormal:
  """Initializes a kernel from a truncated normal with variance `scale / fan_in`.

  The output then has variance `scale` if the input has unit variance.

  Fields:
    scale: variance of the output.
    num_input_dims: `fan_in` is the product of this many dims: 2 for an attention output kernel [H, K, D].
    num_stacked_dims: leading dims that stack separate kernels and are not part of `fan_in`: 1 for experts' [E, D, F].
  """

  scale: float = 1.0
  num_input_dims: int = 1
  num_stacked_dims: int = 0

  def __call__(self, rng: jax.Array, shape: tuple[int, ...], dtype: Any = 'float32') -> jax.Array:
    fan_in = math.prod(shape[self.num_stacked_dims :][: self.num_input_dims])
    # 0.8796... is the standard deviation of a standard normal truncated at +-2. variance_scaling rounds it to `dtype`.
    stddev = math.sqrt(self.scale / max(1, fan_in)) / 0.87962566103423978
    return jax.nn.initializers.truncated_normal(stddev)(rng, shape, dtype)


@functools.cache
def float32_product(equation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns an einsum of two arrays with a float32 result; it has a reverse-mode gradient only.

  The backward pass rounds the result's gradient to the arrays' dtype. JAX's own multiplies in float32, which takes a
  GPU more than twice as long as bfloat16; a TPU rounds in any case.
  """
  multiply = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
  product = jax.custom_vjp(multiply)

  def backward(arrays, cotangent):
    pull_back = jax.vjp(functools.partial(jnp.einsum, equation), *arrays)[1]
    return pull_back(cotangent.astype(jnp.result_type(*arrays)))

  product.defvjp(lambda *arrays: (multiply(*arrays), arrays), backward)
  return product


def instantiate(cotangent: Any) -> jax.Array:
  """Returns a cotangent of a `jax.custom_vjp` with `symbolic_zeros` as an array."""
  is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
  return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """Returns cap * tanh(x / cap), which is within +-cap and close to x for small x (Gemma 2, 2024); x if cap is None."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def dropout(rate: float, *, train: bool, broadcast_dims: tuple[int, ...] = ()) -> nn.Dropout:
  """Returns Linen's Dropout, which is active in training only. Raises a UserError for a rate outside [0, 1]."""
  if not 0 <= rate <= 1:
    raise UserError(f'a dropout rate of {rate} must be from 0 to 1, the fraction of values that are dropped.')
  return nn.Dropout(rate, broadcast_dims=broadcast_dims, deterministic=not train)


class WithSublayers(nn.Module):
  """Base of Linen modules whose fields are templates of sublayers: each field gets its own weights.

  Linen shares the weights of a Python object that is in two fields. Configs do this by accident: a `norm = RmsNorm()`
  in the block and in the model, or a Fiddle config referenced twice. This base class copies every template, so that
  weights are shared only if a layer asks for it, as TokenEmbedding(tied=True) does.
  """

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name, None)
      # Linen itself sets modules that already have a parent: they must stay the same objects.
      if field.name != 'parent' and isinstance(value, nn.Module) and value.parent is None:
        object.__setattr__(self, field.name, value.clone(parent=None))
    super().__post_init__()


# Arguments of blocks and attentions, beside the text, that no layer may ignore -> the part of a model that sets them.
CONTEXT = {
  'position_bias': 'position biases of all layers',
  'prefix_mask': 'prefixes',
  'encoded': 'an encoder',
  'token_mask': 'masks_zeros',
  'layer_inputs': 'a layer_embedding',
}


def num_blocks(layer: nn.Module) -> int:
  """Returns the number of blocks in a stack or a group of blocks; 1 for a block."""
  return getattr(layer, 'num_blocks', 1)


def run_layer(role: str, layer: nn.Module, x: jax.Array, **others: Any) -> tuple[jax.Array, Mapping[str, Any]]:
  """Calls a sublayer or a stack, which may be a user's own, and returns (y, aux); aux is {} if it returns only y.

  Args:
    role: for errors; 'stack' for a stack, whose aux is {name: [L]}. The aux of a sublayer is {name: Statistics}.
    layer, x: the layer and its input.
    others: further arguments; the layer gets those that it names.

  Raises:
    UserError: the layer takes or returns something else.
  """
  returned = layer(x, **named_arguments(role, layer, **others))
  y, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
  if role == 'stack':
    fits, kind = isinstance(aux, Mapping) and getattr(y, 'ndim', None) == x.ndim, '[L]'
  else:
    is_aux = isinstance(aux, Mapping) and all(isinstance(value, Statistics) for value in aux.values())
    fits, kind = is_aux and getattr(y, 'shape', None) == x.shape, 'Statistics'
  if not fits:
    raise UserError(
      f'the {role} {type(layer).__name__} returned {describe(returned)}: it must return an array of the shape of its '
      f'input, {describe(x)}, alone or as (array, {{name: {kind}}}).'
    )
  return y, aux


def named_arguments(role: str, layer: nn.Module, **named: Any) -> dict[str, Any]:
  """Returns the arguments, after the first, that `layer` names; `train` also by its other names (`train_flags`).

  Logs a warning for arguments that keep their default. Raises a UserError if the layer needs further arguments, or does
  not take one that would change its result (CONTEXT).
  """
  _, *parameters = signature_of(layer).parameters.values()
  parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
  names = {parameter.name for parameter in parameters}
  flags = {name: value for name, value in train_flags(named['train']).items() if name in names}
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
    return named | flags
  others = [parameter for parameter in parameters if parameter.name not in named and parameter.name not in flags]
  if needed := [parameter.name for parameter in others if parameter.default is parameter.empty]:
    raise UserError(
      f'{type(layer).__name__}.__call__ takes {", ".join(needed)}, but the {role} is called with its input and, if it '
      f'names them, {", ".join(named)}: make {", ".join(needed)} fields, or give them defaults.'
    )
  for parameter in others:
    warn_of_default(layer, parameter, f'make it a field of the {role}')
  if missing := [name for name in CONTEXT if named.get(name) is not None and name not in names]:
    raise UserError(
      f'the {role} {type(layer).__name__} takes no {" and no ".join(missing)}: a model with '
      f'{" and ".join(CONTEXT[name] for name in missing)} needs another {role}, such as TransformerStack of '
      'TransformerBlocks with Attention.'
    )
  return {name: value for name, value in named.items() if name in names} | flags


def train_flags(train: bool) -> dict[str, bool]:
  """Returns the arguments, by name, that tell Flax models whether they train."""
  return {
    **dict.fromkeys(('train', 'training', 'is_training'), train),
    **dict.fromkeys(('deterministic', 'use_running_average'), not train),
  }


def warn_of_default(layer: nn.Module, argument: inspect.Parameter, remedy: str) -> None:
  """Logs once that an argument of a user's own layer keeps its default in all calls."""
  if is_own(layer):
    _warn_of_default(type(layer).__name__, argument.name, repr(argument.default)[:40], remedy)


@functools.cache
def _warn_of_default(*words: str) -> None:
  logging.warning(
    '%s.__call__ has the argument %s, which keeps its default %s in training and evaluation: %s. (An argument that '
    f'tells whether the model trains is set if its name is one of {", ".join(train_flags(True))}.)',
    *words,
  )


def signature_of(layer: nn.Module) -> inspect.Signature:
  """Returns the signature of a layer's __call__, with at least one argument."""
  call = getattr(layer, '__call__', None)  # noqa: B004  callable() is true for every Linen module
  signature = None if call is None else inspect.signature(call)
  if signature is None or not signature.parameters:
    raise UserError(f'{type(layer).__name__} has no method __call__ that takes an input: define it.')
  return signature


def describe(value: Any) -> str:
  """Describes what a layer or a loss returned, for errors: `(float32[8,64], {})`."""
  if isinstance(value, tuple):
    return f'({", ".join(map(describe, value))})'
  if isinstance(value, Mapping):
    return f'{{{", ".join(f"{name!r}: {describe(entry)}" for name, entry in value.items())}}}'
  if hasattr(value, 'shape') and hasattr(value, 'dtype'):
    library = '' if isinstance(value, jax.Array) else f'{type(value).__module__}.'
    return f'{library}{value.dtype}[{",".join(map(str, value.shape))}]'
  return repr(value) if value is None or isinstance(value, (int, float, str)) else type(value).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPart:
  """The part of the batch that a block is called with: rows [index * B / count, (index + 1) * B / count).

  A pipeline calls its blocks with one microbatch at a time.

  Attributes:
    index, count: m, an int or a traced int32 scalar, of M; 0 of 1 for the whole batch.
    is_work: a bool or a traced bool scalar, False in a bubble of a pipeline: its results are not read, so a layer may
      skip work.
  """

  index: Any = 0
  count: int = 1
  is_work: Any = True


class SmallMicrobatchError(UserError):
  """Raised if a layer needs more rows than a microbatch has. In evaluation, a pipeline then uses fewer microbatches."""


class KernelCall(NamedTuple):
  """A call of a computation for which there are kernels.

  Attributes:
    kind: 'attention' or 'grouped_matmul'.
    implementation: the kernel, or the plain computation, that was chosen.
    operands: traced arrays: queries, keys and values of all devices; or the rows and matrices of one device.
    settings: of an attention, its AttentionOptions and AttentionLayout.
  """

  kind: str
  implementation: str
  operands: tuple[Any, ...]
  settings: tuple[Any, ...] = ()


class SharedKv(struct.PyTreeNode):
  """Keys and values that an attention computed for later layers.

  Attributes:
    key, value: [B, T, G, K], as they are compared.
    path: of the attention, whose entries of the KV cache have earlier tokens.
  """

  key: jax.Array
  value: jax.Array
  path: tuple[str, ...] = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerScope:
  """What a layer may know of the call that it is part of, beside its inputs; the only dynamic scope of layers.

  Who calls a model, or a block of it, says with `layer_scope` what is not the default; a user's own layers need none of
  it. (The mesh and the axis rules are in another scope, `sharding_scope`.)

  Attributes:
    part: for layers whose results depend on a row's place in the batch, or whose statistics are over parts of it.
    scatters_gradients: whether gradients of weights are reduce-scattered by collectives that are written out
      (scattered_gradients.py), or summed as XLA chooses.
    plain_products: products are computed without kernels and loops, which hide them from who counts FLOPs.
    cache: the KvCache (cache.py) of a call that generates text; None: nothing of the call is stored.
    balanced_tokens: tokens that are split over devices are in the order that balances attention, see _context.py.
    shared_kv: name -> SharedKv of the layers before, in the order of execution; layers add their own. None: layers
      cannot share keys and values, as the stages of a pipeline.
    on_kernel: called with each KernelCall while the model is traced; None: nothing is.
  """

  part: BatchPart = BatchPart()
  scatters_gradients: bool = False
  plain_products: bool = False
  cache: Any = None
  balanced_tokens: bool = False
  shared_kv: MutableMapping[str, SharedKv] | None = None
  on_kernel: Callable[[KernelCall], None] | None = None


_OUTSIDE = LayerScope()
_layer_scope: contextvars.ContextVar[LayerScope] = contextvars.ContextVar('layer_scope', default=_OUTSIDE)


@contextlib.contextmanager
def layer_scope(**facts: Any) -> Iterator[None]:
  """Context in which layers are called (traced): the enclosing LayerScope with these facts in place of its own."""
  token = _layer_scope.set(dataclasses.replace(_layer_scope.get(), **facts))
  try:
    yield
  finally:
    _layer_scope.reset(token)


def current_layer_scope() -> LayerScope:
  """Returns the innermost LayerScope."""
  return _layer_scope.get()


CACHE = 'cache'  # the collection of what the KV cache has of earlier calls
LINEAR_TAG = 'linear'  # of kernels of Linears
REPLAYED = 'replayed'  # the collection of earlier choices of experts, which routers take in place of new ones
NEW_CACHE = 'new_cache'  # the collection of what this call adds to the KV cache


# Name -> (numerator, denominator), float32 scalars, of statistics that are ratios of two sums.
Ratios = Mapping[str, tuple[jax.Array, jax.Array]]


class Statistics(struct.PyTreeNode, abc.ABC):
  """Sums over tokens that a layer reports, float32; statistics of two sets of tokens are added leaf by leaf.

  A balance loss is a product of two means over tokens, so the mean over a pipeline's microbatches would be another
  number. Blocks therefore return sums, pipelines add them up, and the stack computes `values` of the totals.

  Attributes:
    num_tokens: the number of tokens, a scalar. Its rank is the number of stacked dims of layers in front.
  """

  num_tokens: jax.Array

  @abc.abstractmethod
  def values(self) -> dict[str, jax.Array]:
    """Returns name -> a scalar, or a vector with one number per expert."""


def values_per_layer(aux: Mapping[str, Statistics]) -> dict[str, jax.Array]:
  """Returns name -> [L] (or [L, ...] for vectors) from statistics with any number of stacked dims in front."""
  values: dict[str, jax.Array] = {}
  for statistics in aux.values():
    num_stacked = statistics.num_tokens.ndim
    function = type(statistics).values
    for _ in range(num_stacked):
      function = jax.vmap(function)
    stacked = function(statistics)
    values |= {name: value.reshape(-1, *value.shape[num_stacked:]) for name, value in stacked.items()}
  return values
