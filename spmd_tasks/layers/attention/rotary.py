"""Rotary positions: rotates queries and keys by angles proportional to the position.

Shapes: B batch, T sequence, H heads, K head dim, d features that rotate. `positions` is int32 [B, T] and counts from 0
within each packed document (the batch's `segment_pos`).
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling(abc.ABC):
  """Base class of scalings, which divide frequencies by `factor` ("factor"), each in its own way."""

  factor: float

  def __post_init__(self):
    for name in ('factor', 'original_length', 'beta_fast', 'beta_slow'):
      if not getattr(self, name, 1) > 0:
        raise UserError(f'{name}={getattr(self, name)} of a rotary scaling must be positive.')

  def for_rows(self, num_columns: int) -> 'RotaryScaling':
    """Returns the scaling for rows of `num_columns` tokens, or in generation for the longest text."""
    return self

  @abc.abstractmethod
  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    """Returns the scaled frequencies, float32 [d/2], in radians per token, highest first."""

  def amplitude(self) -> float:
    """Returns A, the factor by which sine and cosine are multiplied."""
    return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates pairs of a head's features by angles proportional to the position (Su et al., 2021). Has no weights.

  Of d features that rotate, feature i is paired with feature i + d/2, as in GPT-NeoX, Llama on Hugging Face and Pax;
  the original paper pairs 2i with 2i + 1. Pair i turns by `position * max_wavelength ** (-2i / d)` radians; angles and
  rotation are float32.

  Fields:
    max_wavelength: sets the slowest rotation ("rope theta" elsewhere).
    num_features: d; the first d features of a head rotate, the others do not (GPT-J, Phi, GLM). None: all.
    scaling: scales the frequencies for long texts; see rotary_scaling.py.
  """

  max_wavelength: float = 10_000.0
  num_features: int | None = None
  scaling: RotaryScaling | None = None

  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rotated x [B, T, H, K]. Raises a UserError if d is odd or exceeds K, or the scaling has another d."""
    head_dim = x.shape[-1]
    num_features = head_dim if self.num_features is None else self.num_features
    if num_features % 2 or not 0 < num_features <= head_dim:
      raise UserError(
        f'rotary num_features={num_features} must be even, from 2 to head_dim={head_dim}: choose another, or head_dim.'
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
