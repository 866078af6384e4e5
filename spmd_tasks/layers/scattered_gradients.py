"""Reduce-scatters the gradients of gathered weights by explicit collectives.

On TPUs, XLA all-reduces a whole gradient over all chips and then slices it: twice the bytes of a reduce-scatter. Here
each device multiplies its tokens in a `shard_map` with an explicit all-gather, whose transpose is a reduce-scatter,
also over some of the chips only, as on a mesh replica 2 x data 32 of 64.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.sharding import SplitDims, padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, gather_for_tokens, spec_axes


def multiply_on_devices(
  multiply: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weight: jax.Array,
  split_dims: SplitDims,
  token_split_dims: SplitDims,
) -> jax.Array:
  """Returns multiply(x, gathered weight), manual over the mesh axes that split the tokens.

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
    return multiply(x, gather_for_tokens(weight, split_dims, token_split_dims))
  weight_spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
  weight_axes = [tuple(axis for axis in axes if axis in manual) for axes in spec_axes(weight_spec, weight.ndim)]
  even = padding.pad_evenly(weight, PartitionSpec(*weight_axes), sizes)
  unsplit = tuple(sorted(manual.difference(*weight_axes)))

  def multiply_part(x: jax.Array, weight_part: jax.Array) -> jax.Array:
    gathered = jax.lax.pcast(weight_part, unsplit, to='varying') if unsplit else weight_part
    for dim, axes in enumerate(weight_axes):
      if axes:  # as the first dim: a TPU scatters a gradient over its major dim in memory, and copies it otherwise
        parts_first = jnp.moveaxis(gathered, dim, 0)
        gathered = jnp.moveaxis(jax.lax.all_gather(parts_first, axes, axis=0, tiled=True), 0, dim)
    return multiply(x, gathered[tuple(slice(size) for size in weight.shape)])

  tokens_spec = PartitionSpec(*token_axes)
  return jax.shard_map(
    multiply_part,
    mesh=mesh,
    axis_names=manual,
    in_specs=(tokens_spec, PartitionSpec(*weight_axes)),
    out_specs=tokens_spec,
  )(x, even)
