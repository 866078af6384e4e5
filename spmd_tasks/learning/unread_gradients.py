"""Finds gradients that an optimizer does not read.

Examples are the gradients of a weight that matches no pattern of a MultiOptimizer, or that an optax label sets to zero.
They are excluded from the gradient norm, from clipping, and from the decision whether a step is finite.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr


def unread_gradients(update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any) -> Any:
  """Returns a tree of bools congruent to the gradients: true if no update of any weight depends on the gradient.

  `update` is (grads, state) -> (updates, new state). A gradient that only changes the state counts as read if a later
  update depends on that part of the state. JAX's dead code elimination finds the dependencies.
  """
  closed, (updates, new_state) = jax.make_jaxpr(update, return_shape=True)(grads, state)
  num_grads, num_updates = len(jax.tree.leaves(grads)), len(jax.tree.leaves(updates))
  read_state = [False] * len(jax.tree.leaves(new_state))
  while True:
    _, read = dce_jaxpr(closed.jaxpr, [True] * num_updates + read_state)
    before, read_state = read_state, [a or b for a, b in zip(read_state, read[num_grads:], strict=True)]
    if read_state == before:
      return jax.tree.unflatten(jax.tree.structure(grads), [not x for x in read[:num_grads]])
