"""sum_of_squares: sums a whole tree of sharded weights with one all-reduce.

The compiler makes one all-reduce of every weight's sum, or two for a weight that is split in two dims. For a model of
ten weights on 8 fake devices, the two norms of a train step (of gradients and of weights) were 34 of its 62 reduced
buffers, and 5% of its time, because XLA's CPU backend waits for each buffer separately. Here each device first sums its
own slices of all weights.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import (
  constrain,
  current_sharding_scope,
  num_parts,
  spec_axes,
  split_dims_to_partition_spec,
)
from spmd_tasks.sharding.weights import WeightSpec


def sum_of_squares(tree: Any, weight_specs: Any) -> jax.Array:
  """Returns the sum of the squares of all elements of all leaves, a float32 scalar accumulated in float32.

  Args:
    tree: congruent to the weights, of their true shapes; dims may be uneven.
    weight_specs: tree of WeightSpec. Inside a `sharding_scope` its split dims are the layout of the leaves; outside it
      is not read.
  """
  leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
  scope = current_sharding_scope()
  if scope is None:
    return _local_sum(leaves)
  mesh, specs = scope.mesh, []
  weights: list[WeightSpec] = jax.tree.leaves(weight_specs)
  for i, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
    spec = split_dims_to_partition_spec(weight.split_dims, mesh.axis_names, scope.axis_rules)
    even = jax.ShapeDtypeStruct(padding.padded_shape(leaf.shape, spec, mesh.shape), leaf.dtype)
    leaves[i] = padding.pad(constrain(leaf, weight.split_dims), even)
    specs.append(spec)
  return _reduce(leaves, specs, mesh)


def _local_sum(leaves: Sequence[jax.Array]) -> jax.Array:
  return sum((jnp.sum(jnp.square(x)) for x in leaves), start=jnp.zeros((), jnp.float32))


def _reduce(leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> jax.Array:
  """Sums evenly split leaves: each device its own slices, then one all-reduce over the axes that split any leaf."""
  used = [[axis for axes in spec_axes(spec, x.ndim) for axis in axes] for spec, x in zip(specs, leaves)]
  all_used = sorted(set().union(*used))

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec())
  def reduce(*slices):
    total = jnp.zeros((), jnp.float32)
    for x, axes in zip(slices, used):
      # All devices along an axis that does not split this leaf hold the same slice, and all of them count it.
      num_copies = num_parts([axis for axis in all_used if axis not in axes], mesh.shape)
      total += _local_sum([x]) / num_copies
    return jax.lax.psum(total, all_used)

  return reduce(*leaves)
