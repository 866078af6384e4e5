"""Stores weights for decoding: in fewer bits (WeightStorage), as one array per layer, and beside a KV cache.

    storage = WeightStorage(model, 'int8')
    stored = storage.store(variables)         # on the mesh; frees the originals
    stored = storage.store_one(name, weight)  # or one weight at a time, while others are still being read
    variables = storage.true(stored)          # inside a compiled step

`stored_spec` of sharding/quantized.py returns the dtype of each weight. A layer dequantizes a kernel in 'int8', 'nf4'
or 'nf4_double' when it reads it: one layer at a time, also in a scanned stack.

On a GPU, if a dtype is given and no pipeline stages shard the layers, each layer of a stack is an array of its own
(tuples in the stored variables). Programs that generate on a GPU unroll the loop over layers (layers/transformer.py),
so that XLA removes the stacks that `true` builds: it reads each layer's array in place, and compiles and tunes the
products of one layer for all.

    with find_kernels(paths):                                    # the model's forward is traced within
      ...
    variables = with_layer_kernels(variables, paths)
    with multiplying_by_layer(variables) as variables:           # inside a compiled step
      model.apply(variables, ...)

A loop over layers slices each layer's part out of a stack. To a CPU that is a copy, which takes as long as a product
with a few tokens. So the kernels of `Linear` move from `params` to tuples of arrays, one per layer, and the loop has a
branch for each layer where a `Linear` multiplies. The bits are the same. An array is a view of its stack if the layer
begins at an address that JAX takes as it is, and a copy otherwise. While views live, the stacks keep their memory and
cannot be donated.
"""

from collections.abc import Callable, Iterator, Set
import contextlib
import functools
import math
import operator
import os
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.layers.linear import Linear, intercept_products
from spmd_tasks.layers.products import DeclaredKernel, Product
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.padding import pad, padded_shape, unpad
from spmd_tasks.sharding.quantized import quantize, stored_spec
from spmd_tasks.sharding.specs import current_platform, sharding_scope, spec_axes
from spmd_tasks.sharding.weights import is_quantized, leaf_name

LAYER_KERNELS = 'layer_kernels'  # the collection of kernels that are tuples of arrays, one per layer
_LEAST = 1 << 16  # numbers of a layer's kernel: copies of smaller ones stay in the CPU's cache


class WeightStorage:
  """Stores the weights of a model.

  Attributes:
    padded: the stored variables, as abstract values with shardings.
  """

  def __init__(self, model: PartitionedModel, dtype: str | None):
    """Plans the storage.

    Args:
      model: the partitioned model.
      dtype: 'bfloat16', one of QUANTIZED_DTYPES, or None to store weights as in training.

    Raises:
      UserError: the model's layers cannot compute with quantized kernels.
    """
    self._model = model
    self._is_plain = dtype is None
    with sharding_scope(model.mesh, model.axis_rules):
      is_unstacked = dtype is not None and current_platform() == 'gpu'
    weights, true, specs = model.padded_state.weights, model.abstract_state.weights, model.weight_specs
    plan = functools.partial(_plan, dtype, is_unstacked)
    self._plans = jax.tree_util.tree_map_with_path(plan, weights, true, specs, is_leaf=is_quantized)
    padded = jax.tree.map(lambda plan: plan.padded, self._plans, is_leaf=_is_plan)
    self.padded: Variables = model.padded_state.variables | {'params': padded}

  @functools.cached_property
  def _by_name(self) -> dict[str, '_Plan']:
    return traverse_util.flatten_dict(self._plans, sep='/')

  @property
  def dtypes(self) -> dict[str, Any]:
    """Name -> dtype of the weights that a file can be read into without further conversion."""
    return {name: plan.stored.dtype for name, plan in self._by_name.items() if not is_quantized(plan.stored)}

  def store_one(self, name: str, weight: jax.Array) -> Any:
    """Converts one padded weight and frees the original; `store` leaves converted weights unchanged.

    The conversion needs memory for both.
    """
    return _convert(True, self._by_name[name], weight)

  def store(self, variables: Variables, *, free: bool = True) -> Variables:
    """Converts padded variables weight by weight; with `free`, frees each original."""
    if self._is_plain:
      return variables
    convert = functools.partial(_convert, free)
    return variables | {'params': jax.tree.map(convert, self._plans, variables['params'], is_leaf=_is_plan)}

  def true(self, stored: Variables) -> Variables:
    """Removes the padding of stored variables, inside a compiled step under the mesh's axis rules."""
    if self._is_plain:
      return self._model.true_variables(stored)

    def true(leaf, plan, shape):
      return jax.lax.with_sharding_constraint(unpad(leaf, shape), plan.sharding)

    def true_weight(plan, weight):
      if plan.num_layers:
        weight = jax.tree.map(lambda *layers: jnp.stack(layers), *weight)
      return jax.tree.map(true, weight, plan.stored, plan.true)

    padded, shapes = self._model.padded_state.variables, self._model.abstract_state.variables
    others = {name: jax.tree.map(true, stored[name], padded[name], shapes[name]) for name in stored if name != 'params'}
    return others | {'params': jax.tree.map(true_weight, self._plans, stored['params'], is_leaf=_is_plan)}


