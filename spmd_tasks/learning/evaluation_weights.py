"""The weights to evaluate with, where an optimizer trains others and its state says how the two are related.

    optax.contrib.schedule_free   trains y, and evaluates the average x = (y - (1 - b1) z) / b1
    optax.lookahead               trains the fast weights, and evaluates the slow ones
    optax.contrib.sam             between two of its updates trains weights that are moved uphill, and evaluates others

Evaluation, generation and exports take these, or the learner's moving average (`ema_decay`) where the task says so.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LookaheadWithSlow(NamedTuple):
  """The state of `optax.lookahead`, which leaves its slow weights to the caller, with these weights."""

  lookahead: optax.LookaheadState
  slow: Any


def _is_known(node: Any) -> bool:
  if isinstance(node, optax.contrib.SAMState):
    return node.cache is not None  # None: its steps uphill are inside one update
  return isinstance(node, optax.contrib.ScheduleFreeState | LookaheadWithSlow)


def _known_states(opt_state: Any) -> list[Any]:
  return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_known) if _is_known(node)]


def has_evaluation_weights(opt_state: Any) -> bool:
  """Returns whether an optimizer with that state, abstract or not, evaluates with other weights than it trains."""
  return bool(_known_states(opt_state))


def names_evaluation_weights(names: Iterable[str]) -> bool:
  """Returns whether one of the names of saved leaves of a state is of such an optimizer."""
  return any({'weight_sum', 'steps_since_sync'} & set(name.split('/')) for name in names)


def evaluation_weights(opt_state: Any, weights: Any) -> Any:
  """Returns the weights to evaluate with, given those that are trained; abstract weights are returned unchanged."""
  states = _known_states(opt_state)
  arrays = jax.tree.leaves(weights)
  if not states or not all(isinstance(x, jax.Array) for x in arrays):
    return weights
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    return _evaluation_weights(states, weights)
  # Compiled, so that every process of a mesh can call it.
  return jax.jit(_evaluation_weights, out_shardings=jax.tree.map(lambda x: x.sharding, weights))(states, weights)


def _evaluation_weights(states: list[Any], weights: Any) -> Any:
  for state in states:
    if isinstance(state, optax.contrib.ScheduleFreeState):
      b1 = state.b1
      weights = _map(lambda z, y, b1=b1: (y - (1 - b1) * z) / b1, state.z, weights)
    elif isinstance(state, LookaheadWithSlow):
      weights = _map(lambda slow, fast: slow, state.slow, weights)
    else:
      is_uphill = state.steps_since_sync > 0
      weights = _map(lambda cached, w, is_uphill=is_uphill: jnp.where(is_uphill, cached, w), state.cache, weights)
  return weights


def _map(function: Any, tree: Any, weights: Any) -> Any:
  """Maps function(leaf, weight), float32, over the weights that the tree, one of a state, has; others stay as they are.

  In the place of the others it has None, or optax.MaskedNode also for a whole subtree.
  """
  is_missing = lambda node: node is None or isinstance(node, optax.MaskedNode)

  def mapped(leaf: Any, own: Any) -> Any:
    return own if is_missing(leaf) else function(leaf, own.astype(jnp.float32)).astype(own.dtype)

  return jax.tree.map(mapped, tree, weights, is_leaf=is_missing)
