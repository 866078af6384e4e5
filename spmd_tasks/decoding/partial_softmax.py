"""A softmax over some of the keys, to which others are added: the running softmax of Milakov and Gimelshein (2018).

    softmax = softmax_of(queries.logits(keys, positions, may_see), values)
    softmax = extend_softmax(softmax, queries.logits(more_keys, more_positions, may_see_more), more_values)
    _, total, attended = softmax      # the result is attended / total

Logits, softmax and sums of values are float32.

Shapes: B rows, T queries of each, S keys, H query heads, G key/value heads, R = H / G, K head dim, V dim of a value.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention import AttentionOptions
from spmd_tasks.layers.base import soft_cap

_UNSEEN = -1e30

# A softmax over some keys: the highest logit and the sum of exp(logit - highest), both [B, G, R, T, 1], and the sum of
# the values with these weights, [B, G, R, T, V]. The result is the quotient of the last two.
PartialSoftmax = tuple[jax.Array, jax.Array, jax.Array]


class Queries(NamedTuple):
  """The queries of a call.

  Attributes:
    array: [B, G, R, T, K].
    positions: int32 [B, T], consecutive positions in the text.
    options: the window, the scale, and so on.
  """

  array: jax.Array
  positions: jax.Array
  options: AttentionOptions

  @property
  def start(self) -> jax.Array:
    """The number of tokens that earlier calls have read, int32 [B, 1]."""
    return self.positions[:, :1]

  @property
  def num_visible(self) -> jax.Array | int | None:
    """How many tokens each query sees at most, including itself: [B, T, 1] or a number; None: all."""
    return self.options.num_visible(self.positions[:, :, None])

  def logits(self, keys: jax.Array, key_positions: jax.Array, may_see: jax.Array) -> jax.Array:
    """Returns [B, G, R, T, S] for keys [B, G, S, K] at positions int32 [B, S]; `may_see` is bool [B or 1, T, S]."""
    products = jnp.einsum('BGRTK,BGSK->BGRTS', self.array, keys, preferred_element_type=jnp.float32)
    logits = soft_cap(products * self.options.scale(self.array.shape[-1]), self.options.logit_cap)
    if self.options.bias is not None:
      logits += self.options.bias.between(self.positions, key_positions).reshape(logits.shape)
    return jnp.where(may_see[:, None, None], logits, _UNSEEN)


def softmax_of(logits: jax.Array, values: jax.Array, sinks: jax.Array | None = None) -> PartialSoftmax:
  """Returns the softmax of logits [B, G, R, T, S] over S, with values [B, G, S, V] and sinks [H].

  A query that sees no key has the lowest logit, so that its weights become 0 once other keys are added.
  """
  highest = jnp.max(logits, axis=-1, keepdims=True)
  total = jnp.zeros_like(highest)
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, logits.shape[1], -1, 1, 1)
    highest = jnp.maximum(highest, sink)
    total = jnp.exp(sink - highest)
  weights = jnp.exp(logits - highest)
  return highest, total + jnp.sum(weights, axis=-1, keepdims=True), _weighted_sum(weights, values)


def extend_softmax(softmax: PartialSoftmax, logits: jax.Array, values: jax.Array) -> PartialSoftmax:
  """Adds logits [B, G, R, T, S] and values [B, G, S, V] to a softmax."""
  highest, total, attended = softmax
  higher = jnp.maximum(highest, jnp.max(logits, axis=-1, keepdims=True))
  factor, weights = jnp.exp(highest - higher), jnp.exp(logits - higher)
  total = total * factor + jnp.sum(weights, axis=-1, keepdims=True)
  return higher, total, attended * factor + _weighted_sum(weights, values)


def merge(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
  """Returns the softmax over the keys of both."""
  highest = jnp.maximum(one[0], other[0])
  factors = jnp.exp(one[0] - highest), jnp.exp(other[0] - highest)
  total, attended = (x * factors[0] + y * factors[1] for x, y in zip(one[1:], other[1:], strict=True))
  return highest, total, attended


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
  return jnp.einsum('BGRTS,BGSV->BGRTV', weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