class _Plan(NamedTuple):
  """How a weight is stored: abstract values, padded and true; the number of separate layers, 0 for one array."""

  stored: Any
  true: Any
  num_layers: int = 0

  @property
  def padded(self) -> Any:
    """`stored`, or a tuple of its layers."""
    return (jax.tree.map(_layer_of, self.stored),) * self.num_layers if self.num_layers else self.stored


def _is_plan(leaf: Any) -> bool:
  return isinstance(leaf, _Plan)


def _layer_of(stack: Any) -> jax.ShapeDtypeStruct:
  spec = PartitionSpec(*spec_axes(stack.sharding.spec, stack.ndim)[1:])
  return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=NamedSharding(stack.sharding.mesh, spec))


def _plan(dtype: str | None, is_unstacked: bool, path: Any, leaf: Any, true: Any, spec: WeightSpec) -> _Plan:
  if dtype is None or is_quantized(leaf):
    return _Plan(leaf, true)
  num_layers = 0
  if is_unstacked and spec.stacked == 1 and not spec_axes(leaf.sharding.spec, leaf.ndim)[0]:
    num_layers = leaf.shape[0]
  stored = stored_spec(leaf_name(path), spec, dtype)
  if isinstance(stored, WeightSpec):
    return _Plan(jax.ShapeDtypeStruct(leaf.shape, stored.dtype, sharding=leaf.sharding), true, num_layers)
  assert isinstance(leaf.sharding, NamedSharding)
  mesh, axes = leaf.sharding.mesh, spec_axes(leaf.sharding.spec, len(leaf.shape))

  def padded(part: WeightSpec) -> jax.ShapeDtypeStruct:
    """Shards a part as the kernel is sharded, except on dims that its own split dims leave unsharded."""
    entries = part.split_dims or (None,) * len(axes)
    spec = PartitionSpec(*(own or None if entry is not None else None for own, entry in zip(axes, entries)))
    shape = padded_shape(part.shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, part.dtype, sharding=NamedSharding(mesh, spec))

  abstract = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), stored)
  return _Plan(jax.tree.map(padded, stored), abstract, num_layers)


def _convert(free: bool, plan: _Plan, weight: Any) -> Any:
  """Converts one padded weight as planned; a converted weight is returned unchanged."""
  if isinstance(weight, tuple):  # one array per layer
    return weight
  is_stored = is_quantized(weight) or (not is_quantized(plan.stored) and plan.stored.dtype == weight.dtype)
  if is_stored and not plan.num_layers:
    return weight
  structure = jax.tree.structure(plan.stored)
  planned, true = (tuple(jax.tree.leaves(tree)) for tree in (plan.stored, plan.true))
  stored = _converter(structure, planned, true, is_stored, plan.num_layers)(weight)
  if free:
    jax.block_until_ready(stored)
    jax.tree.map(lambda leaf: leaf.delete(), weight)
  return stored


@functools.cache
def _converter(
  structure: Any,
  planned: tuple[jax.ShapeDtypeStruct, ...],
  true: tuple[jax.ShapeDtypeStruct, ...],
  is_stored: bool,
  num_layers: int,
) -> Callable[[jax.Array], Any]:
  def stored(weight):
    if is_stored:
      return weight
    if len(planned) == 1:
      return weight.astype(planned[0].dtype)
    like = jax.tree.unflatten(structure, true)
    weight = unpad(weight, jax.ShapeDtypeStruct(like.shape, weight.dtype))
    return pad(quantize(weight, like), jax.tree.unflatten(structure, planned))

  def convert(weight):
    stack = stored(weight)
    return tuple(jax.tree.map(operator.itemgetter(i), stack) for i in range(num_layers)) if num_layers else stack

  padded = _Plan(jax.tree.unflatten(structure, planned), None, num_layers).padded
  return jax.jit(convert, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, padded))


