"""Attention for a block of queries at a time, so that only their scores are in memory, [B, H, block, S].

Each block's softmax is over all its keys at once: the results differ from the plain computation only by rounding. The
backward pass recomputes a block's scores (Rabe and Staats, 2021, "Self-attention does not need O(n^2) memory"). With a
window, a block reads only the keys within its reach.

Shapes: as in _plain.py; N blocks, C queries of a block.
"""

import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._plain import (
  ATTENTION_NAME,
  BLOCK,
  AttentionOptions,
  Heads,
  attend_to_visible,
  visible,
)


def attend_blockwise(
  heads: Heads,
  options: AttentionOptions,
  *,
  block: int = BLOCK,
  first_column: jax.Array | int = 0,
) -> jax.Array:
  """Computes `attend` for `block` queries, C, at a time.

  There may be fewer queries than keys; `first_column` is the first query's place among them.
  """
  query, key, value, segment_ids, key_segments = heads
  num_rows, length, num_heads, _ = query.shape
  window = options.window
  total = key.shape[1]
  block = min(block, length)
  num_blocks = -(-length // block)
  added = num_blocks * block - length
  reach = 0 if window is None else min(window - 1, total)  # how many keys before its own a block of queries reads
  num_keys = total if window is None else block + reach
  if window is not None:
    key, value = (_pad(x, reach, added) for x in (key, value))
    key_segments = None if key_segments is None else _pad(key_segments, reach, added)

  def attend_block(
    index: jax.Array, queries: jax.Array, query_segments: jax.Array | None, key: jax.Array, value: jax.Array
  ) -> jax.Array:
    first = first_column + index * block
    columns, start = first + jnp.arange(block), jnp.zeros_like(first)
    keys, values, segments = key, value, key_segments
    if window is not None:  # column c of the row is at c + reach of the padded keys
      start = first - reach
      keys, values = (jax.lax.dynamic_slice_in_dim(x, first, num_keys, axis=1) for x in (key, value))
      segments = None if segments is None else jax.lax.dynamic_slice_in_dim(segments, first, num_keys, axis=1)
    key_columns = start + jnp.arange(num_keys)
    may_see = visible(columns, key_columns, query_segments, segments, options)
    may_see &= ((key_columns >= 0) & (key_columns < total))[None, None, :]
    # Queries that fill the last block see every key: a softmax of nothing would be NaN, and so would its gradient.
    may_see |= (columns >= first_column + length)[None, :, None]
    bias = None if options.bias is None else options.bias.between(columns, key_columns)
    return attend_to_visible(queries, keys, values, may_see, options, bias)

  # Results and softmax denominators are saved; the backward pass computes a block's weights once from them.
  policy = jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME)
  attend_block = jax.checkpoint(attend_block, prevent_cse=False, policy=policy)
  queries = _blocks(_pad(query, 0, added), num_blocks)
  if segment_ids is None:
    attended = jax.lax.map(lambda xs: attend_block(*xs, None, key, value), (jnp.arange(num_blocks), queries))
  else:
    query_segments = _blocks(_pad(segment_ids, 0, added), num_blocks)
    attended = jax.lax.map(lambda xs: attend_block(*xs, key, value), (jnp.arange(num_blocks), queries, query_segments))
  attended = jnp.moveaxis(attended, 0, 1).reshape(num_rows, num_blocks * block, num_heads, value.shape[-1])
  return attended[:, :length]


def _pad(x: jax.Array, before: int, after: int) -> jax.Array:
  """Pads the sequence, dim 1, with zeros."""
  return jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])


def _blocks(x: jax.Array, num_blocks: int) -> jax.Array:
  """Returns [N, B, C, ...] for x [B, N * C, ...]."""
  return jnp.moveaxis(x.reshape(x.shape[0], num_blocks, -1, *x.shape[2:]), 1, 0)
