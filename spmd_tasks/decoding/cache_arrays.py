"""The arrays of a KV cache: reads blocks of them, writes new tokens to them, and takes slots out of them.

A cache is a tree of arrays (kv_cache.py). Most are pools of blocks of b positions, [..., N, G, b, K]: a table lists the
blocks of each row, and position p is entry p mod b of block p / b. An encoder's text, and the ring of a layer whose
attention window S is shorter than the texts, have one place per slot, [..., N, G, S, K]; position p of a ring is entry
p mod S. So has the state of a layer that is not attention, whose last three dims are the layer's own. Without tables,
all arrays have one place per slot. Beside a state are its snapshots, [..., C, ., ., .]: the states after beginnings of
prompts, from which later prompts continue.

Shapes: N slots or blocks, C snapshots, P rows, T tokens of each, S positions of a slot, b of a block, G key/value
heads, K head dim, D parts into which a mesh splits slots and blocks; `...` counts layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.drafts import DraftRows

# Dtype of quantized keys and values, which have a float32 scale for each token and head -> its largest number.
CACHE_DTYPES = {'int8': 127.0, 'float8_e4m3fn': 448.0}
EXPERT_IDS = 'cached_expert_ids'  # which experts computed each token, if that is recorded
# Prefixes, after `cached_`, and the suffix of the names of arrays:
ENCODED = 'encoded_'  # an encoder's text: a request's first call writes it, all later calls read it
RING = 'ring_'  # a layer whose window is shorter than the texts
STATE = 'state_'  # a layer's state after a text's tokens, which every call replaces
SNAPSHOT = 'snapshot_'  # what later prompts continue from: states that a prefill has saved
SCALE = '_scale'  # the scales of a quantized array


def is_by_slot(name: str) -> bool:
  """Returns whether the array of this name has one place of fixed size per slot, and no blocks."""
  return name.startswith(tuple(f'cached_{kind}' for kind in (ENCODED, RING, STATE, SNAPSHOT)))


def is_encoded(path: Any) -> bool:
  """Returns whether the array at this path of a cache is an encoder's text, which no new token changes."""
  return _name(path).startswith('cached_' + ENCODED)


def is_state(path: Any) -> bool:
  """Returns whether the array at this path of a cache is a layer's state, which every call replaces."""
  return _name(path).startswith('cached_' + STATE)


def is_snapshot(path: Any) -> bool:
  """Returns whether the array at this path of a cache has the snapshots of a layer's state."""
  return _name(path).startswith('cached_' + SNAPSHOT)


def has_blocks(path: Any) -> bool:
  """Returns whether the array at this path of a cache is a pool of blocks, if there are tables."""
  return not is_by_slot(_name(path))


def _name(path: Any) -> str:
  return str(getattr(path[-1], 'key', '')) if path else ''


def _renamed(path: Any, kind: str, other: str) -> Any:
  return (*path[:-1], jax.tree_util.DictKey(_name(path).replace(kind, other, 1)))


def quantize(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
  """Returns x [..., K] in one of CACHE_DTYPES, and its scales, float32 [..., 1]."""
  largest = CACHE_DTYPES[dtype]
  scale = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True), 1e-30) / largest
  scaled = x.astype(jnp.float32) / scale
  return (jnp.round(scaled) if dtype == 'int8' else jnp.clip(scaled, -largest, largest)).astype(dtype), scale


