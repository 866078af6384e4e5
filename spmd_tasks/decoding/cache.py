"""A cache of keys and values over slots, as a tree of arrays [..., N, S, G, K]: what is written to it, and where.

Shapes: N slots, S positions, T new tokens, P rows, G key/value heads, K head dim; `...` counts layers.
"""

from typing import Any

import jax
import jax.numpy as jnp


def write_tokens(cache: Any, new: Any, positions: jax.Array, is_token: jax.Array) -> Any:
  """Writes the tokens of every slot to their places.

  Args:
    cache: leaves [..., N, S, G, K].
    new: leaves [..., N, T, G, K].
    positions: int32 [N, T]; is_token: bool [N, T], False for what is not to be written.
  """

  def write(leaf: jax.Array, tokens: jax.Array) -> jax.Array:
    slot_dim = leaf.ndim - 4
    # What is no token goes outside of the cache, each to a place of its own, and is not written.
    outside = leaf.shape[slot_dim + 1] + jnp.arange(positions.shape[1], dtype=positions.dtype)[None, :]
    places = jnp.where(is_token, positions, outside)
    # Slots are a batch dim of the scatter: they stay split over the mesh, and where they are, so that it is in place.
    numbers = jax.lax.ScatterDimensionNumbers(
      update_window_dims=(*range(slot_dim), slot_dim + 2, slot_dim + 3),
      inserted_window_dims=(slot_dim + 1,),
      scatter_dims_to_operand_dims=(slot_dim + 1,),
      operand_batching_dims=(slot_dim,),
      scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
      leaf, places[:, :, None], tokens.astype(leaf.dtype), numbers, mode='drop', unique_indices=True
    )

  return jax.tree.map(write, cache, new)


def insert_rows(cache: Any, rows: Any, slots: jax.Array) -> Any:
  """Writes rows [..., P, T, G, K] to the first T places of slots, int32 [P]; a slot N takes none."""

  def insert(leaf: jax.Array, new: jax.Array) -> jax.Array:
    slot_dim = leaf.ndim - 4
    places = (slice(None),) * slot_dim + (slots, slice(0, new.shape[slot_dim + 1]))
    return leaf.at[places].set(new.astype(leaf.dtype), mode='drop')

  return jax.tree.map(insert, cache, rows)


def take_slots(cache: Any, slots: jax.Array) -> Any:
  """The cache whose slot i is the given one's slots[i]."""
  return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=leaf.ndim - 4), cache)
