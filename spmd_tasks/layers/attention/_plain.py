"""The arguments of every implementation of attention, and the plain one: masks, logit caps, sinks, sums of values.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, R = H / G, K head dim, V dim of a value.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import float32_product, soft_cap
from spmd_tasks.sharding import SplitDims, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, even_spec, num_parts, spec_axes

if TYPE_CHECKING:
  from spmd_tasks.layers.attention.positions import PositionBias

BLOCK = 256  # queries whose scores are in memory at a time, by the implementations that limit them

# The `checkpoint_name` of what the forward pass saves for the backward pass: results and softmax denominators.
ATTENTION_NAME = 'attention'


class Heads(NamedTuple):
  """Queries, and the keys and values that they attend to.

  Attributes:
    query, key, value: [B, T, H, K], [B, S, G, K] and [B, S, G, V].
    segment_ids, key_segments: int32 [B, T] and [B, S], the documents; None: one document per row.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  segment_ids: jax.Array | None
  key_segments: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
  """How an attention compares queries and keys.

  Attributes:
    causal: whether a token sees only itself and earlier tokens.
    window: how many tokens of its document a token sees, including itself; None: all.
    chunk: a token sees only earlier tokens of its chunk of the document. Segment ids separate the chunks of a call
      (`split_into_chunks`), so only generation, whose cache has no segment ids, reads it.
    softmax_scale: factor of the logits; None: 1 / sqrt(K).
    logit_cap: caps the logits softly, see `soft_cap`.
    sinks: [H], see `_attend`.
    bias: relative position biases, added to the logits.
    has_prefix: whether segment ids are 2 * document, + 1 for a token of the document's prefix.
    even_padding: whether padding, segment 0, attends evenly to all tokens instead of to other padding.
    gradient_keys: see `Attention`; only 'splash' uses it.
  """

  causal: bool = True
  window: int | None = None
  chunk: int | None = None
  softmax_scale: float | None = None
  logit_cap: float | None = None
  sinks: jax.Array | None = None
  bias: 'PositionBias | None' = None
  has_prefix: bool = False
  even_padding: bool = False
  gradient_keys: int | None = None

  def scale(self, head_dim: int) -> float:
    """Returns the factor of the logits for K features."""
    return self.softmax_scale or 1.0 / math.sqrt(head_dim)

  def num_visible(self, positions: jax.Array) -> jax.Array | int | None:
    """Returns how many tokens a query at these positions [...] sees at most, including itself; None: all."""
    return self.window if self.chunk is None else positions % self.chunk + 1


_MOST_CHUNKS = 2**15  # of a document, so that ids of chunks of 2**15 documents fit in int32


def split_into_chunks(segment_ids: jax.Array | None, segment_pos: jax.Array, chunk: int) -> jax.Array:
  """Returns segment ids int32 [B, T] that separate the chunks of each document; padding keeps 0.

  Args:
    segment_ids: int32 [B, T], the documents; None: one per row.
    segment_pos: int32 [B, T], the position in the document.
    chunk: the length of a chunk in tokens.
  """
  if segment_ids is None:
    segment_ids = jnp.ones_like(segment_pos)
  chunks = segment_ids.astype(jnp.int32) * _MOST_CHUNKS + segment_pos // chunk % _MOST_CHUNKS
  return jnp.where(segment_ids == 0, 0, chunks)


def check_gradient_keys(gradient_keys: int | None) -> None:
  """Raises a UserError if an attention layer's `gradient_keys` is not a positive multiple of 1024."""
  if gradient_keys is not None and (gradient_keys < 1 or gradient_keys % 1024):
    raise UserError(f'gradient_keys={gradient_keys} must be a positive multiple of 1024, or None for two kernels.')


Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayout:
  """The mesh axes, of more than one device, that split B, T and H of queries, and the numbers of parts."""

  rows: Axes = ()
  tokens: Axes = ()
  heads: Axes = ()
  num_rows: int = 1
  num_tokens: int = 1
  num_heads: int = 1


