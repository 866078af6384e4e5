"""Settings of optimizers that keep a momentum alone: Sgd and Lion. See optimizers.py for what all optimizers have."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.optimizers import OptimizerSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(OptimizerSettings):
  """Stochastic gradient descent, with heavy-ball or Nesterov momentum.

  Attributes:
    momentum: `trace = gradient + momentum * trace`; None: plain gradients.
    nesterov: whether the direction looks ahead by one more momentum step.
    momentum_dtype: of the stored trace.
  """

  momentum: float | None = None
  nesterov: bool = False
  momentum_dtype: str = 'float32'

  def __post_init__(self):
    super().__post_init__()
    if self.nesterov and self.momentum is None:
      raise UserError('Sgd.nesterov is True, which needs Sgd.momentum: set momentum, to 0.9 for example.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    if self.momentum is None:
      return [optax.identity()]  # optax.chain needs at least one transformation.
    return [optax.trace(self.momentum, nesterov=self.nesterov, accumulator_dtype=jnp.dtype(self.momentum_dtype))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSettings):
  """The sign of an interpolated momentum (Chen et al., arXiv 2302.06675).

  Attributes:
    beta1: weight of the momentum in the interpolation whose sign is the direction.
    beta2: decay of the momentum.
    momentum_dtype: of the stored momentum.
  """

  beta1: float = 0.9
  beta2: float = 0.99
  momentum_dtype: str = 'float32'

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    return [optax.scale_by_lion(b1=self.beta1, b2=self.beta2, mu_dtype=jnp.dtype(self.momentum_dtype))]
