"""sum_of_squares and sums_of_squares: sum a whole tree of sharded weights with one all-reduce.

The compiler makes one all-reduce of every weight's sum, or two for a weight that is split in two dims: of ten weights
on 8 fake devices, the two norms of a step were 34 of its 62 reduced buffers, and 5% of its time. Here each device first
sums its own slices of all weights.
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
    tree: congruent to the weights, of their true shapes; dims may be uneven.
    weight_specs: tree of WeightSpec. Inside a `sharding_scope` its split dims are the layout of the leaves; outside it
      is not read.
  """
  return _reduce(tree, weight_specs, lambda sums: sum(sums, start=jnp.zeros((), jnp.float32)))


def sums_of_squares(tree: Any, weight_specs: Any) -> Any:
  """Returns the sum of the squares of each leaf, a tree of float32 scalars; arguments as those of `sum_of_squares`."""
  sums = _reduce(tree, weight_specs, jnp.stack)
  return jax.tree.unflatten(jax.tree.structure(tree), list(sums))


def _reduce(tree: Any, weight_specs: Any, combine: Callable[[list[jax.Array]], jax.Array]) -> jax.Array:
  """Combines the sums of squares of all leaves: each device of its own slices, then one all-reduce."""
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
  used = [[axis for axes in spec_axes(spec, x.ndim) for axis in axes] for spec, x in zip(specs, leaves)]
  all_used = sorted(set().union(*used))

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec())
  def reduce(*slices):
    # All devices along an axis that does not split a leaf hold the same slice, and all of them count it.
    copies = [num_parts([axis for axis in all_used if axis not in axes], mesh.shape) for axes in used]
    return jax.lax.psum(combine([_local_sum(x) / count for x, count in zip(slices, copies)]), all_used)

  return reduce(*leaves)


def _local_sum(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x))
