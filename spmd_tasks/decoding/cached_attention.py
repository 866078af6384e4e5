"""Attention of a call's tokens to the tokens of earlier calls, which are in the KV cache, and to one another.

There are three ways to read the cache, which give the same numbers up to the order of summation:

  by a kernel           reads the blocks of each row in place (paged_attention.py)
  drafts, by a kernel   rows that are tokens of one text are queries of one row of the kernel
  by a loop             copies one block of the cache after another; on every platform, for every kind of array

Shapes: B rows, T tokens of the call, S keys, H query heads, G key/value heads, R = H / G, K head dim, V dim of a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.decoding.cache_arrays import CachedArray
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.paged_attention import attend_to_pages
from spmd_tasks.decoding.partial_softmax import PartialSoftmax, Queries, extend_softmax, merge, softmax_of
from spmd_tasks.layers.attention import AttentionOptions
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_platform

# Platform -> entries that the loop reads at a time. Short blocks, and their scores, stay in a CPU's cache; accelerators
# prefer few iterations. Several queries read longer blocks, whose products are larger.
_BLOCK, _LONG_BLOCK, _OF_QUERIES = {'cpu': 32}, 1024, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierTokens:
  """What one attention has stored of earlier calls' tokens; implements layers.cache.EarlierTokens.

  Fields:
    keys, values: the same array if keys are the values. With a window, S may be as small as the window.
    drafts: says which rows are consecutive tokens of one text, if any are; T is then 1, and each row also attends to
      the rows before it.
    implementation: 'pallas' or 'xla' (paged_attention.py); None: the best one.
    kv_split_dims: of this call's keys and values [B, T, G, K].
  """

  keys: CachedArray
  values: CachedArray
  drafts: DraftRows | None = None
  implementation: str | None = None
  kv_split_dims: SplitDims = None

  def attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    segment_pos: jax.Array,
    options: AttentionOptions,
    *,
    split_dims: SplitDims = None,
  ) -> jax.Array:
    """Computes [B, T, H, V]. A row's result does not depend on other rows, not even in its last bits."""
    (num_rows, num_columns, _, head_dim), num_groups = query.shape, key.shape[2]
    grouped = jnp.moveaxis(query.reshape(num_rows, num_columns, num_groups, -1, head_dim), 1, 3)
    queries = Queries(grouped, segment_pos[:, :1] + jnp.arange(num_columns)[None, :], options)
    own = attend_to_own_tokens(queries, key, value, segment_ids)
    if self.drafts is None:
      layout = split_dims, self.kv_split_dims
      pages = attend_to_pages(queries, self.keys, self.values, self.implementation, *layout)
    else:
      pages = attend_drafts_to_pages(queries, (key, value), self, split_dims)
    if pages is not None:
      _, total, attended = merge(own, pages)
    else:
      _, total, attended = attend_by_blocks(own, queries, (key, value), self)
    return jnp.moveaxis(attended / total, 3, 1).reshape(query.shape).astype(value.dtype)


def attend_to_own_tokens(
  queries: Queries, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None
) -> PartialSoftmax:
  """Computes the softmax over the call's own tokens, with keys and values [B, T, G, K], and the sinks."""
  options, columns = queries.options, jnp.arange(key.shape[1])
  distance = columns[:, None] - columns[None, :]
  may_see = (distance >= 0)[None]
  if segment_ids is not None:
    may_see &= segment_ids[:, :, None] == segment_ids[:, None, :]
  if options.window is not None:
    may_see &= (distance < options.window)[None]
  logits = queries.logits(jnp.swapaxes(key, 1, 2), queries.positions, may_see)
  return softmax_of(logits, jnp.swapaxes(value, 1, 2), options.sinks)


