"""The plain computation of attention: masks, capped logits, sinks, and the weighted sum of values.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, K head dim, V dim of a value.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._options import AttentionOptions
from spmd_tasks.layers.base import soft_cap


def segment_mask(segment_ids: jax.Array) -> jax.Array:
  """Returns the mask of packed text, bool [B, 1, T, T]: true where query and key belong to the same document.

  Padding (segment 0) attends to padding only. Every query then has a key, so its softmax is finite, and no token of a
  document reads padding.
  """
  return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def attend_plainly(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  options: AttentionOptions,
  *,
  implementation: Literal['xla', 'cudnn'] = 'xla',
) -> jax.Array:
  """Computes `attend`; what `jax.nn.dot_product_attention` can compute, by it."""
  if options.logit_cap is None and options.sinks is None and key.shape == value.shape:
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      mask=None if segment_ids is None else segment_mask(segment_ids),
      scale=options.softmax_scale,
      is_causal=options.causal,
      # Documents are contiguous, so the distance of two columns is the distance within the document.
      local_window_size=None if options.window is None else (options.window - 1, 0),
      implementation=implementation,
    )
  columns = jnp.arange(query.shape[1])
  may_see = visible(columns, columns, segment_ids, segment_ids, options)
  return attend_to_visible(query, key, value, may_see, options)


def visible(
  query_columns: jax.Array,
  key_columns: jax.Array,
  query_segments: jax.Array | None,
  key_segments: jax.Array | None,
  options: AttentionOptions,
) -> jax.Array:
  """Returns the mask [B or 1, T, S]: true where a query may see a key.

  Args:
    query_columns, key_columns: int32 [T] and [S], the places in the row.
    query_segments, key_segments: int32 [B, T] and [B, S], the documents; None: one document per row.
    options: of which `causal` and `window` count.
  """
  distance = query_columns[:, None] - key_columns[None, :]
  may_see = jnp.ones((1, *distance.shape), bool)
  if query_segments is not None and key_segments is not None:
    may_see = query_segments[:, :, None] == key_segments[:, None, :]
  if options.causal:
    may_see &= (distance >= 0)[None]
  if options.window is not None:
    may_see &= (distance < options.window)[None]
  return may_see


def attend_to_visible(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  may_see: jax.Array,
  options: AttentionOptions,
) -> jax.Array:
  """Returns [B, T, H, V]: the values [B, S, G, V] weighted by queries [B, T, H, K] and keys [B, S, G, K].

  The mask `may_see` is bool [B or 1, T, S].
  """
  num_rows, length, num_heads, head_dim = query.shape
  grouped = query.reshape(num_rows, length, key.shape[2], num_heads // key.shape[2], head_dim)
  logits = jnp.einsum('BTGHK,BSGK->BGHTS', grouped, key, preferred_element_type=jnp.float32)
  logits = soft_cap(logits * options.scale(head_dim), options.logit_cap)
  weights = masked_softmax(logits, may_see[:, None, None], options.sinks).astype(value.dtype)
  attended = jnp.einsum('BGHTS,BSGV->BTGHV', weights, value)
  return attended.reshape(num_rows, length, num_heads, value.shape[-1])


def masked_softmax(logits: jax.Array, mask: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
  """Returns the softmax over S, float32, of the logits where the mask is true, and 0 elsewhere.

  Args:
    logits: float32 [B, G, H/G, T, S].
    mask: bool, of a shape that broadcasts to that of the logits.
    sinks: [H], one more logit per head, whose share of the softmax is dropped, so that a head may attend to nothing
      (StreamingLLM: Xiao et al., 2024; gpt-oss: 2025). None: no such logit.
  """
  masked = jnp.where(mask, logits, -jnp.inf)
  if sinks is None:
    return jax.nn.softmax(masked, axis=-1)
  sink = sinks.astype(jnp.float32).reshape(1, *logits.shape[1:3], 1, 1)
  highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), sink))
  weights = jnp.exp(masked - highest)
  return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest))
