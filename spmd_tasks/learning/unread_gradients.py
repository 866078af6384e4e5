"""Finds the weights that an optimizer does not train: no update depends on their gradients.

A weight that no optimizer of a MultiOptimizer has, or that optax labels `set_to_zero`, is such a weight. Its gradient
then has no part in the norm of gradients, in clipping by it, or in the decision whether a step is finite.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal


def unread_gradients(update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any) -> Any:
  """Returns a tree of bools congruent to the gradients: whether no update of any weight depends on that gradient.

  `update` is (grads, state) -> (updates, new state). A gradient that only changes the state is read if an update of a
  later step depends on that part of the state.
  """
  closed: Any
  structure: Any = jax.tree.structure(grads)
  closed, (updates, _) = jax.make_jaxpr(update, return_shape=True)(grads, state)
  num_grads, num_updates = structure.num_leaves, len(jax.tree.leaves(updates))
  read = _dependencies(closed, [1 << i for i in range(len(closed.jaxpr.invars))])
  of_state = read[num_updates:]
  reached, newly = 0, _union(read[:num_updates])
  while newly & ~reached:
    reached |= newly
    newly = _union(x for i, x in enumerate(of_state) if reached >> (num_grads + i) & 1)
  return structure.unflatten([not reached >> i & 1 for i in range(num_grads)])


def _union(sets: Any) -> int:
  """Returns the union of sets of inputs; bit i of a set says whether it has input i."""
  union = 0
  for x in sets:
    union |= x
  return union


def _dependencies(closed: ClosedJaxpr, inputs: list[int]) -> list[int]:
  """Returns the set of inputs on which each output depends; an output of a loop or operation depends on all inputs."""
  jaxpr = closed.jaxpr
  known: dict[Any, int] = dict.fromkeys(jaxpr.constvars, 0) | dict(zip(jaxpr.invars, inputs, strict=True))
  set_of = lambda x: 0 if isinstance(x, Literal) else known[x]
  for equation in jaxpr.eqns:
    name, params, read = equation.primitive.name, equation.params, [set_of(x) for x in equation.invars]
    called = params.get('jaxpr') or params.get('call_jaxpr') or params.get('fun_jaxpr')
    if name == 'cond':
      branches = [_dependencies(branch, read[1:]) for branch in params['branches']]
      outputs = [_union((read[0], *of_branches)) for of_branches in zip(*branches)]
    elif called is not None and name != 'scan':
      outputs = _dependencies(called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ()), read)
    else:
      outputs = [_union(read)] * len(equation.outvars)
    known.update(zip(equation.outvars, outputs, strict=True))
  return [set_of(x) for x in jaxpr.outvars]
