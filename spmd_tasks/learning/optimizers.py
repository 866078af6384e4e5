"""Settings of optimizers, and AdamW. Others have files of their own; `from_optax.py` wraps those of optax.

Weight decay is decoupled and part of the direction, `weights -= learning_rate * (direction + weight_decay * weights)`;
weights with one of `decay_exempt_tags` do not decay.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate
from spmd_tasks.learning.skipping import SkippableTransformation, chain, scale_by_adam


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(abc.ABC):
  """Settings that all optimizers have.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step.
    weight_decay: decoupled decay of the weights; the learning rate multiplies it too.
    decay_exempt_tags: weights with one of these tags (`WeightSpec.tags`) do not decay.
  """

  learning_rate: LearningRate
  weight_decay: float = 0.0
  decay_exempt_tags: tuple[str, ...] = ('no_decay',)

  def __post_init__(self):
    name = type(self).__name__
    check_learning_rate(f'{name}.learning_rate', self.learning_rate)
    if isinstance(self.decay_exempt_tags, str):
      raise UserError(f'{name}.decay_exempt_tags is {self.decay_exempt_tags!r}; it must be a tuple of tags.')
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in ('beta1', 'beta2', 'momentum') and value is not None and not 0 <= value < 1:
        raise UserError(f'{name}.{field.name} is {value}; it must be in [0, 1).')
      if field.name == 'weight_decay' and not value >= 0:
        raise UserError(f'{name}.{field.name} is {value}; it must be 0 or more.')
      if field.name == 'epsilon' and not value > 0:
        raise UserError(f'{name}.epsilon is {value}; it must be more than 0: a gradient may be exactly 0.')
      if field.name == 'momentum_dtype' and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise UserError(f'{name}.momentum_dtype is {value}; it must be a floating dtype such as float32 or bfloat16.')

  @abc.abstractmethod
  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    """Returns transformations from gradients to the direction before weight decay."""

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction, for a tree of WeightSpec congruent to the weights."""
    pieces = self._direction(weight_specs)
    if self.weight_decay:
      mask = jax.tree.map(lambda spec: not set(spec.tags).intersection(self.decay_exempt_tags), weight_specs)
      pieces = [*pieces, optax.add_decayed_weights(self.weight_decay, mask)]
    return chain(*pieces)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSettings):
  """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

  Attributes:
    beta1, beta2: decays of the first and of the second moment.
    epsilon: added to the root of the second moment.
    momentum_dtype: of the stored first moment.
  """

  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  momentum_dtype: str = 'float32'

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    return [scale_by_adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, momentum_dtype=self.momentum_dtype)]