def attention_layout(split_dims: SplitDims, num_rows: int) -> AttentionLayout:
  """Returns how the current mesh and axis rules split queries with these split dims; outside a scope, they do not."""
  scope = current_sharding_scope()
  if scope is None or split_dims is None:
    return AttentionLayout()
  sizes = scope.mesh.shape
  spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
  first, *others = spec_axes(spec, 4)
  (even,) = spec_axes(even_spec(PartitionSpec(first), (num_rows,), sizes), 1)
  rows, tokens, heads, _ = (tuple(axis for axis in axes if sizes[axis] > 1) for axes in (even, *others))
  return AttentionLayout(
    rows=rows,
    tokens=tokens,
    heads=heads,
    num_rows=num_parts(rows, sizes),
    num_tokens=num_parts(tokens, sizes),
    num_heads=num_parts(heads, sizes),
  )


def attend_plainly(heads: Heads, options: AttentionOptions) -> jax.Array:
  """Computes `attend` with the scores of all queries in memory."""
  columns, key_columns = jnp.arange(heads.query.shape[1]), jnp.arange(heads.key.shape[1])
  may_see = visible(columns, key_columns, heads.segment_ids, heads.key_segments, options)
  bias = None if options.bias is None else options.bias.between(columns, key_columns)
  return attend_to_visible(heads.query, heads.key, heads.value, may_see, options, bias)


def visible(
  query_columns: jax.Array,
  key_columns: jax.Array,
  query_segments: jax.Array | None,
  key_segments: jax.Array | None,
  options: AttentionOptions,
) -> jax.Array:
  """Returns the mask [B or 1, T, S]: true where a query may see a key.

  Padding (segment 0) attends only to padding. Every query then has a key, so its softmax is finite, and no token of a
  document attends to padding. Columns, int32 [T] and [S], are the places in the row; segments, int32 [B, T] and [B, S],
  the documents, or None for one per row.
  """
  distance = query_columns[:, None] - key_columns[None, :]
  in_order = (distance >= 0)[None]
  may_see = jnp.ones((1, *distance.shape), bool)
  if query_segments is not None and key_segments is not None:
    if options.has_prefix:
      in_order |= ((query_segments & 1)[:, :, None] & (key_segments & 1)[:, None, :]) == 1
      query_segments, key_segments = query_segments >> 1, key_segments >> 1
    may_see = query_segments[:, :, None] == key_segments[:, None, :]
    if options.even_padding:
      may_see &= (query_segments != 0)[:, :, None]
  if options.causal:
    may_see &= in_order
  if options.window is not None:
    may_see &= (distance < options.window)[None]
  return may_see


def attend_to_visible(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  may_see: jax.Array,
  options: AttentionOptions,
  bias: jax.Array | None = None,
) -> jax.Array:
  """Returns [B, T, H, V]: the values [B, S, G, V] weighted by queries [B, T, H, K] and keys [B, S, G, K].

  The mask `may_see` is bool [B or 1, T, S]; `bias`, float32 [H, T, S], is added to the logits.
  """
  num_rows, length, num_heads, head_dim = query.shape
  # Heads come before tokens in all products. If tokens came first, `einsum` would compute [V, T] or [S, T], for which
  # XLA's CPU compiler transposes the attention weights, the largest arrays here.
  queries = jnp.moveaxis(query.reshape(num_rows, length, key.shape[2], -1, head_dim), 1, 3)
  keys, values, sinks = jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2), options.sinks
  if bias is not None:
    bias = bias.reshape(1, *queries.shape[1:3], *bias.shape[1:])
  if sinks is not None:
    sinks = sinks.astype(jnp.float32).reshape(1, *queries.shape[1:3], 1, 1)
  scale, cap = options.scale(head_dim), options.logit_cap
  attended = _attend(queries, keys, values, bias, sinks, may_see[:, None, None], scale, cap)
  return jnp.moveaxis(attended, 3, 1).reshape(num_rows, length, num_heads, value.shape[-1])


def _products(queries: jax.Array, keys: jax.Array) -> jax.Array:
  """Returns float32 [B, G, R, T, S] for queries [B, G, R, T, K] and keys [B, G, S, K]."""
  return float32_product('BGRTK,BGSK->BGRTS')(queries, keys)


