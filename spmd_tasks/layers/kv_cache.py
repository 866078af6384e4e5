"""The key/value cache of attention: what a token needs of those before it, so that none is computed twice.

A module decodes when its caller makes the collection `cache` mutable:

    _, cache = model.apply({'params': weights}, prompts, mutable='cache')                         # prefill
    outputs, cache = model.apply({'params': weights, **cache}, next_tokens, mutable='cache')      # step, or a chunk

Position is place: the token at position p of row b has its key and value at [b, p], so that the batch's `segment_pos`
alone says where to write and what may be read. What an earlier sequence left behind the last token of a row is never
read. Each row holds one sequence; rows at different positions go through one step together.

Shapes: B batch (or slots), T tokens of this call, S positions, G key/value heads, K head dim.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.sharding.specs import SplitDims, constrain
from spmd_tasks.sharding.weights import WeightBox

CACHE = 'cache'


def is_decoding(module: nn.Module) -> bool:
  """Whether the caller generates text: it keeps the collection `cache`."""
  return module.is_mutable_collection(CACHE) and not module.is_initializing()


def attend_to_cache(
  module: nn.Module,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  segment_pos: jax.Array | None,
  split_dims: SplitDims,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
  """Writes keys and values [B, T, G, K] to the module's cache.

  Args:
    module: an attention; its cache is `cached_key` and `cached_value`, [B, S, G, K] each.
    key, value: of the tokens of this call.
    segment_ids: int32 [B, T]; tokens of segment 0 are padding and not written. None: there is no padding.
    segment_pos: int32 [B, T], the position of each token in its sequence, less than S.
    split_dims: of the cache, those of `key`.

  Returns:
    (keys [B, S, G, K], values, mask bool [B, 1, T, S]), or None where there is no cache yet: the tokens of this call
    are then all there is, and become the cache, S = T.

  Raises:
    ValueError: segment_pos is missing.
  """
  if segment_pos is None:
    raise ValueError('a cache of keys and values needs segment_pos, the position of each token: pass it.')
  if not module.has_variable(CACHE, 'cached_key'):
    for name, x in (('cached_key', key), ('cached_value', value)):
      box = WeightBox(value=x, split_dims=tuple(split_dims or (None,) * x.ndim), tags=(), stacked=0)
      module.put_variable(CACHE, name, box)
    return None

  def write(name: str, x: jax.Array) -> jax.Array:
    cached: jax.Array = module.get_variable(CACHE, name)
    place = segment_pos if segment_ids is None else jnp.where(segment_ids == 0, cached.shape[1], segment_pos)
    # Row by row, which keeps the batch dim split; a place outside of the cache is not written.
    cached = jax.vmap(lambda row, at, new: row.at[at].set(new, mode='drop'))(cached, place, x.astype(cached.dtype))
    cached = constrain(cached, split_dims)
    module.put_variable(CACHE, name, cached)
    return cached

  keys, values = write('cached_key', key), write('cached_value', value)
  places = jnp.arange(keys.shape[1], dtype=segment_pos.dtype)
  return keys, values, (places[None, None, :] <= segment_pos[:, :, None])[:, None]