# --- kernels of a loop over layers as one array per layer, which a CPU reads in place ---


@contextlib.contextmanager
def find_kernels(paths: set[tuple[str, ...]]) -> Iterator[None]:
  """Context in which a model is traced: adds the paths in `params` of kernels that can be one array per layer."""

  def note(layer: Linear, multiply: Any, x: jax.Array, product: Product) -> jax.Array:
    cache = current_layer_scope().cache  # None in an encoder, whose layers have no numbers
    if type(layer) is Linear and layer.product is None and cache is not None and len(cache.layers) == 1:
      kernel = layer.variables.get('params', {}).get('kernel')
      if kernel is not None and not is_quantized(kernel) and math.prod(kernel.shape) >= _LEAST:
        paths.add((*layer.path, 'kernel'))
    return multiply(x, product)

  with intercept_products(note):
    yield


def with_layer_kernels(variables: Variables, paths: Set[tuple[str, ...]]) -> Variables:
  """Unstacks these kernels, arrays or abstract values on a CPU device; does nothing if called again."""
  if not paths or LAYER_KERNELS in variables:
    return variables
  params = traverse_util.flatten_dict(variables['params'], is_leaf=lambda _, leaf: is_quantized(leaf))
  kernels = {path: _split(params.pop(path)) for path in sorted(paths)}
  changed = {'params': params, LAYER_KERNELS: kernels}
  return variables | {name: traverse_util.unflatten_dict(leaves) for name, leaves in changed.items()}


@contextlib.contextmanager
def multiplying_by_layer(variables: Variables) -> Iterator[Variables]:
  """Context in which a model is called (traced) with kernels of `with_layer_kernels`; yields its variables."""
  kernels = traverse_util.flatten_dict(variables.get(LAYER_KERNELS, {}))
  if not kernels:
    yield variables
    return

  def switch(layer: Linear, multiply: Any, x: jax.Array, product: Product) -> jax.Array:
    if (of_layers := kernels.get((*layer.path, 'kernel'))) is None:
      return multiply(x, product)
    declared = functools.partial(
      DeclaredKernel, module=layer, num_input_dims=layer.num_input_dims, split_dims=None, dtype=layer.dtype
    )
    branches = [lambda x, kernel=kernel: product(x, declared(value=kernel)) for kernel in of_layers]
    return jax.lax.switch(current_layer_scope().cache.layers[0], branches, x.astype(layer.dtype))

  with intercept_products(switch):
    yield {name: collection for name, collection in variables.items() if name != LAYER_KERNELS}


def _split(stack: Any) -> tuple[Any, ...]:
  """Returns the arrays of a stack [L, ...]."""
  sharding = NamedSharding(stack.sharding.mesh, PartitionSpec())
  if not isinstance(stack, jax.Array):
    return (jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding),) * stack.shape[0]
  # Of the device's part: an array keeps its numpy view alive.
  return tuple(jax.device_put(layer, sharding) for layer in np.asarray(stack.addressable_data(0)))


# --- how much memory of each device the KV cache may take ---


def local_bytes(leaf: Any) -> int:
  """Returns the bytes that an abstract array with a sharding takes on each device.

  An array with a layout is on a TPU, where rows are padded to 128 numbers; see DecodeLayout.
  """
  *dims, last = (*leaf.sharding.shard_shape(leaf.shape),) or (1,)
  return math.prod(dims) * (last if leaf.format.layout is None else -(-last // 128) * 128) * leaf.dtype.itemsize


def free_bytes(mesh: Mesh | AbstractMesh, weights: Any, fraction: float) -> float:
  """Returns the bytes of this fraction of a device's memory that the weights leave free.

  A job of one process also subtracts memory that is in use now; several processes must get the same number. Returns
  infinity if the mesh has no device of this process, as in a plan for other machines. CPU devices share the host's
  memory.
  """
  devices: Any = [] if isinstance(mesh, AbstractMesh) else mesh.devices.flat
  local = [device for device in jax.local_devices() if device in devices]
  if not local:
    return math.inf
  stats = [device.memory_stats() or {} for device in local]
  host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // len(local)
  used = sum(local_bytes(leaf) for leaf in jax.tree.leaves(weights))
  if jax.process_count() == 1:
    used = max(used, *(device.get('bytes_in_use', 0) for device in stats))
  return fraction * min(device.get('bytes_limit', host) for device in stats) - used
