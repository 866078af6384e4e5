"""KV cache: attention to keys and values that earlier calls stored, so that no token is computed twice.

A model generates text when its caller makes the collection `new_cache` mutable. Every attention then writes the keys
and values of the call's own tokens to `new_cache`, and reads those of earlier calls from the collection `cache`:

  outputs, new = model.apply({'params': weights}, prompts, mutable='new_cache')                   # prefill
  outputs, new = model.apply({'params': weights, 'cache': cache}, batch, mutable='new_cache')     # step, or a chunk

The caller writes `new` into `cache`: the token at position p of row b goes to entry [b, :, p mod S]. Done once outside
the loop over layers, the write is an update in place; in each layer it would copy the cache in every step.

A cache with S = the number of positions never wraps around. The cache of a layer with an attention window may have
S = the window, and wraps around as a ring buffer. In both cases the batch's `segment_pos` alone determines which
position an entry holds, and entries of an earlier sequence are not read. Each row holds one sequence; rows at different
positions share one step.

Cache arrays are [B, G, S, K], in stacks of layers [L, B, G, S, K], which every layer gets whole: it reads blocks of its
own entries (`CachedArray`). With entries before heads, each step would transpose the whole cache for the matmuls.

Shapes: B batch (or slots), T tokens of this call, S cache entries, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._paged import attend_by_text, attend_to_pages, merged
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.base import CACHE, NEW_CACHE, current_layer_scope, soft_cap
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_platform
from spmd_tasks.sharding.weights import WeightBox

# Platform -> how many entries of the cache are read at a time. A loop costs an accelerator more than a longer block.
# What a CPU reads stays in its cache, as do the scores of a block and many queries, whose products are larger.
_BLOCK, _LONG_BLOCK, _OF_QUERIES = {'cpu': 32}, 1024, 2
# How keys and values may be kept, with a float32 scale for each token and head -> the largest number of the dtype.
CACHE_DTYPES = {'int8': 127.0, 'float8_e4m3fn': 448.0}
ENCODED = 'encoded_'  # what a cache has of an encoder's text: made by a request's first call, and read by all others
_SCALE = '_scale'
RING = 'ring_'  # of a layer whose window is shorter than the texts


def write_new_cache(
  module: nn.Module,
  arrays: Mapping[str, jax.Array],
  split_dims: SplitDims,
  *,
  segment_ids: jax.Array | None = None,
  window: int | None = None,
) -> None:
  """Writes arrays [B, T, G, K], by name, of this call's tokens to `new_cache` as [B, G, T, K].

  `split_dims` has one entry per dim of [B, T, G, K], or is None. If T exceeds the window, only each row's last
  [B, G, window, K] are written: no later token sees the others.
  """
  rows, columns, heads, features = split_dims or (None,) * 4
  longest = current_layer_scope().longest_text
  kind = RING if window is not None and longest is not None and window < longest else ''
  for name, x in arrays.items():
    num_columns = x.shape[1]
    if window is not None and num_columns > window:
      if segment_ids is None:
        lengths = jnp.full(x.shape[:1], num_columns)
      else:
        lengths = jnp.sum(segment_ids != 0, axis=1)
      kept = jnp.maximum(lengths - window, 0)[:, None] + jnp.arange(window)[None, :]
      x = jnp.take_along_axis(x, kept[:, :, None, None], axis=1)
    x = jnp.swapaxes(x, 1, 2)
    stored = {name: (x, features)}
    dtype = current_layer_scope().cache_dtype
    if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
      kept, scale = quantize(x, dtype)
      stored = {name: (kept, features), name + _SCALE: (scale, None)}
    for stored_name, (value, last) in stored.items():
      box = WeightBox(value=value, split_dims=(rows, heads, columns, last), tags=(), stacked=0)
      module.put_variable(NEW_CACHE, f'cached_{kind}{stored_name}', box)


def quantize(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
  """Returns (x in one of CACHE_DTYPES [..., K], its scales float32 [..., 1])."""
  largest = CACHE_DTYPES[dtype]
  scale = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True), 1e-30) / largest
  scaled = x.astype(jnp.float32) / scale
  return (jnp.round(scaled) if dtype == 'int8' else jnp.clip(scaled, -largest, largest)).astype(dtype), scale


class CachedArray(NamedTuple):
  """An array of earlier calls, of which a caller takes what it needs: a layer's whole array would be a copy.

  Attributes:
    array: [..., N, G, S, K]; the dims in front count layers. With `tables` [..., N, G, b, K], N blocks of b entries.
    layer: the layer's number in each of the dims in front.
    tables: int32 [D, R, M]. The rows and the blocks are in D equal parts, which a mesh may split; row r of part d has
      the entries of the part's blocks tables[d, r], in this order. None: row i has the entries at i.
    num_rows: B; the last of the D R rows may be padding.
    scale: of an array in one of CACHE_DTYPES, its scales.
  """

  array: jax.Array
  layer: tuple[jax.Array, ...]
  tables: jax.Array | None
  num_rows: int
  scale: 'CachedArray | None' = None

  @property
  def num_entries(self) -> int:
    """S, of a row."""
    return self.array.shape[-2] * (1 if self.tables is None else self.tables.shape[2])

  def size_to_read(self, limit: int) -> int:
    """How many entries to read at a time: `limit` or less, but whole blocks."""
    block = self.array.shape[-2]
    size = limit if self.num_entries == block else max(limit // block, 1) * block
    return min(size, self.num_entries)

  def entries(self, start: jax.Array | int, size: int) -> jax.Array:
    """Returns [B, G, size, K], in float32 where there are scales: see `stored_entries`."""
    stored = self.stored_entries(start, size)
    return stored if self.scale is None else stored.astype(jnp.float32) * self.scale.stored_entries(start, size)

  def as_read(self, x: jax.Array) -> jax.Array:
    """Returns an array [..., K] as it would be read if the cache had it."""
    if self.scale is None:
      return x
    kept, scale = quantize(x, self.array.dtype.name)
    return (kept.astype(jnp.float32) * scale).astype(x.dtype)

  def stored_entries(self, start: jax.Array | int, size: int) -> jax.Array:
    """Returns [B, G, size, K], the entries from `start` on; start + size is at most S, and where a row has several
    blocks, both are multiples of b.
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


