"""WeightStorage: holds the weights of decoding and serving in fewer bits than training does.

    storage = WeightStorage(model, 'int8')
    stored = storage.store(variables)         # on the mesh; frees the originals
    stored = storage.store_one(name, weight)  # or one weight at a time, while others are still read
    variables = storage.true(stored)          # inside a compiled step

In int8, a kernel has one float32 scale per output channel (LLM.int8, Dettmers et al., 2022, without outliers), and a
layer computes with `values * scales` where it reads the kernel: one layer at a time, also in a scanned stack. Weights
with the vocabulary are held in bfloat16 then, because a lookup would scale the whole table. Vectors, biases, routers
and low-rank adapters stay as they are.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.runtime import PartitionedModel, Task, Variables
from spmd_tasks.sharding import Quantized, WeightSpec, contracted_dims, is_quantized, padding, quantize, spec_axes


class WeightStorage:
  """How the weights of a model are stored.

  Attributes:
    padded: the stored variables, as abstract values with shardings.
  """

  def __init__(self, model: PartitionedModel, dtype: str | None):
    """Plans the storage.

    Args:
      model: the partitioned model.
      dtype: 'bfloat16', 'int8', or None, which stores what training has.

    Raises:
      UserError: the model's layers cannot compute with int8.
    """
    if dtype == 'int8' and not isinstance(model.task, Task):
      raise UserError("weights_dtype='int8' needs a model of this framework's layers: take bfloat16.")
    self._model = model
    self.padded: Variables = dict(model.padded_state.variables)
    if dtype is not None:
      plan = functools.partial(_plan, dtype)
      weights, specs = model.padded_state.weights, model.weight_specs
      self.padded['params'] = jax.tree_util.tree_map_with_path(plan, weights, specs, is_leaf=is_quantized)
    self._is_plain = dtype is None

  @functools.cached_property
  def _plans(self) -> dict[str, Any]:
    return traverse_util.flatten_dict(self.padded['params'], sep='/')

  @property
  def dtypes(self) -> dict[str, Any]:
    """The dtypes in which weights can be read from a file to be held as they are, by name."""
    return {name: plan.dtype for name, plan in self._plans.items() if not isinstance(plan, Quantized)}

  def store_one(self, name: str, weight: jax.Array) -> Any:
    """Converts one padded weight, which it frees. `store` leaves such weights as they are."""
    return _convert(True, self._plans[name], weight)

  def store(self, variables: Variables, *, free: bool = True) -> Variables:
    """Converts padded variables weight by weight; with `free`, frees each one that was converted."""
    if self._is_plain:
      return variables
    convert = functools.partial(_convert, free)
    held = jax.tree.map(convert, self.padded['params'], variables['params'], is_leaf=is_quantized)
    return variables | {'params': held}

  def true(self, stored: Variables) -> Variables:
    """Slices the padding off stored variables, inside a compiled step under the mesh's axis rules."""
    if self._is_plain:
      return self._model.true_variables(stored)

    def true(leaf, shape, spec):
      if isinstance(leaf, Quantized):
        if isinstance(shape, Quantized):  # as in training
          shape, spec = shape.values, spec.values
        sizes = [1 if held == 1 else size for held, size in zip(leaf.scales.shape, shape.shape, strict=True)]
        scales = padding.unpad(leaf.scales, jax.ShapeDtypeStruct(sizes, leaf.scales.dtype))
        return leaf.replace(values=true(leaf.values, shape, spec), scales=scales)
      sharding = NamedSharding(self._model.mesh, spec)
      return jax.lax.with_sharding_constraint(padding.unpad(leaf, shape), sharding)

    shapes, specs = self._model.abstract_state.variables, self._model.state_specs.variables
    return jax.tree.map(true, stored, shapes, specs, is_leaf=is_quantized)


def _plan(dtype: str, path: Any, leaf: Any, spec: WeightSpec) -> Any:
  """The stored form of a padded weight, abstract."""
  if isinstance(leaf, Quantized):
    return leaf
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  split_dims = (spec.split_dims or (None,) * len(leaf.shape))[spec.stacked :]
  is_kernel = len(split_dims) >= 2 and not {'no_decay', 'adapter'}.intersection(spec.tags) and 'router' not in name
  if not is_kernel or not jnp.issubdtype(leaf.dtype, jnp.floating):
    return leaf
  if dtype == 'bfloat16' or 'vocab' in split_dims or name.endswith('table'):
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
  contracted = contracted_dims(spec)
  assert isinstance(leaf.sharding, NamedSharding)
  axes = [() if dim in contracted else axis for dim, axis in enumerate(spec_axes(leaf.sharding.spec, len(leaf.shape)))]
  shape = tuple(1 if dim in contracted else size for dim, size in enumerate(leaf.shape))
  sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*(axis or None for axis in axes)))
  return Quantized(
    values=jax.ShapeDtypeStruct(leaf.shape, jnp.int8, sharding=leaf.sharding),
    scales=jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
  )


def _convert(free: bool, planned: Any, weight: Any) -> Any:
  """Stores one weight as planned."""
  if isinstance(weight, Quantized) or (not isinstance(planned, Quantized) and planned.dtype == weight.dtype):
    return weight
  stored = _converter(jax.tree.structure(planned), tuple(jax.tree.leaves(planned)))(weight)
  if free:
    jax.block_until_ready(stored)
    weight.delete()
  return stored


@functools.cache
def _converter(structure: Any, planned: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[jax.Array], Any]:
  def convert(weight):
    if len(planned) == 1:
      return weight.astype(planned[0].dtype)
    dims = tuple(dim for dim, size in enumerate(planned[1].shape) if size == 1)
    return quantize(weight, dims)

  shardings = jax.tree.unflatten(structure, [leaf.sharding for leaf in planned])
  return jax.jit(convert, out_shardings=shardings)
