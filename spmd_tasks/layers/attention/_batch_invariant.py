"""Attention whose bits for a query depend neither on other queries nor on how many there are; see batch_invariant.py.

A tile of queries is compared with all places that a text may have, in training and in generation alike. What a query
does not see has a weight of exactly 0.

Shapes: B batch, T queries, S places, H query heads, G key/value heads, K head dim, V dim of a value.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import AttentionOptions, Heads, attend_to_visible, visible
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.layers.batch_invariant import alike, loop, on_devices, padded

_QUERIES = 8  # of a tile
_PLACES = 16  # S is a multiple of it


def attend_to_one_another(heads: Heads, options: AttentionOptions) -> jax.Array:
  """Computes `attend` for whole texts."""
  keys, values = (places_of(jnp.swapaxes(x, 1, 2)) for x in (heads.key, heads.value))
  columns, key_columns = jnp.arange(heads.query.shape[1]), jnp.arange(heads.key.shape[1])
  may_see = visible(columns, key_columns, heads.segment_ids, heads.key_segments, options)
  may_see = jnp.pad(may_see, ((0, 0), (0, 0), (0, keys.shape[2] - len(key_columns))))
  return attend_alike(heads.query, keys, values, may_see, options)


def attend_to_cached(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  cached: Sequence[Any],
  segment_ids: jax.Array | None,
  segment_pos: jax.Array,
  options: AttentionOptions,
) -> jax.Array:
  """Computes `attend_to_cache`; each position has a place of its own in the cache."""
  rows, positions = jnp.arange(len(query))[:, None], segment_pos[:, :1] + jnp.arange(query.shape[1])[None, :]
  is_text = jnp.ones_like(positions, bool) if segment_ids is None else segment_ids != 0
  places = jnp.where(is_text, positions, cached[0].num_entries)
  keys, values = (
    places_of(held.entries(0, held.num_entries).at[rows, :, places].set(new, mode='drop'))
    for held, new in zip(cached, (key, value), strict=True)
  )
  distance = positions[:, :, None] - jnp.arange(keys.shape[2])[None, None, :]
  may_see = (distance >= 0) & (distance < (options.window or keys.shape[2]))
  return attend_alike(query, keys, values, may_see, options)


def attend_alike(
  query: jax.Array, key: jax.Array, value: jax.Array, may_see: jax.Array, options: AttentionOptions
) -> jax.Array:
  """Returns [B, T, H, V] for queries [B, T, H, K], keys [B, G, S, K], values [B, G, S, V] and a mask [B or 1, T, S].

  S is `num_places`.
  """
  if options.bias is not None or options.has_prefix or options.even_padding:
    raise UserError('batch-invariant attention has no relative position biases, prefixes or even padding: unset them.')
  plain_options = dataclasses.replace(options, sinks=None)

  def plain(query, key, value, may_see, *sinks):
    given = dataclasses.replace(plain_options, sinks=sinks[0]) if sinks else plain_options
    return attend_to_visible(query, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), may_see, given)

  def compute(query, key, value, may_see, *sinks):
    num_rows, num_columns = query.shape[:2]
    queries, masks = (padded(x, 1, _QUERIES) for x in (query, may_see))
    queries, masks = (x.reshape(-1, 1, _QUERIES, *x.shape[2:]) for x in (queries, masks))

    def attend_tile(i, query, mask):
      of_row = lambda x: jax.lax.dynamic_index_in_dim(x, i // (len(queries) // num_rows), 0)
      return plain(query, of_row(key), of_row(value), mask, *sinks)

    attended = loop(attend_tile, queries, masks)
    return attended.reshape(num_rows, -1, *attended.shape[3:])[:, :num_columns]

  may_see = jnp.broadcast_to(may_see, (len(query), *may_see.shape[1:]))
  sinks = () if options.sinks is None else (options.sinks,)
  return alike(plain, functools.partial(on_devices, compute, 4), query, key, value, may_see, *sinks)


def places_of(x: jax.Array) -> jax.Array:
  """Returns keys or values [B, G, T, K] as [B, G, S, K], with zeros behind them."""
  longest = current_layer_scope().longest_text or x.shape[2]
  return padded(jnp.pad(x, ((0, 0), (0, 0), (0, max(longest - x.shape[2], 0)), (0, 0))), 2, _PLACES)
