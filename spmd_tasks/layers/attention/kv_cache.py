"""Attention to a cache of keys and values: what a token needs of those before it, so that none is computed twice.

A model generates text when its caller makes the collection `new_cache` mutable: every attention leaves there the keys
and values of the call's own tokens. Those of earlier calls it finds in the collection `cache`, which it only reads:

    outputs, new = model.apply({'params': weights}, prompts, mutable='new_cache')                   # prefill
    outputs, new = model.apply({'params': weights, 'cache': cache}, batch, mutable='new_cache')     # step, or a chunk

The caller writes `new` into `cache`, the token at position p of row b to place [b, :, p mod S]. Outside of the loop
over layers that is one update in place, while a cache that each layer returned would be copied once per step.

A cache with a place for every position never wraps around. One of a layer with an attention window need not be longer
than the window and does: it is a ring. Either way the batch's `segment_pos` alone says which position a place holds,
and what an earlier sequence left there is not read. Each row holds one sequence; rows at different positions go through
one step together.

In the cache heads come before places, as the products over places want them: with places first, each step would
transpose all of it.

Shapes: B batch (or slots), T tokens of this call, S places, H query heads, G key/value heads, K head dim.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.sharding.specs import SplitDims
from spmd_tasks.sharding.weights import WeightBox

CACHE = 'cache'
NEW_CACHE = 'new_cache'


def is_decoding(module: nn.Module) -> bool:
  """Whether the caller generates text: it wants `new_cache`."""
  return module.is_mutable_collection(NEW_CACHE) and not module.is_initializing()


def leave_new_cache(
  module: nn.Module,
  key: jax.Array,
  value: jax.Array,
  split_dims: SplitDims,
  *,
  segment_ids: jax.Array | None = None,
  window: int | None = None,
) -> None:
  """Leaves keys and values of this call's tokens in `new_cache` as [B, G, T, K], with split dims in that order.

  Of more tokens than the window, each row's last [B, G, window, K] are left: no later token sees the others.

  Args:
    module: whose collections they are.
    key, value: [B, T, G, K], with `split_dims`.
    segment_ids, window: as in `attend_to_cache`.
  """
  num_columns = key.shape[1]
  if window is not None and num_columns > window:
    if segment_ids is None:
      lengths = jnp.full(key.shape[:1], num_columns)
    else:
      lengths = jnp.sum(segment_ids != 0, axis=1)
    kept = jnp.maximum(lengths - window, 0)[:, None] + jnp.arange(window)[None, :]
    key, value = (jnp.take_along_axis(x, kept[:, :, None, None], axis=1) for x in (key, value))
  rows, columns, heads, features = split_dims or (None,) * key.ndim
  for name, x in (('key', key), ('value', value)):
    box = WeightBox(value=jnp.swapaxes(x, 1, 2), split_dims=(rows, heads, columns, features), tags=(), stacked=0)
    module.put_variable(NEW_CACHE, f'cached_{name}', box)


def read_cache(module: nn.Module) -> tuple[jax.Array, jax.Array] | None:
  """The module's keys and values [B, G, S, K] of earlier calls; None where this is the first."""
  if not module.has_variable(CACHE, 'cached_key'):
    return None
  return module.get_variable(CACHE, 'cached_key'), module.get_variable(CACHE, 'cached_value')


def attend_to_cache(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  cached: tuple[jax.Array, jax.Array],
  segment_ids: jax.Array | None,
  segment_pos: jax.Array,
  *,
  window: int | None = None,
) -> jax.Array:
  """Causal attention of this call's tokens to those of earlier calls and to one another: [B, T, H, K].

  As jax.nn.dot_product_attention over both: logits and softmax are float32, sums of values have the values' dtype.

  Args:
    query, key, value: [B, T, H, K] and [B, T, G, K], of this call.
    cached: keys and values [B, G, S, K]; with a window S may be as little as that.
    segment_ids: int32 [B, T], 0 for padding, which stands behind the tokens. None: there is no padding.
    segment_pos: int32 [B, T], positions in the sequence, one after another: the cache holds those before the first.
      Those of padding mean nothing.
    window: how many tokens each sees, itself included; None: all that are before it.
  """
  num_rows, num_columns, num_heads, head_dim = query.shape
  num_groups = key.shape[2]
  grouped = query.reshape(num_rows, num_columns, num_groups, num_heads // num_groups, head_dim)
  cached_key, cached_value = (x.astype(key.dtype) for x in cached)
  num_places = cached_key.shape[2]

  def logits(keys: jax.Array) -> jax.Array:
    products = jnp.einsum('BTGHK,BGSK->BGHTS', grouped, keys, preferred_element_type=jnp.float32)
    return products / math.sqrt(head_dim)

  columns = jnp.arange(num_columns)
  start = segment_pos[:, :1]
  # Place p holds the last position before the start that is p modulo S, if there is one: [B, S].
  held = start - 1 - (start - 1 - jnp.arange(num_places)[None, :]) % num_places
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
      jnp.broadcast_to(is_before, (num_rows, num_columns, num_places)),
      jnp.broadcast_to(may_see, (num_rows, num_columns, num_columns)),
    ],
    axis=-1,
  )[:, None, None]
  # Logits are joined, not keys, so that the cache is not copied.
  joined = jnp.concatenate([logits(cached_key), logits(jnp.swapaxes(key, 1, 2))], axis=-1)
  weights = jax.nn.softmax(jnp.where(mask, joined, -jnp.inf), axis=-1).astype(value.dtype)

  def read(weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum('BGHTS,BGSK->BTGHK', weights, values)

  own_value = jnp.swapaxes(value, 1, 2)
  attended = read(weights[..., :num_places], cached_value) + read(weights[..., num_places:], own_value)
  return attended.reshape(query.shape)
