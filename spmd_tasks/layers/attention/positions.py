"""Positions that are added to embeddings: a vector per position, learned or sinusoidal. Rotary ones: rotary.py.

Shapes: B batch, T sequence, D model. `positions` is int32 [B, T] and counts from 0 within each
packed document (the batch's `segment_pos`).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import declare_weight
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import Initializer


class LearnedPositions(nn.Module, kw_only=True):
  """Adds a learned vector per position to x [B, T, D] (Gehring et al., 2017; GPT-2). Weight: `table` [max_len, D].

  Fields: `max_len` positions are learned, from `table_init`; `dtype` is of the output; `split_dims` and
    `activation_split_dims` are of the table and of the output.
  """

  max_len: int
  dtype: Any = 'float32'
  table_init: Initializer = jax.nn.initializers.normal(0.02)
  split_dims: SplitDims = (None, 'embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x plus the vector of each position, NaNs outside the table; a UserError if T exceeds `max_len`."""
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

  Fields: `max_timescale` sets the slowest wave; `dtype` and `activation_split_dims` are those of the output.
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