class CachedArray(NamedTuple):
  """An array of the cache, stacked over layers, of which one layer reads some entries at a time without copying it.

  Attributes:
    array: [..., N, G, S, K]; leading dims count layers. With `tables`, [..., N, G, b, K]: N blocks of b entries.
    layer: the layer's number in each leading dim.
    tables: int32 [D, R, M]. Rows and blocks are in D equal parts, which a mesh may split; row r of part d has the
      entries of the part's blocks tables[d, r], in this order. None: row i has the entries at i.
    num_rows: B; the last of the D R rows may be padding.
    scale: the scales of a quantized array.
  """

  array: jax.Array
  layer: tuple[jax.Array, ...]
  tables: jax.Array | None
  num_rows: int
  scale: 'CachedArray | None' = None

  @property
  def num_entries(self) -> int:
    """S, the number of entries of a row."""
    return self.array.shape[-2] * (1 if self.tables is None else self.tables.shape[2])

  def size_to_read(self, limit: int) -> int:
    """Returns how many entries to read at a time: whole blocks, at most `limit` if a block is not longer."""
    block = self.array.shape[-2]
    size = limit if self.num_entries == block else max(limit // block, 1) * block
    return min(size, self.num_entries)

  def entries(self, start: jax.Array | int, size: int) -> jax.Array:
    """Returns [B, G, size, K], in float32 if the array is quantized; see `stored_entries`."""
    stored = self.stored_entries(start, size)
    return stored if self.scale is None else stored.astype(jnp.float32) * self.scale.stored_entries(start, size)

  def as_read(self, x: jax.Array) -> jax.Array:
    """Returns new keys or values [..., K] as they would be read from the cache."""
    if self.scale is None:
      return x
    quantized, scale = quantize(x, self.array.dtype.name)
    return (quantized.astype(jnp.float32) * scale).astype(x.dtype)

  def stored_entries(self, start: jax.Array | int, size: int) -> jax.Array:
    """Returns [B, G, size, K], the entries from `start` on, as they are stored.

    start + size is at most S; if a row has several blocks, both are multiples of b.
    """
    num_layer_dims, (num_blocks, num_groups, block, num_features) = len(self.layer), self.array.shape[-4:]
    ones, zero = (1,) * num_layer_dims, jnp.zeros((), jnp.int32)
    if self.tables is None:
      sizes = (*ones, num_blocks, num_groups, size, num_features)
      taken = jax.lax.dynamic_slice(self.array, (*self.layer, zero, zero, zero + start, zero), sizes)
      return taken.reshape(sizes[num_layer_dims:])
    num_parts, part = self.tables.shape[0], num_blocks // self.tables.shape[0]
    columns = (zero + start) // block + jnp.arange(-(-size // block))
    blocks = jnp.take(self.tables, columns, axis=2, mode='clip')
    indices = [jnp.broadcast_to(x, blocks.shape) for x in (*self.layer, blocks, (zero + start) % block)]
    numbers = jax.lax.GatherDimensionNumbers(
      offset_dims=(2, 4, 5),  # [D, R, G, blocks, b, K]: no transpose before the products
      collapsed_slice_dims=(*range(num_layer_dims), num_layer_dims + 1),
      start_index_map=(*range(num_layer_dims), num_layer_dims + 1, num_layer_dims + 3),
      operand_batching_dims=(num_layer_dims,),
      start_indices_batching_dims=(0,),
    )
    array = self.array.reshape(*self.array.shape[:num_layer_dims], num_parts, part, *self.array.shape[-3:])
    sizes = (*ones, 1, 1, num_groups, min(size, block), num_features)
    taken = jax.lax.gather(array, jnp.stack(indices, axis=-1), numbers, sizes, mode='clip')
    return taken.reshape(-1, num_groups, size, num_features)[: self.num_rows]


def write_tokens(
  cache: Any,
  new: Any,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  slots: jax.Array | None = None,
  tables: jax.Array | None = None,
  drafts: DraftRows | None = None,
) -> Any:
  """Writes the keys and values of each row's tokens to the entries of their positions, in place if `cache` is donated.

  Args:
    cache: arrays [..., N, G, S, K], or with `tables` [..., N, G, b, K] if they have blocks.
    new: arrays [..., P, G, R, K] with all T tokens of each row, or with the last R >= S of them if S < T. Arrays of an
      encoder's text replace the slot's; if they are missing, the slot keeps its own. States replace the slot's too.
    starts: int32 [P], position of each row's first token.
    lengths: int32 [P], number of tokens, without the padding behind them; 0 writes nothing.
    slots: int32 [P], all different, the slot of each row; rows with numbers from N on are not written. None writes row
      i to slot i.
    tables: int32 [D, P/D, M], the blocks of each row among the N/D of its part; blocks from N/D on are not written. If
      T > 1, `starts` are multiples of b. Rows that write to one block, as tokens of one text do, are consecutive.
    drafts: if rows are tokens of n texts, which ones. States are then [..., k + 1, n, ., ., .], after each token of
      each text, and the one after the text's last row that is not empty is written.
  """
  new_by_path = dict(jax.tree_util.tree_flatten_with_path(new)[0])
  text_slots, text_lengths = slots, lengths
  if drafts is not None:
    text_slots, text_lengths = drafts.slots, jnp.sum(drafts.by_column(lengths), axis=0)

  def write(path: Any, array: jax.Array) -> jax.Array:
    tokens = new_by_path.get(path)
    if tokens is None:
      return array
    slot_dim = array.ndim - 4
    if is_encoded(path):
      return _put_slots(array, tokens.astype(array.dtype), slots)
    if is_state(path):
      if drafts is not None:
        take_last = lambda states, length: states.take(length - 1, axis=slot_dim, mode='clip')
        tokens = jax.vmap(take_last, (slot_dim + 1, 0), slot_dim)(tokens, text_lengths)
      places = _slots_with_tokens(text_slots, text_lengths, array.shape[slot_dim])
      return _put_slots(array, tokens.astype(array.dtype), places)
    if tables is not None and has_blocks(path):
      blocks = tables
    elif slots is None:  # a slot is a block, and a part of its own
      blocks = jnp.zeros((array.shape[slot_dim], 1, 1), jnp.int32)
    else:
      blocks = slots[None, :, None]
    return _scatter(array, tokens, blocks, starts, lengths)

  return jax.tree_util.tree_map_with_path(write, cache)


def with_snapshots(cache: Mapping[str, Any], make: Callable[[Any], Any] = lambda leaf: leaf) -> dict[str, Any]:
  """Returns a tree like the cache that also has snapshots: what `make` returns for the leaf of each state."""
  flat, states = traverse_util.flatten_dict(cache), f'cached_{STATE}'
  snapshots = {
    (*path[:-1], path[-1].replace(STATE, SNAPSHOT, 1)): make(leaf)
    for path, leaf in flat.items()
    if path[-1].startswith(states)
  }
  return traverse_util.unflatten_dict(flat | snapshots)


def restore_states(cache: Any, slots: jax.Array, snapshots: jax.Array) -> Any:
  """Copies snapshots, int32 [P], to the states of `slots` [P]; a number from C on leaves the slot's state as it is."""
  by_path = dict(jax.tree_util.tree_flatten_with_path(cache)[0])

  def restore(path: Any, array: jax.Array) -> jax.Array:
    if not is_state(path):
      return array
    saved, slot_dim = by_path[_renamed(path, STATE, SNAPSHOT)], array.ndim - 4
    taken = jnp.take(saved, snapshots, axis=slot_dim, mode='clip')
    is_saved = snapshots < saved.shape[slot_dim]
    return _put_slots(array, taken, _slots_with_tokens(slots, is_saved, array.shape[slot_dim]))

  return jax.tree_util.tree_map_with_path(restore, cache)


def save_states(cache: Any, new: Any, snapshots: jax.Array) -> Any:
  """Writes the states in `new`, of P rows, to snapshots int32 [P], all different; drops rows with numbers from C on."""
  new_by_path = dict(jax.tree_util.tree_flatten_with_path(new)[0])

  def save(path: Any, array: jax.Array) -> jax.Array:
    if not is_snapshot(path):
      return array
    return _put_slots(array, new_by_path[_renamed(path, SNAPSHOT, STATE)].astype(array.dtype), snapshots)

  return jax.tree_util.tree_map_with_path(save, cache)


def _put_slots(array: jax.Array, new: jax.Array, slots: jax.Array | None) -> jax.Array:
  if slots is None:
    return new
  return array.at[(slice(None),) * (array.ndim - 4) + (slots,)].set(new, mode='drop', unique_indices=True)


def _slots_with_tokens(slots: jax.Array | None, lengths: jax.Array, num_slots: int) -> jax.Array:
  """Returns the slot of each row; for rows without tokens, different numbers from N on."""
  rows = jnp.arange(len(lengths), dtype=jnp.int32)
  return jnp.where(lengths > 0, rows if slots is None else slots, num_slots + rows)


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
