"""LanguageModelWithValues: a model with the value head of PPO on its last activations.

Shapes: B batch, T sequence, D model.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers import LanguageModel, declare_weight
from spmd_tasks.layers.adapter import ADAPTER_TAG


class _ValueHead(nn.Module):
  """The weight `kernel` [D], zeros at the start. Like an adapter it is in no model's folder, read or exported."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    zeros, tags = jax.nn.initializers.zeros, (ADAPTER_TAG,)
    kernel = declare_weight(self, 'kernel', shape=x.shape[-1:], init=zeros, split_dims=('embed',), tags=tags)
    return jnp.einsum('BTD,D->BT', x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


class LanguageModelWithValues(LanguageModel, kw_only=True):
  """A LanguageModel whose predictions also have `values`, float32 [B, T]: the reward that is expected after each token.

  Its weights are those of the LanguageModel, and `value_head/kernel`.
  """

  @nn.nowrap
  def _beside_logits(self, x: jax.Array) -> dict[str, jax.Array]:
    return {'values': _ValueHead(name='value_head')(x)}