def is_by_slot(name: str) -> bool:
  """Returns whether the cache's array of this name has one place per slot, of a fixed size, and no blocks."""
  return name.startswith((f'cached_{ENCODED}', f'cached_{RING}'))


def read_cache(module: nn.Module, num_rows: int, *names: str) -> tuple[CachedArray, ...] | None:
  """Returns the module's arrays of these names of earlier calls, for B rows, or None in the first call."""
  kinds = [kind for kind in ('', RING) if module.has_variable(CACHE, f'cached_{kind}{names[0]}')]
  if not kinds:
    return None
  scope = current_layer_scope()

  def read(name: str, slots: Any, tables: Any, num_rows: int) -> Any:
    array: Any = module.get_variable(CACHE, name)
    if array is None:
      return None
    scale = None if name.endswith(_SCALE) else read(name + _SCALE, slots, tables, num_rows)
    if is_by_slot(name):
      tables = None if slots is None else slots[None, :, None]
    # A loop over layers that is not ours gives the arrays of one layer.
    return CachedArray(array, scope.layers[: array.ndim - 4], tables, num_rows, scale)

  names = tuple(f'cached_{kinds[0]}{name}' for name in names)
  return tuple(read(name, scope.cache_slots, scope.cache_tables, num_rows) for name in names)


def write_encoded(
  module: nn.Module, key: jax.Array, value: jax.Array, segment_ids: jax.Array, split_dims: SplitDims
) -> None:
  """Writes keys and values [B, S, G, K] of an encoder's text, and its documents [B, S], for all later calls."""
  write_new_cache(module, {ENCODED + 'key': key, ENCODED + 'value': value}, split_dims)
  whose = {ENCODED + 'segments': segment_ids[:, :, None, None]}
  write_new_cache(module, whose, split_dims and (*split_dims[:2], None, None))


def read_encoded(module: nn.Module, num_rows: int) -> tuple[CachedArray, ...] | None:
  """Returns what the first call has written by `write_encoded`; None in the first call."""
  return read_cache(module, num_rows, *(ENCODED + name for name in ('key', 'value', 'segments')))


