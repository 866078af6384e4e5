"""Scalings of rotary frequencies, for texts longer than a model was first trained on.

    Rotary(max_wavelength=500_000.0, scaling=Llama3Scaling(factor=8.0, original_length=8192))

A scaling changes the frequency of each pair of features, and may multiply sine and cosine by an `amplitude` A, so that
attention logits grow by A^2. Formulas follow transformers' modeling_rope_utils.py (version 5); its names of the fields
are in quotes.

Shapes: d features that rotate.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.rotary import RotaryScaling
from spmd_tasks.layers.base import current_layer_scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
  """Divides all frequencies by `factor`: position interpolation (Chen et al., 2023; "linear")."""

  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalScaling(RotaryScaling):
  """Rotates only a fraction of the pairs, the first, with the frequencies of all (Gemma 4: 2026; "proportional").

  Fields:
    fraction: of the pairs ("partial_rotary_factor").
  """

  factor: float = 1.0
  fraction: float = 1.0

  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    (num_pairs,) = frequencies.shape
    return jnp.where(jnp.arange(num_pairs) < int(self.fraction * 2 * num_pairs // 2), frequencies / self.factor, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
  """Divides low frequencies by `factor`, keeps high ones, and interpolates between (Llama 3.1: 2024; "llama3").

  Fields:
    original_length: of the first training, in tokens ("original_max_position_embeddings").
    low_frequency_factor, high_frequency_factor: a frequency is low if `original_length` tokens have fewer waves than
      the first, and high if they have more than the second ("low_freq_factor", "high_freq_factor").
  """

  original_length: int
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0

  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    num_waves = self.original_length * frequencies / (2 * math.pi)
    low, high = self.low_frequency_factor, self.high_frequency_factor
    kept = jnp.clip((num_waves - low) / (high - low), 0.0, 1.0)
    return (1.0 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RotaryScaling):
  """Divides frequencies by `factor` along a ramp over the pairs, and enlarges the logits (YaRN: Peng et al., 2023).

  Fields:
    original_length: of the first training, in tokens ("original_max_position_embeddings").
    beta_fast, beta_slow: pairs with more than `beta_fast` waves in `original_length` tokens keep their frequency, pairs
      with fewer than `beta_slow` are divided.
    truncate: whether the ends of the ramp are whole pairs.
    mscale, mscale_all_dim: A is m(mscale) / m(mscale_all_dim) if both are given (DeepSeek), m(1) otherwise, with
      m(c) = `yarn_magnitude(factor, c)`.
    attention_factor: A, if given.
  """

  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  mscale: float | None = None
  mscale_all_dim: float | None = None
  attention_factor: float | None = None

  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    num_pairs = frequencies.shape[0]

    def pair_with(num_waves: float) -> float:
      ratio = self.original_length / (2 * math.pi * num_waves)
      return num_pairs * math.log(ratio) / math.log(max_wavelength)

    low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001  # a step, not a division by 0
    divided = jnp.clip((jnp.arange(num_pairs, dtype=jnp.float32) - low) / width, 0.0, 1.0)
    return divided * frequencies / self.factor + (1.0 - divided) * frequencies

  def amplitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    if self.mscale and self.mscale_all_dim:
      return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
    return yarn_magnitude(self.factor)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
  """Returns m = 0.1 * mscale * ln(factor) + 1, or 1 for a factor of at most 1.

  DeepSeek also multiplies the softmax scale by the square of m for its `mscale_all_dim`.
  """
  return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RotaryScaling):
  """Divides the frequency of every pair by a factor of its own (LongRoPE: Ding et al., 2024; Phi-3; "longrope").

  There are two lists of factors, for texts up to `original_length` tokens and for longer ones. transformers picks one
  by the longest text of each batch, and recomputes the cache when a text outgrows the first list. Here compiled sizes
  decide, so that no text depends on its batch, and cached keys stay valid: the length of rows in training, evaluation
  and `logits`, and `max_len` in generation (as in vLLM).

  Fields:
    factor: the longest length / original_length; only A depends on it.
    original_length: L0, of the first training, in tokens ("original_max_position_embeddings").
    short_factors, long_factors: [d/2] each.
    is_long: whether the `long_factors` are used; None: if texts may be longer than `original_length`.
    attention_factor: A; None means sqrt(1 + ln(factor) / ln(L0)), and 1 for a factor of at most 1.
  """

  original_length: int
  short_factors: tuple[float, ...]
  long_factors: tuple[float, ...]
  is_long: bool | None = None
  attention_factor: float | None = None

  def for_rows(self, num_columns: int) -> 'LongRopeScaling':
    if self.is_long is not None:
      return self
    cache = current_layer_scope().cache
    length = num_columns if cache is None or cache.max_len is None else cache.max_len
    return dataclasses.replace(self, is_long=length > self.original_length)

  def scale(self, frequencies: jax.Array, max_wavelength: float) -> jax.Array:
    name = 'long_factors' if self.is_long else 'short_factors'
    factors = getattr(self, name)
    if len(factors) != frequencies.shape[0]:
      raise UserError(
        f'{name} has {len(factors)} factors for {frequencies.shape[0]} pairs of features: give one per pair.'
      )
    return frequencies / jnp.asarray(factors, jnp.float32)

  def amplitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    return 1.0 if self.factor <= 1.0 else math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
