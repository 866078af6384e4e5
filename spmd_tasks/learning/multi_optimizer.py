"""MultiOptimizer: several optimizers, each for the weights whose names match its pattern (T5X's MultiOptimizer).

MultiOptimizer(
  optimizers=(
    ('.*(norm|position_bias)/', AdamW(learning_rate=1e-3)),
    ('', Adafactor(learning_rate=ProductOfFactors(base=0.1))),
  )
)
"""

from collections.abc import Sequence
import dataclasses
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
  """Trains each weight by the first optimizer whose pattern matches the beginning of its name; others rest.

  Each optimizer has its own learning rate, evaluated at the train state's step. The metric is that of the first.

  Attributes:
    optimizers: (regular expression, settings of an optimizer) pairs.
    learning_rate: of the first optimizer.
  """

  applies_learning_rate: ClassVar[bool] = True

  optimizers: Sequence[tuple[str, Any]]
  learning_rate: LearningRate = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if not self.optimizers:
      raise UserError('MultiOptimizer.optimizers is empty; give (pattern, optimizer) pairs.')
    for pattern, optimizer in self.optimizers:
      check_pattern(pattern, 'MultiOptimizer.optimizers')
      if not isinstance(optimizer, Optimizer) or optimizer.learning_rate is None:
        raise UserError(
          f'MultiOptimizer.optimizers has {optimizer!r} for {pattern!r}; it must be settings with a learning rate, '
          'such as AdamW(learning_rate=3e-4).'
        )

    object.__setattr__(self, 'learning_rate', self.optimizers[0][1].learning_rate)

  @property
  def needs_weight_factors(self) -> bool:
    return any(optimizer.needs_weight_factors for _, optimizer in self.optimizers)

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to steps; its state is a tuple, of each optimizer one.

    Raises a UserError if a pattern matches no weight that an earlier one has not taken.
    """

    def owner(path: Any, spec: Any) -> int:
      name = leaf_name(path)
      return next((i for i, (pattern, _) in enumerate(self.optimizers) if compile_pattern(pattern).match(name)), -1)

    owners = jax.tree_util.tree_map_with_path(owner, weight_specs)
    for i, (pattern, _) in enumerate(self.optimizers):
      if i not in jax.tree.leaves(owners):
        raise UserError(
          f'MultiOptimizer.optimizers has the pattern {pattern!r}, which matches no weight that an earlier one does '
          'not: correct it, or leave it out.'
        )

    def part(tree: Any, i: int) -> Any:
      return jax.tree.map(lambda owner, leaf: leaf if owner == i else None, owners, tree)

    transformations = [
      skippable(optimizer.transformation(part(weight_specs, i))) for i, (_, optimizer) in enumerate(self.optimizers)
    ]

    def init(weights: Any) -> tuple[Any, ...]:
      return tuple(each.init(part(weights, i)) for i, each in enumerate(transformations))

    def update(grads: Any, state: Any, weights: Any = None, *, step: Any, learning_rate: Any, **extra_args: Any) -> Any:
      steps, states = jax.tree.map(jnp.zeros_like, grads), []
      for i, (each, (_, optimizer), old) in enumerate(zip(transformations, self.optimizers, state, strict=True)):
        rate = learning_rate_at(optimizer.learning_rate, step)
        given = extra_args | {'step': step, 'learning_rate': rate}
        directions, new = each.update(part(grads, i), old, part(weights, i), **given)
        if not optimizer.applies_learning_rate:
          directions = jax.tree.map(lambda d, rate=rate: rate * d, directions)
        steps = jax.tree.map(lambda owner, s, d, i=i: d if owner == i else s, owners, steps, directions)
        states.append(new)
      return steps, tuple(states)

    return SkippableTransformation(init, update)
