"""The arrays of a KV cache: writes new tokens to them, and takes slots out of them.

A cache is a tree of arrays whose names the layers choose (layers/attention/kv_cache.py). Most are pools of blocks of b
positions, [..., N, G, b, K]: a table lists the blocks of each row, and position p is entry p mod b of block p / b. An
encoder's text, and the ring of a layer whose attention window S is shorter than the texts, have one place per slot,
[..., N, G, S, K]; position p of a ring is entry p mod S. Without tables, all arrays have one place per slot.

Shapes: N slots or blocks, P rows, T tokens of each, S positions of a slot, b of a block, G key/value heads, K head dim,
D parts into which a mesh splits slots and blocks; `...` counts layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention.kv_cache import ENCODED, is_by_slot


def is_encoded(path: Any) -> bool:
  """Returns whether the array at this path of a cache is an encoder's text, which no new token changes."""
  return _name(path).startswith('cached_' + ENCODED)


def has_blocks(path: Any) -> bool:
  """Returns whether the array at this path of a cache is a pool of blocks, if there are tables."""
  return not is_by_slot(_name(path))


def _name(path: Any) -> str:
  return str(getattr(path[-1], 'key', '')) if path else ''


def write_tokens(
  cache: Any,
  new: Any,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  slots: jax.Array | None = None,
  tables: jax.Array | None = None,
) -> Any:
  """Writes the keys and values of each row's tokens to the entries of their positions, in place if `cache` is donated.

  Args:
    cache: arrays [..., N, G, S, K], or with `tables` [..., N, G, b, K] if they have blocks.
    new: arrays [..., P, G, R, K] with all T tokens of each row, or with the last R >= S of them if S < T. Arrays of an
      encoder's text replace the slot's; if they are missing, the slot keeps its own.
    starts: int32 [P], position of each row's first token.
    lengths: int32 [P], number of tokens, without the padding behind them; 0 writes nothing.
    slots: int32 [P], all different, the slot of each row; rows with numbers from N on are not written. None writes row
      i to slot i.
    tables: int32 [D, P/D, M], the blocks of each row among the N/D of its part; blocks from N/D on are not written. If
      T > 1, `starts` are multiples of b. Rows that write to one block, as tokens of one text do, are consecutive.
  """
  new_by_path = dict(jax.tree_util.tree_flatten_with_path(new)[0])

  def write(path: Any, array: jax.Array) -> jax.Array:
    tokens = new_by_path.get(path)
    if tokens is None:
      return array
    slot_dim = array.ndim - 4
    if is_encoded(path):
      return _put_slots(array, tokens.astype(array.dtype), slots)
    if tables is not None and has_blocks(path):
      blocks = tables
    elif slots is None:  # a slot is a block, and a part of its own
      blocks = jnp.zeros((array.shape[slot_dim], 1, 1), jnp.int32)
    else:
      blocks = slots[None, :, None]
    return _scatter(array, tokens, blocks, starts, lengths)

  return jax.tree_util.tree_map_with_path(write, cache)


def _put_slots(array: jax.Array, new: jax.Array, slots: jax.Array | None) -> jax.Array:
  if slots is None:
    return new
  return array.at[(slice(None),) * (array.ndim - 4) + (slots,)].set(new, mode='drop', unique_indices=True)


def _scatter(
  array: jax.Array, tokens: jax.Array, blocks: jax.Array, starts: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Writes tokens [..., P, G, R, K] to `array` [..., N, G, b, K], row i to its blocks among `blocks` [D, P/D, M]."""
  slot_dim = array.ndim - 4
  num_parts, rows_of_part, num_blocks = blocks.shape
  all_blocks, num_groups, block, num_features = array.shape[slot_dim:]
  layers, part, num_columns = array.shape[:slot_dim], all_blocks // num_parts, tokens.shape[slot_dim + 2]
  columns = jnp.arange(num_columns, dtype=starts.dtype)[None, :]
  offsets = jnp.maximum(lengths - num_columns, 0)[:, None] + columns
  places = (starts[:, None] + offsets) % (num_blocks * block)
  added = num_parts * rows_of_part - len(starts)
  is_token = (columns < lengths[:, None]) & (offsets >= lengths[:, None] - num_blocks * block)
  is_token = jnp.pad(is_token, ((0, added), (0, 0)))
  places = jnp.pad(places, ((0, added), (0, 0)))
  tokens = jnp.pad(tokens, [(0, added if dim == slot_dim else 0) for dim in range(tokens.ndim)])
  block_ids = jnp.take_along_axis(blocks.reshape(-1, num_blocks), places // block, axis=1)
  # Padding gets places behind the pool, each a different one, which the scatter drops.
  behind = all_blocks + jnp.arange(len(block_ids), dtype=block_ids.dtype)[:, None]
  indices = jnp.stack([jnp.where(is_token, block_ids, behind), jnp.where(is_token, places % block, columns)], axis=-1)
  # Parts are a batch dim of the scatter: they stay split over the mesh, and the scatter works in place.
  numbers = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(*range(slot_dim), slot_dim + 2, slot_dim + 4),
    inserted_window_dims=(slot_dim + 1, slot_dim + 3),
    scatter_dims_to_operand_dims=(slot_dim + 1, slot_dim + 3),
    operand_batching_dims=(slot_dim,),
    scatter_indices_batching_dims=(0,),
  )
  written = jax.lax.scatter(
    array.reshape(*layers, num_parts, part, num_groups, block, num_features),
    indices.reshape(num_parts, rows_of_part, num_columns, 2),
    tokens.astype(array.dtype).reshape(*layers, num_parts, rows_of_part, num_groups, num_columns, num_features),
    numbers,
    mode='drop',
    unique_indices=True,
  )
  return written.reshape(array.shape)


def take_slots(cache: Any, slots: jax.Array, tables: jax.Array | None = None) -> Any:
  """Returns the cache [..., P, G, S, K] whose row i is slot slots[i]; pools are read by `tables` [1, P, M]."""

  def take(path: Any, array: jax.Array) -> jax.Array:
    slot_dim = array.ndim - 4
    if tables is None or not has_blocks(path):
      return jnp.take(array, slots, axis=slot_dim, mode='clip')
    blocks = jnp.moveaxis(jnp.take(array, tables[0], axis=slot_dim, mode='clip'), slot_dim + 1, slot_dim + 2)
    return blocks.reshape(*blocks.shape[: slot_dim + 2], -1, array.shape[-1])

  return jax.tree_util.tree_map_with_path(take, cache)
