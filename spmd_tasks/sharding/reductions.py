"""sum_of_squares and sums_of_squares: reduce a tree of sharded weights with one all-reduce.

Left alone, XLA emits one all-reduce per weight, or two for a weight that is split in two dims: with ten weights on 8
fake devices, the two norms of a step were 34 of its 62 reduced buffers and 5% of its time. Here each device first sums
its own shards of all weights.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes
from spmd_tasks.sharding.weights import WeightSpec


def sum_of_squares(tree: Any, weight_specs: Any) -> jax.Array:
  """Returns the sum of the squares of all elements of all leaves, a float32 scalar accumulated in float32.

  Args:
    tree: congruent to the weights, with their true shapes; dims may be uneven.
    weight_specs: tree of WeightSpec. Inside a `sharding_scope`, leaves are laid out by its split dims; outside, it is
      not used.
  """
  return _reduce(tree, weight_specs, lambda sums: sum(sums, start=jnp.zeros((), jnp.float32)))


def sums_of_squares(tree: Any, weight_specs: Any) -> Any:
  """Returns the sum of the squares of each leaf, a tree of float32 scalars. Takes the arguments of `sum_of_squares`."""
  sums = _reduce(tree, weight_specs, jnp.stack)
  return jax.tree.unflatten(jax.tree.structure(tree), list(sums))


def _reduce(tree: Any, weight_specs: Any, combine: Callable[[list[jax.Array]], jax.Array]) -> jax.Array:
  """Combines the sums of squares of each device's shards, then reduces the result with one all-reduce."""
  leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
  scope = current_sharding_scope()
  if scope is None:
    return combine([_local_sum(x) for x in leaves])
  mesh, specs = scope.mesh, []
  weights: list[WeightSpec] = jax.tree.leaves(weight_specs)
  for i, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
    spec = scope.spec(weight.split_dims)
    split = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
    leaves[i] = padding.pad_evenly(split, spec, mesh.shape)
    specs.append(spec)
  leaf_axes = [[axis for axes in spec_axes(spec, x.ndim) for axis in axes] for spec, x in zip(specs, leaves)]
  all_axes = sorted(set().union(*leaf_axes))

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec())
  def reduce(*shards):
    # The devices along an axis that does not split a leaf hold copies of one shard, and the psum adds all of them.
    num_copies = [num_parts([axis for axis in all_axes if axis not in axes], mesh.shape) for axes in leaf_axes]
    return jax.lax.psum(combine([_local_sum(x) / count for x, count in zip(shards, num_copies)]), all_axes)

  return reduce(*leaves)


def _local_sum(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x))
