"""Initializers of kernels: variance scaling whose fan counts every contracted dim."""

import dataclasses
import math
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class FanInNormal:
  """Truncated normal with variance `scale / fan_in`, so that a unit-variance input gives an output of variance `scale`.

  `fan_in` is the product of the kernel's first `num_input_dims` dims: an attention output kernel [H, K, D] with two
  input dims has fan-in H*K. Leading dims that count kernels of their own, as in experts' [E, D, F], are left out of it:
  `num_stacked_dims` says how many there are.
  """

  scale: float = 1.0
  num_input_dims: int = 1
  num_stacked_dims: int = 0

  def __call__(self, rng: jax.Array, shape: tuple[int, ...], dtype: Any = 'float32') -> jax.Array:
    fan_in = math.prod(shape[self.num_stacked_dims :][: self.num_input_dims])
    # A standard normal cut at +-2 has this standard deviation; dividing by it restores the variance that was asked for.
    stddev = math.sqrt(self.scale / max(1, fan_in)) / 0.87962566103423978
    return jax.random.truncated_normal(rng, -2.0, 2.0, shape, dtype) * stddev