def attend_by_blocks(
  softmax: PartialSoftmax, queries: Queries, new: tuple[jax.Array, jax.Array], earlier: EarlierTokens
) -> PartialSoftmax:
  """Adds the cache to a softmax, block by block, up to the length of the longest row.

  The cost depends on that length, not on S. A block in which a row has no token changes no bit of the row's result.
  `new` are the keys and values [B, T, G, K] of this call.
  """
  num_visible, start, num_columns = queries.num_visible, queries.start, queries.array.shape[3]
  num_entries = earlier.keys.num_entries
  limit = _BLOCK.get(current_platform(), _LONG_BLOCK)
  size = earlier.keys.size_to_read(limit if num_columns == 1 else min(limit * _OF_QUERIES, _LONG_BLOCK))

  def add_block(i: jax.Array | int, softmax: PartialSoftmax) -> PartialSoftmax:
    first = jnp.minimum(i * size, num_entries - size)  # the last block overlaps the one before it
    entries = first + jnp.arange(size)[None, :]
    # Entry e holds the last position before the start that is e modulo S, if there is one.
    positions = start - 1 - (start - 1 - entries) % num_entries
    may_see = ((positions >= 0) & (entries >= i * size))[:, None, :]
    if num_visible is not None:
      may_see &= queries.positions[:, :, None] - positions[:, None, :] < num_visible
    keys, values = (x.entries(first, size).astype(new[0].dtype) for x in (earlier.keys, earlier.values))
    if earlier.drafts is not None:
      # As if the tokens before were in the cache: the bits are the same as in a step that reads them from there.
      rows = earlier.drafts.earlier
      place = (start - 1 - jnp.arange(rows.shape[1])[None, :]) % num_entries - first
      place = jnp.where((rows < len(start)) & (place >= 0), place, size)
      keys = _with_earlier(keys, earlier.keys.as_read(new[0][:, 0]), rows, place)
      values = _with_earlier(values, earlier.values.as_read(new[1][:, 0]), rows, place)
    return extend_softmax(softmax, queries.logits(keys, positions, may_see), values)

  if size == num_entries:
    return add_block(0, softmax)
  used = jnp.minimum(jnp.max(start), num_entries)
  return jax.lax.fori_loop(0, (used + size - 1) // size, add_block, softmax)


def _with_earlier(entries: jax.Array, new: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
  """Puts `new` [B, G, K] of the rows `rows` [B, k] at `place` [B, k] of `entries` [B, G, n, K]; n is no place."""
  numbers = jnp.arange(len(entries))[:, None]
  return entries.at[numbers, :, place].set(jnp.take(new, rows, axis=0, mode='clip'), mode='drop')


def attend_drafts_to_pages(
  queries: Queries, new: tuple[jax.Array, jax.Array], earlier: EarlierTokens, split_dims: SplitDims
) -> PartialSoftmax | None:
  """Computes the softmax of drafts over the pages of their texts and the rows before them; None: no kernel supports it.

  The rows of a text are queries of one row of the kernel, which therefore reads the text's blocks once. Keys and values
  of the rows before a draft are not in the cache yet, and are added.

  Args:
    queries: R rows of one token each, the tokens of n texts; a text has at most k + 1.
    new: the keys and values [R, 1, G, K] of these tokens.
    earlier: keys and values in the cache, and the drafts.
    split_dims: of queries [R, 1, H, K].
  """
  drafts: Any = earlier.drafts
  num_rows = len(queries.array)
  tables = drafts.tables_of_texts(earlier.keys.tables)
  (num_parts, of_part, _), num_columns = tables.shape, drafts.rows.shape[1]
  num_texts = num_parts * of_part  # with padding
  rows = jnp.pad(drafts.rows, ((0, num_texts - len(drafts.rows)), (0, 0)), constant_values=num_rows)

  def take(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns x[numbers], where numbers are of the same part, so that a mesh that splits parts communicates nothing."""
    parts = x.reshape(num_parts, -1, *x.shape[1:])
    numbers_in_part = numbers.reshape(num_parts, -1) % parts.shape[1]
    return jax.vmap(lambda part, indices: part[indices])(parts, numbers_in_part).reshape(*numbers.shape, *x.shape[1:])

  start = queries.start
  first = jnp.where(rows[:, :1] < num_rows, take(start, rows[:, 0]), 0)
  of_texts = Queries(
    jnp.moveaxis(take(queries.array[:, :, :, 0], rows), 1, 3), first + jnp.arange(num_columns)[None, :], queries.options
  )
  keys, values = (x._replace(tables=tables, num_rows=num_texts) for x in (earlier.keys, earlier.values))
  partial = attend_to_pages(of_texts, keys, values, earlier.implementation, split_dims, earlier.kv_split_dims)
  if partial is None:
    return None
  by_columns = (jnp.moveaxis(x, 3, 1) for x in partial)  # [n, k + 1, G, R, 1 or V]
  places = drafts.owners * num_columns + drafts.columns
  of_pages: Any = tuple(take(x.reshape(-1, *x.shape[2:]), places)[:, :, :, None] for x in by_columns)

  before = (take(x.as_read(array[:, 0]), drafts.earlier) for x, array in zip((keys, values), new, strict=True))
  keys_before, values_before = (jnp.swapaxes(x, 1, 2) for x in before)
  distance = jnp.arange(1, num_columns)[None, :]
  may_see = drafts.earlier < num_rows
  if queries.options.window is not None:
    may_see &= distance < queries.options.window
  logits = queries.logits(keys_before, start - distance, may_see[:, None])
  return merge(of_pages, softmax_of(logits, values_before))