def _logits(
  queries: jax.Array, keys: jax.Array, bias: jax.Array | None, may_see: jax.Array, scale: float, cap: float | None
) -> tuple[jax.Array, jax.Array]:
  """Returns logits, float32 [B, G, R, T, S]: capped ones, and with the bias and -1e30 where the mask is false."""
  # A loop over layers has one mask. XLA would broadcast it to the shape of the logits before the loop, and keep that.
  may_see, lowest, queries = jax.lax.optimization_barrier((may_see, jnp.float32(-1e30), queries))
  logits = soft_cap(_products(queries, keys) * scale, cap)
  return logits, jnp.where(may_see, logits if bias is None else logits + bias, lowest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  bias: jax.Array | None,
  sinks: jax.Array | None,
  may_see: jax.Array,
  scale: float,
  cap: float | None,
) -> jax.Array:
  """Returns the sums of values [B, G, S, V], weighted by a softmax over S: [B, G, R, T, V].

  A query that sees nothing has equal weights on all keys. Sinks, float32 [1, G, R, 1, 1], add a logit per head, whose
  share of the softmax is dropped, so that a head may attend to nothing (StreamingLLM: Xiao et al., 2024; gpt-oss:
  2025).

  The backward pass computes the weights again instead of keeping them. The gradient of a softmax needs, for each query,
  the sum over S of weights times their cotangents. It equals the sum over V of results times their cotangents, which
  are far smaller (Dao et al., 2022: FlashAttention). The result of a query that sees nothing, the mean of all values,
  has no gradient with respect to queries and keys.
  """
  return _attend_forward(queries, keys, values, bias, sinks, may_see, scale, cap)[0]


def _attend_forward(queries, keys, values, bias, sinks, may_see, scale, cap):
  _, logits = _logits(queries, keys, bias, may_see, scale, cap)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  highest = highest if sinks is None else jnp.maximum(highest, sinks)
  weights = jnp.exp(logits - highest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  total = total if sinks is None else total + jnp.exp(sinks - highest)
  attended = float32_product('BGRTS,BGSV->BGRTV')(weights.astype(values.dtype), values) / total
  attended = attended.astype(values.dtype)
  # Two numbers per query: the sum of the logarithm and -1e30, of a query that sees nothing, would be -1e30.
  attended, highest, total = (checkpoint_name(x, ATTENTION_NAME) for x in (attended, highest, total))
  return attended, (queries, keys, values, bias, sinks, may_see, attended, highest, total)


def _attend_backward(scale, cap, saved, cotangent):
  queries, keys, values, bias, sinks, may_see, attended, highest, total = saved
  capped, logits = _logits(queries, keys, bias, may_see, scale, cap)
  weights = jnp.exp(logits - highest)  # times `total`, by which the smaller factors are divided
  cotangent = cotangent.astype(jnp.float32) / total
  # A query that sees keys has weight 0 on all others. The weights of a query that sees none do not depend on logits.
  seeing = jnp.where(_sees_keys(may_see), cotangent, 0)
  sums = jnp.sum(attended.astype(jnp.float32) * seeing, axis=-1, keepdims=True)
  logits_cotangent = weights * (_products(seeing.astype(values.dtype), values) - sums)
  bias_cotangent = None if bias is None else jnp.sum(logits_cotangent, axis=0, keepdims=True)
  sinks_cotangent = None
  if sinks is not None:
    sinks_cotangent = -jnp.sum(jnp.exp(sinks - highest) * sums, axis=(0, 3, 4), keepdims=True)
  if cap is not None:
    logits_cotangent *= 1.0 - jnp.square(capped / cap)
  products_cotangent = (logits_cotangent * scale).astype(queries.dtype)
  # As [K, S] and [V, S], the larger factor need not be transposed.
  keys_cotangent = jnp.einsum('BGRTK,BGRTS->BGKS', queries, products_cotangent)
  values_cotangent = jnp.einsum('BGRTV,BGRTS->BGVS', cotangent.astype(values.dtype), weights.astype(values.dtype))
  queries_cotangent = jnp.einsum('BGRTS,BGSK->BGRTK', products_cotangent, keys)
  keys_cotangent, values_cotangent = keys_cotangent.swapaxes(2, 3), values_cotangent.swapaxes(2, 3)
  return queries_cotangent, keys_cotangent, values_cotangent, bias_cotangent, sinks_cotangent, None


_attend.defvjp(_attend_forward, _attend_backward)


def _sees_keys(may_see: jax.Array) -> jax.Array:
  """Returns bool [B or 1, 1, 1, T, 1]: whether a query sees any key."""
  return jnp.any(may_see, axis=-1, keepdims=True)
