"""Positions that are added: learned or sinusoidal vectors to embeddings, biases to attention logits.

There is one bias per head and bucket of distances (T5): near distances have a bucket each, far ones share buckets that
grow with the logarithm of the distance. Rotary positions are in rotary.py.

Shapes: B batch, T sequence, D model; H query heads, N buckets, T queries, S keys; `...` rows, or none. `positions` is
int32 [B, T] and counts from 0 within each packed document (the batch's `segment_pos`).
"""

import math
from typing import Any

from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import declare_weight
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import Initializer


class LearnedPositions(nn.Module, kw_only=True):
  """Adds a learned vector per position to x [B, T, D] (Gehring et al., 2017; GPT-2). Weight: `table` [max_len, D].

  Fields:
    max_len: the number of positions.
    dtype: of the output.
    table_init: initializer of the table.
    split_dims, activation_split_dims: of the table, and of the output.
  """

  max_len: int
  dtype: Any = 'float32'
  table_init: Initializer = jax.nn.initializers.normal(0.02)
  split_dims: SplitDims = (None, 'embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x plus the vector of each position, NaN outside the table. Raises a UserError if T exceeds `max_len`."""
    if x.shape[1] > self.max_len:
      raise UserError(
        f'a sequence of length {x.shape[1]} exceeds the max_len={self.max_len} learned positions: raise max_len or '
        'shorten the input.'
      )
    shape = (self.max_len, x.shape[-1])
    table = declare_weight(
      self, 'table', shape=shape, init=self.table_init, split_dims=self.split_dims, num_input_dims=0
    )
    vectors = jnp.take(table, positions, axis=0, mode='fill', fill_value=jnp.nan)
    return constrain(x.astype(self.dtype) + vectors.astype(self.dtype), self.activation_split_dims)


class SinusoidalPositions(nn.Module, kw_only=True):
  """Adds sines and cosines of the position to x [B, T, D] (Vaswani et al., 2017). Has no weights.

  Feature i < D/2 is the sine of position / max_timescale^(i / (D/2 - 1)), feature i + D/2 its cosine, as in
  Tensor2Tensor and Pax; an odd D ends in a zero.

  Fields:
    max_timescale: sets the slowest wave.
    dtype, activation_split_dims: of the output.
  """

  max_timescale: float = 10_000.0
  dtype: Any = 'float32'
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x plus the vector of each position."""
    num_waves = x.shape[-1] // 2
    exponents = jnp.arange(num_waves, dtype=jnp.float32) / max(1, num_waves - 1)
    angles = positions[:, :, None].astype(jnp.float32) * self.max_timescale ** -exponents[None, None, :]
    vectors = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, x.shape[-1] % 2)))
    return constrain(x.astype(self.dtype) + vectors.astype(self.dtype), self.activation_split_dims)


class PositionBias(struct.PyTreeNode):
  """The biases of a RelativePositionBias, `table` float32 [H, N], which attention adds to its logits."""

  table: jax.Array
  max_distance: int = struct.field(pytree_node=False)
  bidirectional: bool = struct.field(pytree_node=False)

  def between(self, query_pos: jax.Array, key_pos: jax.Array) -> jax.Array:
    """Returns float32 [..., H, T, S] for positions int32 [..., T] and [..., S] of queries and keys."""
    num_buckets = self.table.shape[1]
    buckets = jnp.asarray(distance_buckets(num_buckets, self.max_distance, bidirectional=self.bidirectional))
    distance = query_pos[..., :, None] - key_pos[..., None, :]
    bucket = jnp.take(buckets, jnp.clip(distance, -self.max_distance, self.max_distance) + self.max_distance)
    # A product with a one-hot array: the gradient of a lookup would be a scatter, which is slow on accelerators.
    is_bucket = (bucket[..., None] == jnp.arange(num_buckets).reshape((1,) * bucket.ndim + (-1,))).astype(jnp.float32)
    return jnp.einsum('HN,...TSN->...HTS', self.table, is_bucket, precision='highest')


def distance_buckets(num_buckets: int, max_distance: int, *, bidirectional: bool) -> np.ndarray:
  """Returns int32 [2 * max_distance + 1], the bucket of each distance, query position - key position.

  Distances begin at -max_distance. Unless `bidirectional`, later keys have bucket 0.
  """
  distance = np.arange(-max_distance, max_distance + 1)
  per_side = num_buckets // 2 if bidirectional else num_buckets
  first = np.where(distance < 0, per_side, 0) if bidirectional else np.zeros_like(distance)
  distance = np.abs(distance) if bidirectional else np.maximum(distance, 0)
  num_exact = per_side // 2
  # float32, as in T5, so that a distance at the border of two buckets gets the same bucket.
  logs = np.log(distance.astype(np.float32) / np.float32(num_exact) + np.finfo(np.float32).eps)
  far = num_exact + (logs / math.log(max_distance / num_exact) * (per_side - num_exact)).astype(np.int32)
  return (first + np.where(distance < num_exact, distance, np.minimum(far, per_side - 1))).astype(np.int32)


class RelativePositionBias(nn.Module, kw_only=True):
  """T5's relative position biases (Raffel et al., 2020); called without arguments, it returns a PositionBias.

  As a field of a model, all layers share it; as a field of `Attention`, each layer has its own. Weight: `table` [H, N].

  Fields:
    num_heads: H, of the attentions.
    num_buckets: N.
    max_distance: distances from here on share the last bucket.
    bidirectional: whether later keys have buckets of their own, as in encoders; otherwise they have bucket 0.
    table_init: initializer of the table; None: uniform with variance 2 / (H + N), as in T5X.
    split_dims: of the table.
  """

  num_heads: int
  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = False
  table_init: Initializer | None = None
  split_dims: SplitDims = ('heads', None)

  def __post_init__(self):
    per_side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
    if per_side < 2 or self.max_distance <= per_side // 2:
      raise UserError(
        f'num_buckets={self.num_buckets} gives each side {per_side} buckets: it needs 2 or more, and '
        f'max_distance={self.max_distance} must exceed half of them, {per_side // 2}.'
      )
    super().__post_init__()

  @nn.compact
  def __call__(self) -> PositionBias:
    init: Any = self.table_init or jax.nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
    shape = (self.num_heads, self.num_buckets)
    table = declare_weight(self, 'table', shape=shape, init=init, split_dims=self.split_dims, num_input_dims=0)
    return PositionBias(table=table, max_distance=self.max_distance, bidirectional=self.bidirectional)
