"""The Optimizer protocol, the settings that our optimizers share, and AdamW; `from_optax.py` wraps optimizers of optax.

Weight decay is decoupled and part of the direction, `weights -= learning_rate * (direction + weight_decay * weights)`.
Weights with one of `decay_exempt_tags` do not decay. Models of other layers, as Linen's own, have no tags: of these,
the weights that `decay_mask` describes count as `no_decay`.
"""

import abc
from collections.abc import Sequence
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate
from spmd_tasks.learning.skipping import SkippableTransformation, chain, scale_by_adam
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import SPLIT_BY_DEFAULT, leaf_name


@runtime_checkable
class Optimizer(Protocol):
  """An optimizer, as a config holds it: subclasses are in `optimizers.py` and `from_optax.py`.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step; None if only the optimizer itself knows it.
  """

  learning_rate: LearningRate | None

  @property
  def applies_learning_rate(self) -> bool:
    """Whether directions include the learning rate; the learner multiplies them by it otherwise."""
    return False

  @property
  def needs_weight_factors(self) -> bool:
    """Whether the model must have the collection WEIGHT_FACTORS."""
    return False

  @abc.abstractmethod
  def transformation(self, weight_specs: Any) -> optax.GradientTransformation:
    """Returns a transformation from gradients to a *direction*. The learner multiplies it by minus the learning rate.

    Weight decay is part of the direction. The learning rate is a function of the train state's step, which stands still
    when a step is skipped, and not of a count in optax's state. The learner makes the transformation skippable
    (`skipping.py`). `update` gets the extra arguments `learning_rate`, a float32 scalar, `value`, the loss, and `step`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Optimizer):
  """Settings that all optimizers have.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step.
    weight_decay: decoupled decay of the weights; the learning rate multiplies it too.
    decay_exempt_tags: weights with one of these tags (`WeightSpec.tags`) do not decay; see `decay_mask` for weights
      without tags. (): all weights decay.
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
      mask = decay_mask(weight_specs, self.decay_exempt_tags)
      pieces = [*pieces, optax.add_decayed_weights(self.weight_decay, mask)]
    return chain(*pieces)


def decay_mask(weight_specs: Any, exempt_tags: Sequence[str]) -> Any:
  """Returns a tree of bools congruent to the weights: which decay.

  A weight with one of the tags does not. A weight without tags of its layer has the tag `no_decay` if it is named
  `bias` or `scale`, as in Linen's layers, or has fewer than two dims.
  """

  def decays(path: Any, spec: WeightSpec) -> bool:
    tags = set(spec.tags) - {SPLIT_BY_DEFAULT}
    name = leaf_name(path).rpartition('/')[2]
    if not tags and (name in ('bias', 'scale') or len(spec.shape) - spec.num_separate_dims < 2):
      tags = {'no_decay'}
    return not tags.intersection(exempt_tags)

  return jax.tree_util.tree_map_with_path(decays, weight_specs)


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
