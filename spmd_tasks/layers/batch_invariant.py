"""Batch invariance: the bits of a token's results depend neither on other tokens nor on how many there are, on CPUs.

  with layer_scope(batch_invariant=True):
    logits = model.apply(variables, batch)      # of a training batch, or of one token of each of a few texts

XLA's CPU compiler chooses the order of the sums of a product by its shape, and rounds a * b + c once or twice, as it
fuses. Layers therefore compute in tiles of a fixed number of rows, in a loop that XLA cannot merge with its
surroundings. Layers call `by_row` (base.py) for it, attention attention/_batch_invariant.py. Backward passes are the
usual ones. On a mesh each device computes its own rows; rows that its axes do not divide are computed by all.

Shapes: B batch.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.sharding.specs import current_sharding_scope, spec_axes

TILE = 32  # rows: from 16 on, products of large matrices cost at most twice what they cost at once


def by_tiles(function: Callable[..., Any], rows: tuple[jax.Array, ...], shared: tuple[Any, ...], num_dims: int) -> Any:
  """Returns function(*rows, *shared), computed for a tile of rows at a time.

  The function keeps the first `num_dims` dims, which count rows, and reads no arrays but its arguments. `shared` is
  what all rows read.
  """

  def compute(*arrays):
    rows, shared = arrays[:num_arrays], arrays[num_arrays:]
    lead, num_rows = rows[0].shape[:num_dims], math.prod(rows[0].shape[:num_dims])
    shape = (-1, TILE, *(1,) * (num_dims - 1))
    tiles = [padded(x.reshape(num_rows, -1), 0, TILE).reshape(*shape, *x.shape[num_dims:]) for x in rows]
    made = loop(lambda i, *tile: function(*tile, *shared), *tiles)
    as_rows = lambda x: x.reshape(-1, *x.shape[1 + num_dims :])[:num_rows].reshape(*lead, *x.shape[1 + num_dims :])
    return jax.tree.map(as_rows, made)

  num_arrays = len(rows)
  return alike(function, functools.partial(on_devices, compute, num_arrays), *rows, *shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def alike(function: Callable[..., Any], in_tiles: Callable[..., Any], *arrays: Any) -> Any:
  """Returns in_tiles(*arrays), with the gradient of function(*arrays)."""
  return in_tiles(*arrays)


alike.defvjp(
  lambda function, in_tiles, *arrays: (in_tiles(*arrays), arrays),
  lambda function, in_tiles, arrays, cotangent: jax.vjp(function, *arrays)[1](cotangent),
)


def loop(function: Callable[..., Any], *tiles: jax.Array) -> Any:
  """Returns function(i, *(x[i] for x in tiles)) of each i, stacked."""
  number = len(tiles[0])
  # Of a single tile XLA would know that it is tile 0, compute it before the loop, and fuse it with its surroundings.
  if number == 1:  # the second is never computed
    tiles = tuple(padded(x, 0, 2) for x in tiles)
  at = lambda i: function(i, *(jax.lax.dynamic_index_in_dim(x, i, 0, False) for x in tiles))
  shapes = jax.eval_shape(at, jax.ShapeDtypeStruct((), jnp.int32))
  made = jax.tree.map(lambda x: jnp.zeros((len(tiles[0]), *x.shape), x.dtype), shapes)
  # XLA would inline a loop of which it knows that it runs once. Of this one it does not: this is 0 for any number.
  first = tiles[0].reshape(-1)[0]
  nothing = jnp.minimum((first != first).astype(jnp.int32), 0)

  def step(i: jax.Array, made: Any) -> Any:
    return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_index_in_dim(whole, one, i, 0), made, at(i))

  made = jax.lax.fori_loop(0, number + nothing, step, made)
  return jax.tree.map(lambda x: x[:number], made)


def on_devices(compute: Callable[..., Any], num_split: int, *arrays: Any) -> Any:
  """Calls `compute` on each device's part of the first `num_split` arrays, whose first dim is that of the batch."""
  scope = current_sharding_scope()
  if scope is None:
    return compute(*arrays)
  (axes,) = spec_axes(scope.activation_spec(('batch',), arrays[0].shape[:1], is_even=True), 1)
  axes = tuple(axis for axis in axes if scope.mesh.shape[axis] > 1)
  mesh, free = scope.free_mesh()
  if not axes or not {*axes} <= free:  # these are a device's own rows
    return compute(*arrays)
  split, whole = PartitionSpec(axes), PartitionSpec()
  specs = tuple(split if i < num_split else whole for i in range(len(arrays)))
  mapped = jax.shard_map(compute, mesh=mesh, axis_names={*axes}, in_specs=specs, out_specs=split, check_vma=False)
  return mapped(*arrays)


def padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
  return jnp.pad(x, [(0, -x.shape[dim] % multiple if i == dim else 0) for i in range(x.ndim)])
