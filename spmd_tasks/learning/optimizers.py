"""The Optimizer protocol, the settings that our optimizers share, and AdamW. `from_optax.py` wraps optax optimizers.

Weight decay is decoupled: `weights -= learning_rate * (direction + weight_decay * weights)`. Weights with one of
`decay_exempt_tags` do not decay. Other layers, such as Linen's, do not tag their weights; `decay_mask` then exempts
weights by name and rank.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import are_matrices, layer_inputs
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate
from spmd_tasks.learning.skipping import SkippableTransformation, chain, scale_by_adam, skippable
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import SPLIT_BY_DEFAULT, leaf_name


@runtime_checkable
class Optimizer(Protocol):
  """The settings of an optimizer, which `transformation` turns into an optax transformation.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step; None if only the optax optimizer knows it.
  """

  learning_rate: LearningRate | None

  @property
  def applies_learning_rate(self) -> bool:
    """Whether directions include the learning rate; if not, the learner multiplies them by it."""
    return False

  @property
  def needs_weight_factors(self) -> bool:
    """Whether the model must have the collection WEIGHT_FACTORS."""
    return False

  def updates_layers_apart(self, weight_specs: Any) -> bool:
    """Whether layers of a stack may be updated one after another, as fast as together; `Learner.state_on_host` asks.

    If so, `update` gets the argument `layer_numbers`: for each weight, the numbers of its layers in the whole stack,
    int32 in the shape of the stacked dims.
    """
    del weight_specs
    return False

  @abc.abstractmethod
  def transformation(self, weight_specs: Any) -> optax.GradientTransformation:
    """Returns a transformation from gradients to a *direction*, which the learner multiplies by -learning_rate.

    The direction includes weight decay. The learning rate depends on the train state's step, which does not advance
    when a step is skipped, and not on a count in optax's state. The learner makes the transformation skippable
    (`skipping.py`). `update` gets the extra arguments `learning_rate`, a float32 scalar, `value`, the loss, and `step`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Optimizer):
  """Settings that all of our own optimizers have.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step.
    weight_decay: decoupled weight decay, which is multiplied by the learning rate.
    decay_exempt_tags: weights with one of these tags (`WeightSpec.tags`) do not decay; see `decay_mask` for weights
      without tags. (): all weights decay.
    base_width: for muP (Yang et al., arXiv 2203.03466, table 8): the direction of a matrix with n inputs, heads
      merged, is multiplied by base_width / n; other weights, and all weight decay, keep the learning rate. None: one
      learning rate for all weights.
  """

  learning_rate: LearningRate
  weight_decay: float = 0.0
  decay_exempt_tags: tuple[str, ...] = ('no_decay',)
  base_width: int | None = None

  def __post_init__(self):
    name = type(self).__name__
    check_learning_rate(f'{name}.learning_rate', self.learning_rate)
    is_decay = lambda decay: decay is None or 0 <= decay < 1
    constraints: dict[str, tuple[Callable[[Any], bool], str]] = {
      'beta1': (is_decay, 'in [0, 1)'),
      'beta2': (is_decay, 'in [0, 1)'),
      'momentum': (is_decay, 'in [0, 1)'),
      'weight_decay': (lambda decay: decay >= 0, '0 or more'),
      'epsilon': (lambda epsilon: epsilon > 0, 'more than 0, because a gradient may be exactly 0'),
      'momentum_dtype': (lambda dtype: jnp.issubdtype(jnp.dtype(dtype), jnp.floating), 'float32 or bfloat16'),
      'second_moment_dtype': (lambda dtype: dtype in ('float32', 'bfloat16'), 'float32 or bfloat16'),
      'decay_exempt_tags': (lambda tags: not isinstance(tags, str), 'a tuple of tags'),
      'base_width': (lambda width: width is None or width >= 1, '1 or more, or None for one learning rate'),
    }
    for field, (is_valid, constraint) in constraints.items():
      if hasattr(self, field) and not is_valid(getattr(self, field)):
        raise UserError(f'{name}.{field} is {getattr(self, field)!r}; it must be {constraint}.')

  @abc.abstractmethod
  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    """Returns transformations from gradients to the direction without weight decay."""

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction, for a tree of WeightSpec congruent to the weights."""
    transformations = self._direction(weight_specs)
    if self.base_width is not None:
      transformations[-1] = scale_directions(skippable(transformations[-1]), self._width_factors(weight_specs))
    if self.weight_decay:
      mask = decay_mask(weight_specs, self.decay_exempt_tags)
      transformations = [*transformations, optax.add_decayed_weights(self.weight_decay, mask)]
    return chain(*transformations)

  def _width_factors(self, weight_specs: Any) -> Any:
    """Returns the factors of directions by which their learning rates follow `base_width`."""
    are_matrices(weight_specs, type(self).__name__)  # raises for a weight that does not declare its input dims

    def factor(spec: WeightSpec) -> float:
      num_inputs = layer_inputs(spec)
      return self.base_width / num_inputs if num_inputs and self.base_width else 1.0

    return jax.tree.map(factor, weight_specs)


def scale_directions(transformation: SkippableTransformation, factors: Any) -> SkippableTransformation:
  """Multiplies the directions of a transformation by a tree of numbers; its state stays the same."""

  def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
    directions, state = transformation.update(grads, state, weights, **extra_args)
    return jax.tree.map(lambda d, factor: d if factor == 1 else factor * d, directions, factors), state

  return SkippableTransformation(transformation.init, update)


def decay_mask(weight_specs: Any, exempt_tags: Sequence[str]) -> Any:
  """Returns a tree of bools congruent to the weights: whether each weight decays.

  A weight with one of the exempt tags does not decay. A weight without tags counts as `no_decay` if it is named `bias`
  or `scale`, as in Linen's layers, or has fewer than two dims.
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
    momentum_dtype: dtype of the stored first moment.
    second_moment_dtype: dtype of the stored second moment: float32, or bfloat16, rounded at random so that the average
      moves as far as in float32.
  """

  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  momentum_dtype: str = 'float32'
  second_moment_dtype: str = 'float32'

  def updates_layers_apart(self, weight_specs: Any) -> bool:
    """All numbers are updated apart."""
    del weight_specs
    return True

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    return [
      scale_by_adam(
        beta1=self.beta1,
        beta2=self.beta2,
        epsilon=self.epsilon,
        momentum_dtype=self.momentum_dtype,
        second_moment_dtype=self.second_moment_dtype,
      )
    ]
