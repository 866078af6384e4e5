"""Temperature: multiplies queries by a factor that grows with the position, for texts longer than in training."""

import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
  """Multiplies queries by 1 + scale * log(1 + floor((position + offset) / length)) (Llama 4, Ministral 3).

  Over a long text, the softmax of attention spreads over more keys; larger logits counteract this. Has no weights.

  Fields:
    scale: growth of the factor.
    length: the number of tokens after which the factor grows for the first time.
    offset: 1 in Llama 4, where positions count from 1.
  """

  scale: float = 0.1
  length: int = 8192
  offset: int = 0

  def __post_init__(self):
    if self.length < 1 or self.offset < 0:
      raise UserError(f'length={self.length} of a temperature must be at least 1, and offset={self.offset} at least 0.')

  def __call__(self, query: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the scaled queries [B, T, H, K] for positions int32 [B, T]."""
    blocks = ((positions + self.offset) // self.length).astype(jnp.float32)
    factor = 1.0 + self.scale * jnp.log1p(blocks)
    return (query.astype(jnp.float32) * factor[:, :, None, None]).astype(query.dtype)
