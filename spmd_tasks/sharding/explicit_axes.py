"""Calls a user's model and loss with explicit mesh axes: the type of an array has its sharding.

    jax.typeof(x)        # float32[64@data,100] in a model with explicit axes, float32[64,100] elsewhere in a step

The axes of a step are automatic: the compiler decides how intermediate arrays are sharded. Code for `AxisType.Explicit`
(https://docs.jax.dev/en/latest/parallel.html) needs the sharding in the type, for `jax.sharding.reshard`, for
`out_sharding=` of a product, and for a `jax.shard_map`, whose `in_specs` must match its arguments' types.

A type has only an even sharding: a dim that its mesh axes do not divide keeps the subset of them that splits it evenly
into the most parts (`even_spec`). So an uneven dim arrives with its true size, split over fewer devices or none.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from spmd_tasks.sharding.specs import (
  current_sharding_scope,
  even_spec,
  infer_partition_spec_based_on_rank,
  scope_of,
  shard_on_batch_dim_partition_spec,
)


def explicitly(function: Callable[..., Any], variables: Any, batch: Any, *others: Any) -> Any:
  """Returns function(variables, batch, *others), called with explicit axes if the scope says so (`variable_specs`).

  Args:
    function: returns a tree of arrays.
    variables: arrays by collection, sharded by the scope's `variable_specs`; collections that it lacks are replicated.
    batch: arrays by name, sharded by rank, as a step's batch is.
    others: replicated arrays, or None.
  """
  scope = current_sharding_scope()
  if scope is None or scope.variable_specs is None or scope.has_explicit_axes:
    return function(variables, batch, *others)
  mesh, declared = scope.mesh, scope.variable_specs

  def row_spec(x: Any) -> PartitionSpec:
    spec = infer_partition_spec_based_on_rank(x.ndim, scope.inputs_split_mapping, mesh.axis_names, scope.axis_rules)
    return shard_on_batch_dim_partition_spec(mesh.axis_names, x.ndim) if spec is None else spec

  replicated = lambda tree: jax.tree.map(lambda x: PartitionSpec(), tree)
  specs = (
    {name: declared.get(name, replicated(tree)) for name, tree in variables.items()},
    jax.tree.map(row_spec, batch),
  )
  in_sharding = jax.tree.map(lambda x, spec: even_spec(spec, x.shape, mesh.shape), (variables, batch), specs)
  explicit = dataclasses.replace(scope, mesh=with_axis_type(mesh.abstract_mesh, AxisType.Explicit))

  def call(*arguments: Any) -> Any:
    with scope_of(explicit):
      return function(*arguments)

  return jax.sharding.explicit_axes(call, in_sharding=(*in_sharding, *map(replicated, others)))(
    variables, batch, *others
  )


def with_axis_type(mesh: Any, axis_type: AxisType) -> Any:
  """Returns the mesh, which may be abstract, with axes of this type."""
  types = (axis_type,) * len(mesh.axis_names)
  if mesh.axis_types == types:
    return mesh
  if isinstance(mesh, Mesh):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
  return mesh.update_axis_types(dict(zip(mesh.axis_names, types)))
