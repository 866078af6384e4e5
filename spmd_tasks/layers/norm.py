"""RMS and layer normalization, computed in float32 whatever the dtype.

Shapes: x [..., D] -> [..., D]; the scale and the bias are [D], tagged `no_decay`. H heads, K head dim.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import declare_weight
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.weights import Initializer


def declare_vector(
  module: nn.Module, name: str, x: jax.Array, init: Initializer, split_dims: SplitDims, num_dims: int = 1
) -> jax.Array:
  """Declares a weight of x's last dims and returns it with x's rank."""
  shape = x.shape[x.ndim - num_dims :]
  vector = declare_weight(module, name, shape=shape, init=init, split_dims=split_dims, tags=('no_decay',))
  return vector.reshape((1,) * (x.ndim - num_dims) + shape)


def _declare_scale(norm: 'RmsNorm | LayerNorm', x: jax.Array, num_dims: int = 1) -> jax.Array | float:
  """Returns the factor of the normalized x [..., D], with x's rank; declares its weight."""
  if not norm.use_scale:
    return 1.0
  init = jax.nn.initializers.zeros if norm.scale_plus_one else jax.nn.initializers.ones
  scale = declare_vector(norm, 'scale', x, init, norm.split_dims, num_dims)
  return 1.0 + scale if norm.scale_plus_one else scale


class RmsNorm(nn.Module, kw_only=True):
  """RMS normalization: x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich, 2019). An all-zero row gives zeros.

  Weight: `scale` [D], or [H, K] for two dims; none without `use_scale`.

  Fields:
    epsilon: added to the mean square.
    use_scale: whether there is a scale (Llama 4's norms of queries and keys have none).
    scale_plus_one: whether x is multiplied by 1 + scale, with a scale initialized to zero, so that weight decay pulls
      the factor to 1 (Gemma; Pax's default).
    num_dims: how many trailing dims are normalized together: 2 for all heads of [..., H, K] (OLMo 2, OLMoE).
    dtype: of the output.
    split_dims: of the scale.
  """

  epsilon: float = 1e-6
  use_scale: bool = True
  scale_plus_one: bool = False
  num_dims: int = 1
  dtype: Any = 'float32'
  split_dims: SplitDims = ('norm',)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = _declare_scale(self, x, self.num_dims)
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=tuple(range(-self.num_dims, 0)), keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(self.dtype)


class LayerNorm(nn.Module, kw_only=True):
  """Layer normalization: (x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al., 2016).

  Weights: `scale` [D] and `bias` [D], with `use_scale` (not in OLMo) and `use_bias` (neither in OLMo nor in Cohere).

  Fields: as in RmsNorm (Nemotron has `scale_plus_one`), and
    use_bias: whether to add a bias.
    num_weight_dims: how many trailing dims the scale and the bias have: 1, or 2 if each head of [..., H, K] has its own
      (Command R+). The mean and the variance are always over the last dim.
  """

  epsilon: float = 1e-6
  use_scale: bool = True
  scale_plus_one: bool = False
  use_bias: bool = True
  num_weight_dims: int = 1
  dtype: Any = 'float32'
  split_dims: SplitDims = ('norm',)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale, bias = _declare_scale(self, x, self.num_weight_dims), jnp.float32(0)
    if self.use_bias:
      zeros = jax.nn.initializers.zeros
      bias = declare_vector(self, 'bias', x, zeros, self.split_dims, self.num_weight_dims)

    x = x.astype(jnp.float32)
    # Two passes (centre, then square): E[x^2] - E[x]^2 cancels badly in float32.
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)
