"""Layer normalization over the last dim, computed in float32 whatever the dtype. Shapes: x [..., D] -> [..., D]."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import by_row
from spmd_tasks.layers.norm import declare_vector
from spmd_tasks.sharding import SplitDims


class LayerNorm(nn.Module, kw_only=True):
  """Layer normalization: (x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al., 2016).

  Weights: `scale` [D] and, with `use_bias`, `bias` [D].

  Fields: as in RmsNorm, and `use_bias`.
  """

  epsilon: float = 1e-6
  use_bias: bool = True
  dtype: Any = 'float32'
  split_dims: SplitDims = ('norm',)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = declare_vector(self, 'scale', x, jax.nn.initializers.ones, self.split_dims)
    bias = declare_vector(self, 'bias', x, jax.nn.initializers.zeros, self.split_dims) if self.use_bias else 0.0

    def normalize(x: jax.Array, scale: jax.Array, bias: jax.Array | float) -> jax.Array:
      x = x.astype(jnp.float32)
      # Two passes (centre, then square): E[x^2] - E[x]^2 cancels badly in float32.
      centred = x - jnp.mean(x, axis=-1, keepdims=True)
      variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
      return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)

    return by_row(normalize, x, num_dims=x.ndim - 1, shared=(scale, bias))
