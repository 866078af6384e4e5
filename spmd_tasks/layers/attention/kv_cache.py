"""KV cache: attention to keys and values that earlier calls stored, so that no token is computed twice.

A model generates text when its caller makes the collection `new_cache` mutable. Every attention then writes the keys
and values of the call's own tokens to `new_cache`, and reads those of earlier calls from the collection `cache`:

    outputs, new = model.apply({'params': weights}, prompts, mutable='new_cache')                   # prefill
    outputs, new = model.apply({'params': weights, 'cache': cache}, batch, mutable='new_cache')     # step, or a chunk

The caller writes `new` into `cache`: the token at position p of row b goes to entry [b, :, p mod S]. Done once outside
the loop over layers, the write is an update in place; if each layer returned an updated cache, every step would copy
it.

A cache with S = the number of positions never wraps around. The cache of a layer with an attention window may have
S = the window, and wraps around as a ring buffer. In both cases the batch's `segment_pos` alone determines which
position an entry holds, and entries of an earlier sequence are not read. Each row holds one sequence; rows at different
positions share one step.

Cache arrays are [B, G, S, K], heads before entries: with entries first, each step would transpose the whole cache for
the matmuls over entries.

Shapes: B batch (or slots), T tokens of this call, S cache entries, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Mapping
import math
from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._plain import masked_softmax
from spmd_tasks.layers.base import NEW_CACHE, soft_cap
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.weights import WeightBox

if TYPE_CHECKING:
  from spmd_tasks.layers.attention.relative_bias import PositionBias

CACHE = 'cache'
ENCODED = 'encoded_'  # what a cache has of an encoder's text: made by a request's first call, and read by all others


def write_new_cache(
  module: nn.Module,
  arrays: Mapping[str, jax.Array],
  split_dims: SplitDims,
  *,
  segment_ids: jax.Array | None = None,
  window: int | None = None,
) -> None:
  """Writes arrays of this call's tokens to `new_cache` as [B, G, T, K], with split dims in that order.

  If T exceeds the window, only each row's last [B, G, window, K] are written: no later token sees the others.

  Args:
    module: the attention whose collections are used.
    arrays: name, such as 'key' or 'value', to [B, T, G, K], with `split_dims`.
    split_dims: one entry per dim, or None.
    segment_ids, window: as in `attend_to_cache`.
  """
  rows, columns, heads, features = split_dims or (None,) * 4
  for name, x in arrays.items():
    num_columns = x.shape[1]
    if window is not None and num_columns > window:
      if segment_ids is None:
        lengths = jnp.full(x.shape[:1], num_columns)
      else:
        lengths = jnp.sum(segment_ids != 0, axis=1)
      kept = jnp.maximum(lengths - window, 0)[:, None] + jnp.arange(window)[None, :]
      x = jnp.take_along_axis(x, kept[:, :, None, None], axis=1)
    box = WeightBox(value=jnp.swapaxes(x, 1, 2), split_dims=(rows, heads, columns, features), tags=(), stacked=0)
    module.put_variable(NEW_CACHE, f'cached_{name}', box)


def read_cache(module: nn.Module, *names: str) -> tuple[jax.Array, ...] | None:
  """Returns the module's arrays of these names, [B, G, S, K], of earlier calls, or None in the first call."""
  if not module.has_variable(CACHE, f'cached_{names[0]}'):
    return None
  return tuple(module.get_variable(CACHE, f'cached_{name}') for name in names)


def write_encoded(
  module: nn.Module, key: jax.Array, value: jax.Array, segment_ids: jax.Array, split_dims: SplitDims
) -> None:
  """Writes keys and values [B, S, G, K] of an encoder's text, and its documents [B, S], for all later calls."""
  write_new_cache(module, {ENCODED + 'key': key, ENCODED + 'value': value}, split_dims)
  whose = {ENCODED + 'segments': segment_ids[:, :, None, None]}
  write_new_cache(module, whose, split_dims and (*split_dims[:2], None, None))


