"""Attention to pages of rows that are tokens of one text, as those of a step that checks drafts: once for each text.

A text's rows are queries of one call of the kernel, which so reads the text's blocks once. What each of them sees of
the rows before it, whose keys and values are not in the cache yet, is added.

Shapes: R rows, n texts, T tokens of each at most, k = T - 1; G, Q, K, V and M as in _paged.py, where Q is H / G.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._paged import Partial, attend_to_pages, merged
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.base import soft_cap
from spmd_tasks.sharding import SplitDims


def attend_by_text(
  drafts: Any,
  query: jax.Array,
  new: tuple[jax.Array, jax.Array],
  cached: tuple[Any, ...],
  start: jax.Array,
  options: AttentionOptions,
  split_dims: SplitDims,
  kv_split_dims: SplitDims,
) -> Partial | None:
  """Computes attend_to_pages for queries [R, G, Q, K] of tokens with keys and values `new` [R, 1, G, K].

  `drafts` (LayerScope.cache_drafts) says whose these are, and `start` int32 [R] are their positions.
  """
  (num_rows, num_groups, num_heads, _), tables = query.shape, drafts.tables_of_texts(cached[0].tables)
  (num_parts, of_part, _), num_columns = tables.shape, drafts.rows.shape[1]
  num_texts = num_parts * of_part  # with padding
  rows = jnp.pad(drafts.rows, ((0, num_texts - len(drafts.rows)), (0, 0)), constant_values=num_rows)

  def take(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns x[numbers], each of its own part: a mesh that splits these moves nothing."""
    parts = x.reshape(num_parts, -1, *x.shape[1:])
    numbers_in_part = numbers.reshape(num_parts, -1) % parts.shape[1]
    return jax.vmap(lambda part, each: part[each])(parts, numbers_in_part).reshape(*numbers.shape, *x.shape[1:])

  first = jnp.where(rows[:, 0] < num_rows, take(start, rows[:, 0]), 0)
  queries = jnp.moveaxis(take(query, rows), 1, 3).reshape(num_texts, num_groups, num_heads * num_columns, -1)
  of_texts = tuple(each._replace(tables=tables, num_rows=num_texts) for each in cached)
  found = attend_to_pages(queries, of_texts, first, options, num_columns, split_dims, kv_split_dims)
  if found is None:
    return None
  by_columns = (jnp.moveaxis(x.reshape(num_texts, num_groups, num_heads, num_columns, -1), 3, 1) for x in found)
  places = drafts.owners * num_columns + drafts.columns
  of_pages: Any = tuple(take(x.reshape(-1, *x.shape[2:]), places) for x in by_columns)

  keys, values = (take(held.as_read(x[:, 0]), drafts.earlier) for held, x in zip(cached, new, strict=True))
  may_see = drafts.earlier < num_rows
  if options.window is not None:
    may_see &= jnp.arange(1, num_columns)[None, :] < options.window
  may_see = may_see[:, None, None, :]
  logits = jnp.einsum('RGQK,RkGK->RGQk', query, keys, preferred_element_type=jnp.float32)
  logits = soft_cap(logits * options.scale(query.shape[-1]), options.logit_cap)
  highest = jnp.max(jnp.where(may_see, logits, -1e30), axis=-1, keepdims=True)
  weights = jnp.where(may_see, jnp.exp(logits - highest), 0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights.astype(values.dtype)
  attended = jnp.einsum('RGQk,RkGV->RGQV', weights, values, preferred_element_type=jnp.float32)
  return merged(of_pages, (highest, total, attended))
