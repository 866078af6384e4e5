"""top_k_ids: the places of the greatest values of each row, found where the row lies.

Left to the compiler, `jax.lax.top_k` of an array whose rows are sharded gathers all rows on every device and searches
all of them there (jax 0.10). Here each device searches its own.
"""

import jax

from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import SplitDims, current_sharding_scope, split_dims_to_partition_spec


def top_k_ids(x: jax.Array, k: int, split_dims: SplitDims) -> jax.Array:
  """The places of the k greatest entries of x's last dim, greatest first, of equal ones the first: int32 [..., k].

  No gradient passes: take the values with `jnp.take_along_axis`.

  Args:
    x: [..., N]; uneven dims are fine.
    k: at most N.
    split_dims: x's, one entry per dim, by which rows are laid out inside a `sharding_scope`; every device has whole
      rows, whatever the last entry. None leaves the layout to the compiler.
  """
  x = jax.lax.stop_gradient(x)
  scope = current_sharding_scope()
  if scope is None or split_dims is None:
    return _search(x, k)
  spec = split_dims_to_partition_spec((*split_dims[:-1], None), scope.mesh.axis_names, scope.axis_rules)
  even = jax.ShapeDtypeStruct(padding.padded_shape(x.shape, spec, scope.mesh.shape), x.dtype)

  search = jax.shard_map(lambda rows: _search(rows, k), mesh=scope.mesh, in_specs=spec, out_specs=spec)
  return padding.unpad(search(padding.pad(x, even)), jax.ShapeDtypeStruct((*x.shape[:-1], k), 'int32'))


def _search(x: jax.Array, k: int) -> jax.Array:
  # XLA makes a top_k of a sort and a slice, unless something slices the slice: then it merges the two and really sorts,
  # which on CPU takes 8 to 30 times as long. The barrier keeps them apart.
  return jax.lax.optimization_barrier(jax.lax.top_k(x, k)[1])
