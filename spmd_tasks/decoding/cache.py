"""A cache of keys and values over slots, as a tree of arrays [..., N, G, S, K]: what is written to it, and where.

Position p is at place p mod S. S is the number of positions, or, where an attention window needs no more, the window's:
then the cache is a ring, and leaves may differ in S.

Shapes: N slots, S places, T new tokens, P rows, G key/value heads, K head dim; `...` counts layers.
"""

from typing import Any

import jax
import jax.numpy as jnp


def write_tokens(cache: Any, new: Any, starts: jax.Array, lengths: jax.Array, *, slots: jax.Array | None = None) -> Any:
  """Writes the tokens of every row to the places of their positions.

  Args:
    cache: leaves [..., N, G, S, K].
    new: leaves [..., P, G, R, K]: all T tokens of the rows, or where S is less than T the last S of each row.
    starts: int32 [P], position of each row's first token.
    lengths: int32 [P], how many there are, padding behind them excluded; 0 writes nothing.
    slots: int32 [P], all different, where the rows go; from N on: nowhere. None: row i to slot i.
  """

  def write(leaf: jax.Array, tokens: jax.Array) -> jax.Array:
    slot_dim = leaf.ndim - 4
    num_places, num_columns = leaf.shape[slot_dim + 2], tokens.shape[slot_dim + 2]
    columns = jnp.arange(num_columns, dtype=starts.dtype)[None, :]
    first = starts + jnp.maximum(lengths - num_columns, 0)
    # What is no token goes outside of the cache, each to a place of its own, and is not written.
    places = jnp.where(columns < lengths[:, None], (first[:, None] + columns) % num_places, num_places + columns)
    scatter_dims: tuple[int, ...]
    if slots is None:
      # Slots are a batch dim of the scatter: they stay split over the mesh, and where they are, so that it is in place.
      indexed: dict[str, Any] = {'operand_batching_dims': (slot_dim,), 'scatter_indices_batching_dims': (0,)}
      scatter_dims, indices = (slot_dim + 2,), places[:, :, None]
    else:
      indexed = {}
      scatter_dims = (slot_dim, slot_dim + 2)
      indices = jnp.stack([jnp.broadcast_to(slots[:, None], places.shape), places], axis=-1)
    numbers = jax.lax.ScatterDimensionNumbers(
      update_window_dims=(*range(slot_dim), slot_dim + 1, slot_dim + 3),
      inserted_window_dims=scatter_dims,
      scatter_dims_to_operand_dims=scatter_dims,
      **indexed,
    )
    return jax.lax.scatter(leaf, indices, tokens.astype(leaf.dtype), numbers, mode='drop', unique_indices=True)

  return jax.tree.map(write, cache, new)


def take_slots(cache: Any, slots: jax.Array) -> Any:
  """The cache whose slot i is the given one's slots[i]."""
  return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=leaf.ndim - 4, mode='clip'), cache)


def copy_slots(cache: Any, sources: jax.Array, slots: jax.Array) -> Any:
  """Copies the slots `sources`, int32 [P], to `slots`, int32 [P], all different; from N on: nowhere."""

  def put(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf.at[(slice(None),) * (leaf.ndim - 4) + (slots,)].set(rows, mode='drop', unique_indices=True)

  return jax.tree.map(put, cache, take_slots(cache, sources))
