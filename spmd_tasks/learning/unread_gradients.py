"""Finds the weights that an optimizer does not train: no update depends on their gradients.

A weight that no optimizer of a MultiOptimizer has, or that optax labels `set_to_zero`, is such a weight. Its gradient
then has no part in the norm of gradients, in clipping by it, or in the decision whether a step is finite.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr


def unread_gradients(update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any) -> Any:
  """Returns a tree of bools congruent to the gradients: whether no update of any weight depends on that gradient.

  `update` is (grads, state) -> (updates, new state). A gradient that only changes the state is read if an update of a
  later step depends on that part of the state. JAX's dead code elimination says what an update depends on.
  """
  closed, (updates, new_state) = jax.make_jaxpr(update, return_shape=True)(grads, state)
  num_grads, num_updates = len(jax.tree.leaves(grads)), len(jax.tree.leaves(updates))
  read_state = [False] * len(jax.tree.leaves(new_state))
  while True:
    _, read = dce_jaxpr(closed.jaxpr, [True] * num_updates + read_state)
    before, read_state = read_state, [a or b for a, b in zip(read_state, read[num_grads:], strict=True)]
    if read_state == before:
      return jax.tree.unflatten(jax.tree.structure(grads), [not x for x in read[:num_grads]])