def attend_to_cache(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  cached: tuple[CachedArray, ...],
  segment_ids: jax.Array | None,
  segment_pos: jax.Array,
  options: AttentionOptions,
  *,
  split_dims: SplitDims = None,
  kv_split_dims: SplitDims = None,
) -> jax.Array:
  """Computes causal attention of this call's tokens to earlier calls' tokens and to one another: [B, T, H, K].

  A kernel reads what each row has of the cache, where the platform has one for the call (_paged.py). Else a loop reads
  the cache block by block, up to the longest row's tokens, so that the cost follows what is used and not S (with the
  running softmax of Milakov and Gimelshein, 2018). A block in which a row has no token changes no bit of the row's
  result: it depends on no other row. Logits, softmax and sums of values are float32.

  Args:
    query, key, value: [B, T, H, K] and [B, T, G, K], of this call.
    cached: keys and values; with a window S may be as small as the window.
    segment_ids: int32 [B, T], 0 for padding, which comes after the tokens. None: no padding.
    segment_pos: int32 [B, T], consecutive positions in the sequence; the cache holds the positions before the first.
      Positions of padding are ignored; 0 in the first column of a row that is padding alone keeps it cheap.
    options: of a causal attention.
    split_dims, kv_split_dims: of queries, and of keys and values; a kernel runs on each device's rows and heads.

  Where rows are tokens of one text that follow each other (`LayerScope.cache_drafts`; T is 1), each also attends to
  the rows before it.
  """
  (num_rows, num_columns, _, head_dim), num_groups, window = query.shape, key.shape[2], options.window
  grouped = jnp.moveaxis(query.reshape(num_rows, num_columns, num_groups, -1, head_dim), 1, 3)  # [B, G, H/G, T, K]
  columns, start = jnp.arange(num_columns), segment_pos[:, :1]
  positions = start + columns[None, :]

  def masked_logits(keys: jax.Array, held: jax.Array, may_see: jax.Array) -> jax.Array:
    """Returns [B, G, H/G, T, n] for keys [B, G, n, K] at positions `held` [B, n], seen where [B, T, n] says."""
    products = jnp.einsum('BGRTK,BGSK->BGRTS', grouped, keys, preferred_element_type=jnp.float32)
    logits = soft_cap(products * options.scale(head_dim), options.logit_cap)
    if options.bias is not None:
      logits += options.bias.between(positions, held).reshape(logits.shape)
    return jnp.where(may_see[:, None, None], logits, -1e30)

  def weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum('BGRTS,BGSK->BGRTK', weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

  distance = columns[:, None] - columns[None, :]
  may_see = (distance >= 0)[None]  # [1, T, T]
  if segment_ids is not None:
    may_see &= segment_ids[:, :, None] == segment_ids[:, None, :]
  if window is not None:
    may_see &= (distance < window)[None]
  own = masked_logits(jnp.swapaxes(key, 1, 2), positions, may_see)
  highest = jnp.max(own, axis=-1, keepdims=True)
  total = jnp.zeros_like(highest)
  if options.sinks is not None:
    sink = options.sinks.astype(jnp.float32).reshape(1, num_groups, -1, 1, 1)
    highest = jnp.maximum(highest, sink)
    total = jnp.exp(sink - highest)
  weights = jnp.exp(own - highest)
  total += jnp.sum(weights, axis=-1, keepdims=True)
  attended = weighted_sum(weights, jnp.swapaxes(value, 1, 2))

  carry: tuple[jax.Array, ...] = (highest, total, attended)
  queries = grouped.reshape(num_rows, num_groups, -1, head_dim)
  drafts, layout = current_layer_scope().cache_drafts, (split_dims, kv_split_dims)
  if drafts is None:
    of_pages = attend_to_pages(queries, cached, start[:, 0], options, num_columns, *layout)
  else:
    of_pages = attend_by_text(drafts, queries, (key, value), cached, start[:, 0], options, *layout)
  if of_pages is not None:
    _, total, attended = merged(carry, jax.tree.map(lambda x, own: x.reshape(own.shape), of_pages, carry))
    return jnp.moveaxis(attended / total, 3, 1).reshape(query.shape).astype(value.dtype)

  num_entries = cached[0].num_entries
  limit = _BLOCK.get(current_platform(), _LONG_BLOCK)
  size = cached[0].size_to_read(limit if num_columns == 1 else min(limit * _OF_QUERIES, _LONG_BLOCK))

  def add_block(i: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    highest, total, attended = carry
    first = jnp.minimum(i * size, num_entries - size)  # the last block begins in the one before it
    entries = first + jnp.arange(size)[None, :]
    # Entry e holds the last position before the start that is e modulo S, if there is one: [B, n].
    held = start - 1 - (start - 1 - entries) % num_entries
    may_see = ((held >= 0) & (entries >= i * size))[:, None, :]
    if window is not None:
      may_see &= positions[:, :, None] - held[:, None, :] < window
    keys, values = (x.entries(first, size).astype(key.dtype) for x in cached)
    if drafts is not None:
      earlier = drafts.earlier
      # As if the tokens before were in the cache: the bits are those of a step that finds them there.
      place = (start - 1 - jnp.arange(earlier.shape[1])[None, :]) % num_entries - first
      place = jnp.where((earlier < num_rows) & (place >= 0), place, size)
      keys = _with_earlier(keys, cached[0].as_read(key[:, 0]), earlier, place)
      values = _with_earlier(values, cached[1].as_read(value[:, 0]), earlier, place)
    logits = masked_logits(keys, held, may_see)
    higher = jnp.maximum(highest, jnp.max(logits, axis=-1, keepdims=True))
    factor, weights = jnp.exp(highest - higher), jnp.exp(logits - higher)
    return (
      higher,
      total * factor + jnp.sum(weights, axis=-1, keepdims=True),
      attended * factor + weighted_sum(weights, values),
    )

  if size == num_entries:
    carry = add_block(0, carry)
  else:
    used = jnp.minimum(jnp.max(start), num_entries)
    carry = jax.lax.fori_loop(0, (used + size - 1) // size, add_block, carry)
  _, total, attended = carry
  return jnp.moveaxis(attended / total, 3, 1).reshape(query.shape).astype(value.dtype)


def _with_earlier(held: jax.Array, new: jax.Array, earlier: jax.Array, place: jax.Array) -> jax.Array:
  """Puts `new` [B, G, K] of the rows `earlier` [B, k] at `place` [B, k] of `held` [B, G, n, K]; n is no place."""
  rows = jnp.arange(len(held))[:, None]
  return held.at[rows, :, place].set(jnp.take(new, earlier, axis=0, mode='clip'), mode='drop')
