"""MultiOptimizer: different optimizers for different weights, by patterns of their names (T5X's MultiOptimizer).

MultiOptimizer(
  optimizers=(
    ('.*(norm|position_bias)/', AdamW(learning_rate=1e-3)),
    ('', Adafactor(learning_rate=ProductOfFactors(base=0.1))),
  )
)
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.learning.optimizers import Optimizer
from spmd_tasks.learning.schedules import LearningRate, learning_rate_at
from spmd_tasks.learning.skipping import SkippableTransformation, skippable
from spmd_tasks.sharding.weight_names import check_pattern, compile_pattern
from spmd_tasks.sharding.weights import leaf_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOptimizer(Optimizer):
  """Trains each weight with the first optimizer whose pattern matches the beginning of its name.

  Weights without a match are not trained. Each optimizer has its own learning rate, evaluated at the train state's
  step.

  Attributes:
    optimizers: (regular expression, optimizer) pairs.
    learning_rate: the first optimizer's learning rate, which metrics report.
  """

  applies_learning_rate: ClassVar[bool] = True

  optimizers: Sequence[tuple[str, Any]]
  learning_rate: LearningRate = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if not self.optimizers:
      raise UserError('MultiOptimizer.optimizers is empty: give (pattern, optimizer) pairs.')
    for pattern, optimizer in self.optimizers:
      check_pattern(pattern, 'MultiOptimizer.optimizers')
      if not isinstance(optimizer, Optimizer) or optimizer.learning_rate is None:
        raise UserError(
          f'MultiOptimizer.optimizers has {optimizer!r} for {pattern!r}; it must be an optimizer with a learning rate, '
          'such as AdamW(learning_rate=3e-4).'
        )
    object.__setattr__(self, 'learning_rate', self.optimizers[0][1].learning_rate)

  @property
  def needs_weight_factors(self) -> bool:
    return any(optimizer.needs_weight_factors for _, optimizer in self.optimizers)

  def updates_layers_apart(self, weight_specs: Any) -> bool:
    """Whether all of the optimizers do."""
    indices = self._indices(weight_specs)
    return all(
      optimizer.updates_layers_apart(_select(indices, weight_specs, i))
      for i, (_, optimizer) in enumerate(self.optimizers)
    )

  def _indices(self, weight_specs: Any) -> Any:
    """Returns a tree with the index of each weight's optimizer; -1 for none."""

    def optimizer_index(path: Any, spec: Any) -> int:
      name = leaf_name(path)
      return next((i for i, (pattern, _) in enumerate(self.optimizers) if compile_pattern(pattern).match(name)), -1)

    return jax.tree_util.tree_map_with_path(optimizer_index, weight_specs)

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to steps; its state is a tuple of the optimizers' states.

    Raises a UserError if a pattern matches no weight, or only weights that an earlier pattern matches.
    """
    indices = self._indices(weight_specs)
    for i, (pattern, _) in enumerate(self.optimizers):
      if i not in jax.tree.leaves(indices):
        raise UserError(
          f'MultiOptimizer.optimizers has the pattern {pattern!r}, which matches no weight beyond those of earlier '
          'patterns: correct or remove it.'
        )

    select = functools.partial(_select, indices)
    transformations = [
      skippable(optimizer.transformation(select(weight_specs, i))) for i, (_, optimizer) in enumerate(self.optimizers)
    ]

    def init(weights: Any) -> tuple[Any, ...]:
      return tuple(transformation.init(select(weights, i)) for i, transformation in enumerate(transformations))

    def update(
      grads: Any,
      state: Any,
      weights: Any = None,
      *,
      step: Any,
      learning_rate: Any,
      layer_numbers: Any = None,
      **extra_args: Any,
    ) -> Any:
      steps, new_states = jax.tree.map(jnp.zeros_like, grads), []
      for i, (_, optimizer) in enumerate(self.optimizers):
        rate = learning_rate_at(optimizer.learning_rate, step)
        own_args = {'step': step, 'learning_rate': rate, **extra_args}
        if layer_numbers is not None:
          own_args['layer_numbers'] = select(layer_numbers, i)
        directions, new_state = transformations[i].update(select(grads, i), state[i], select(weights, i), **own_args)
        if not optimizer.applies_learning_rate:
          directions = jax.tree.map(lambda d, rate=rate: rate * d, directions)
        steps = jax.tree.map(lambda index, s, d, i=i: d if index == i else s, indices, steps, directions)
        new_states.append(new_state)
      return steps, tuple(new_states)

    return SkippableTransformation(init, update)


def _select(indices: Any, tree: Any, i: int) -> Any:
  return jax.tree.map(lambda index, leaf: leaf if index == i else None, indices, tree)
