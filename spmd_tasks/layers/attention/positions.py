"""Positions of tokens: rotary embeddings of queries and keys, or a vector per position, learned or sinusoidal.

Shapes: B batch, T sequence, D model, H heads, K head dim. `positions` is int32 [B, T] and counts from 0 within each
packed document (the batch's `segment_pos`).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.rotary_scaling import RotaryScaling
from spmd_tasks.layers.base import declare_weight
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import Initializer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates pairs of a head's features by angles proportional to the position (Su et al., 2021). Has no weights.

  Of d features that rotate, feature i is paired with feature i + d/2, as in GPT-NeoX, Llama on Hugging Face and Pax;
  the original paper pairs 2i with 2i + 1. The two conventions differ by a fixed permutation of the head dim of queries
  and keys. Pair i turns by `position * max_wavelength ** (-2i / d)` radians; angles and rotation are float32.

  Fields:
    max_wavelength: sets the slowest rotation ("rope theta" elsewhere).
    num_features: d; the first d features of a head rotate, the others stay as they are (GPT-J, Phi, GLM). None: all.
    scaling: of the frequencies, for long texts; see rotary_scaling.py.
  """

  max_wavelength: float = 10_000.0
  num_features: int | None = None
  scaling: RotaryScaling | None = None

  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rotated x [B, T, H, K] in x's dtype.

    Raises:
      UserError: d is odd or greater than K, or the scaling is for another d.
    """
    head_dim = x.shape[-1]
    num_features = head_dim if self.num_features is None else self.num_features
    if num_features % 2 or not 0 < num_features <= head_dim:
      name = 'head_dim is' if self.num_features is None else f'head_dim is {head_dim} and num_features is'
      raise UserError(
        f'rotary positions rotate pairs of features, but {name} {num_features}: choose an even number, at most the '
        'head_dim.'
      )
    fraction = jnp.arange(0, num_features, 2, dtype=jnp.float32) / num_features
    frequencies = self.max_wavelength**-fraction  # [d/2]
    scaling = None if self.scaling is None else self.scaling.for_rows(x.shape[1])
    if scaling is not None:
      frequencies = scaling.scale(frequencies, self.max_wavelength)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)  # [B, T, 1, d/2]
    if scaling is not None:
      sin, cos = sin * scaling.amplitude(), cos * scaling.amplitude()
    first, second = jnp.split(x[..., :num_features].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if num_features == head_dim else jnp.concatenate([rotated, x[..., num_features:]], axis=-1)


class LearnedPositions(nn.Module, kw_only=True):
  """Adds a learned vector per position to x [B, T, D] (Gehring et al., 2017; GPT-2).

  Weight: `table` [max_len, D].

  Fields:
    max_len: how many positions are learned.
    dtype: of the output.
    table_init: initializer of the table.
    split_dims, activation_split_dims: of the table and of the output.
  """

  max_len: int
  dtype: Any = 'float32'
  table_init: Initializer = jax.nn.initializers.normal(0.02)
  split_dims: SplitDims = (None, 'embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x plus the vector of each position; a position outside the table gives NaNs.

    Raises:
      UserError: the sequence is longer than `max_len`.
    """
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