def read_encoded(module: nn.Module) -> tuple[jax.Array, ...] | None:
  """Returns what the first call has written by `write_encoded`, as [B, G, S, K]; None in the first call."""
  return read_cache(module, *(ENCODED + name for name in ('key', 'value', 'segments')))


def attend_to_cache(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  cached: tuple[jax.Array, ...],
  segment_ids: jax.Array | None,
  segment_pos: jax.Array,
  *,
  window: int | None = None,
  softmax_scale: float | None = None,
  logit_cap: float | None = None,
  sinks: jax.Array | None = None,
  bias: 'PositionBias | None' = None,
) -> jax.Array:
  """Computes causal attention of this call's tokens to earlier calls' tokens and to one another: [B, T, H, K].

  Computes as jax.nn.dot_product_attention does: logits and softmax are float32, sums of values have the values' dtype.

  Args:
    query, key, value: [B, T, H, K] and [B, T, G, K], of this call.
    cached: keys and values [B, G, S, K]; with a window S may be as small as the window.
    segment_ids: int32 [B, T], 0 for padding, which comes after the tokens. None: no padding.
    segment_pos: int32 [B, T], consecutive positions in the sequence; the cache holds the positions before the first.
      Positions of padding are ignored.
    window: how many tokens each token sees, including itself; None: all before it.
    softmax_scale: factor of the logits; None means 1 / sqrt(K).
    logit_cap: bounds the logits softly, see `soft_cap`.
    sinks: [H], see `masked_softmax`.
    bias: relative position biases.
  """
  num_rows, num_columns, num_heads, head_dim = query.shape
  num_groups = key.shape[2]
  grouped = query.reshape(num_rows, num_columns, num_groups, num_heads // num_groups, head_dim)
  cached_key, cached_value = (x.astype(key.dtype) for x in cached)
  num_entries = cached_key.shape[2]

  def logits(keys: jax.Array) -> jax.Array:
    products = jnp.einsum('BTGHK,BGSK->BGHTS', grouped, keys, preferred_element_type=jnp.float32)
    return soft_cap(products * (softmax_scale or 1.0 / math.sqrt(head_dim)), logit_cap)

  columns = jnp.arange(num_columns)
  start = segment_pos[:, :1]
  # Entry e holds the last position before the start that is e modulo S, if there is one: [B, S].
  held = start - 1 - (start - 1 - jnp.arange(num_entries)[None, :]) % num_entries
  is_before = (held >= 0)[:, None, :]  # [B, 1, S]
  distance = columns[:, None] - columns[None, :]
  may_see = (distance >= 0)[None]  # [1, T, T]
  if segment_ids is not None:
    may_see &= segment_ids[:, :, None] == segment_ids[:, None, :]
  if window is not None:
    is_before &= (start + columns[None, :])[:, :, None] - held[:, None, :] < window
    may_see &= (distance < window)[None]
  mask = jnp.concatenate(
    [
      jnp.broadcast_to(is_before, (num_rows, num_columns, num_entries)),
      jnp.broadcast_to(may_see, (num_rows, num_columns, num_columns)),
    ],
    axis=-1,
  )[:, None, None]
  # Logits are concatenated instead of keys, so that the cache is not copied.
  joined = jnp.concatenate([logits(cached_key), logits(jnp.swapaxes(key, 1, 2))], axis=-1)
  if bias is not None:
    positions = start + columns[None, :]
    added = bias.between(positions, jnp.concatenate([held, positions], axis=1))  # [B, H, T, S + T]
    joined += added.reshape(joined.shape)
  weights = masked_softmax(joined, mask, sinks).astype(value.dtype)

  def weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum('BGHTS,BGSK->BTGHK', weights, values)

  own_value = jnp.swapaxes(value, 1, 2)
  attended = weighted_sum(weights[..., :num_entries], cached_value) + weighted_sum(
    weights[..., num_entries:], own_value
  )
  return attended.reshape(query.shape)
