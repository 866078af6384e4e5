"""Multiplies tokens with a weight that the devices that share the tokens split too (fully sharded data parallelism).

Every layer with a kernel does so by `multiply_gathered`: the weight is gathered, and its gradient is summed over the
devices, each of which keeps its part. By default XLA writes both. On TPUs it sums a gradient whole, by an all-reduce
over all chips, and cuts it then: twice the bytes of a reduce-scatter. With `scatters_gradients` in the LayerScope
each device multiplies its tokens in a `shard_map` instead, where the gather is written out, and so is its transpose,
the reduce-scatter. The TPU compiler keeps it over a part of the chips only, as on a mesh replica 2 x data 32 of 64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding import SplitDims, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import (
  current_sharding_scope,
  gather_for_tokens,
  is_split_over_tokens,
  num_parts,
  spec_axes,
)


def multiply_gathered(
  product: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weight: jax.Array,
  dtype: Any,
  split_dims: SplitDims,
  token_split_dims: SplitDims,
) -> jax.Array:
  """Returns product(x, weight), the weight cast to `dtype` and gathered over the axes that split the tokens.

  Nothing of the gathered weight is kept for the backward pass, which gathers it again (fully sharded data parallelism,
  ZeRO stage 3: Rajbhandari et al., 2020). Kept, the weights of all layers would be on every device.

  Args:
    product: multiplies x with the weight; the dims that count tokens come first in x and in the result.
    x: the tokens, of `dtype`.
    weight: in float32.
    dtype: of the computation; few bytes are gathered.
    split_dims: of the weight.
    token_split_dims: of the dims of x that count tokens; None gathers nothing.
  """
  if not is_split_over_tokens(split_dims, token_split_dims):
    return product(x, weight.astype(dtype))

  def gather_and_multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    if current_layer_scope().scatters_gradients:
      return _multiply_on_devices(product, x, weight.astype(dtype), split_dims, token_split_dims)
    return product(x, gather_for_tokens(weight.astype(dtype), split_dims, token_split_dims))

  # Layers are in a loop, where XLA cannot merge the two gathers; without prevent_cse there is no barrier to pay for.
  return jax.checkpoint(gather_and_multiply, prevent_cse=False)(x, weight)


def _multiply_on_devices(
  product: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weight: jax.Array,
  split_dims: SplitDims,
  token_split_dims: SplitDims,
) -> jax.Array:
  """Returns product(x, gathered weight), each device's tokens by themselves; other axes than the tokens' are XLA's.

  The gradient of the weight is summed over a device's tokens, reduce-scattered over the axes that split the weight, and
  only then summed over the other axes of the tokens, such as `replica`.
  """
  scope = current_sharding_scope()
  assert scope is not None
  mesh, _ = scope.free_mesh()
  sizes = scope.mesh.shape
  rows_spec = scope.activation_spec(token_split_dims, x.shape, is_even=True)
  token_axes = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in spec_axes(rows_spec, len(rows_spec))]
  manual = frozenset(axis for axes in token_axes for axis in axes)
  if not manual:  # the mesh does not divide the tokens
    return product(x, gather_for_tokens(weight, split_dims, token_split_dims))
  weight_spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
  weight_axes = [tuple(axis for axis in axes if axis in manual) for axes in spec_axes(weight_spec, weight.ndim)]
  even = jnp.pad(weight, [(0, -size % num_parts(axes, sizes)) for size, axes in zip(weight.shape, weight_axes)])
  unsplit = tuple(sorted(manual.difference(*weight_axes)))

  def multiply(x: jax.Array, weight_part: jax.Array) -> jax.Array:
    gathered = jax.lax.pcast(weight_part, unsplit, to='varying') if unsplit else weight_part
    for dim, axes in enumerate(weight_axes):
      if axes:  # as the first dim: TPUs scatter a gradient over the major dim in memory, and copy it if that is another
        parts_first = jnp.moveaxis(gathered, dim, 0)
        gathered = jnp.moveaxis(jax.lax.all_gather(parts_first, axes, axis=0, tiled=True), 0, dim)
    return product(x, gathered[tuple(slice(size) for size in weight.shape)])

  tokens_spec = PartitionSpec(*token_axes)
  return jax.shard_map(
    multiply,
    mesh=mesh,
    axis_names=manual,
    in_specs=(tokens_spec, PartitionSpec(*weight_axes)),
    out_specs=tokens_spec,
  )(x, even)
