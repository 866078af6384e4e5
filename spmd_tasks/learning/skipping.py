"""Skippable transformations: optax transformations whose state survives a step that is not finite.

Usage:

    transformation = chain(scale_by_adam(...), optax.add_decayed_weights(0.1))
    directions, state = transformation.update(grads, state, weights, is_finite=is_finite)

Any optax transformation can be made skippable by choosing between its new state and its old one. A transformation that
makes the choice itself, before it computes its direction, saves a copy of its state; see `adam.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class SkippableTransformation(optax.GradientTransformationExtraArgs):
  """Its `update` takes `is_finite`, a bool scalar, and where that is false returns bit for bit the state it was given.

  The direction means nothing then.
  """


def keep_if_finite(is_finite: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """`new` where `is_finite`, else `old`: two congruent trees.

  A select, not a lax.cond: it fuses into the update, which reads the old value anyway and writes over it in place. With
  a conditional the host of a GPU would wait for the predicate.
  """
  return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)


def skippable(transformation: optax.GradientTransformation) -> SkippableTransformation:
  """The transformation itself if it is skippable, else one that is."""
  if isinstance(transformation, SkippableTransformation):
    return transformation
  inner = optax.with_extra_args_support(transformation)

  def update(
    grads: Any, state: Any, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any
  ) -> tuple[Any, Any]:
    directions, new_state = inner.update(grads, state, weights, **extra_args)
    return directions, keep_if_finite(is_finite, new_state, state)

  return SkippableTransformation(inner.init, update)


def chain(*transformations: optax.GradientTransformation) -> SkippableTransformation:
  """`optax.chain` of the transformations, each made skippable."""
  return SkippableTransformation(*optax.chain(*map(skippable, transformations)))
