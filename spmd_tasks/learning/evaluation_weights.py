"""Computes the weights to evaluate from optimizer state, for optimizers that do not evaluate the weights they train.

    optax.contrib.schedule_free   trains y, and evaluates the average x = (y - (1 - b1) z) / b1
    optax.lookahead               trains the fast weights, and evaluates the slow ones
    optax.contrib.sam             trains weights that are moved uphill between two updates, and evaluates the others

Evaluation, generation and exports use these weights, unless the task uses the learner's moving average (`ema_decay`).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LookaheadWithSlow(NamedTuple):
  """The state of `optax.lookahead` with the slow weights, which optax leaves to the caller."""

  lookahead: optax.LookaheadState
  slow: Any


def _has_own_weights(node: Any) -> bool:
  if isinstance(node, optax.contrib.SAMState):
    return node.cache is not None  # opaque_mode: all steps uphill are inside one update
  return isinstance(node, optax.contrib.ScheduleFreeState | LookaheadWithSlow)


def _states_with_weights(opt_state: Any) -> list[Any]:
  return [node for node in jax.tree.leaves(opt_state, is_leaf=_has_own_weights) if _has_own_weights(node)]


def has_evaluation_weights(opt_state: Any) -> bool:
  """Returns whether an optimizer with this state, abstract or not, evaluates other weights than it trains."""
  return bool(_states_with_weights(opt_state))


def names_evaluation_weights(names: Iterable[str]) -> bool:
  """Returns whether a saved state with leaves of these names has evaluation weights."""
  return any({'weight_sum', 'steps_since_sync'} & set(name.split('/')) for name in names)


def evaluation_weights(opt_state: Any, weights: Any) -> Any:
  """Returns the weights to evaluate, given the trained weights; returns abstract weights unchanged."""
  states = _states_with_weights(opt_state)
  arrays = jax.tree.leaves(weights)
  if not states or not all(isinstance(x, jax.Array) for x in arrays):
    return weights
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    return _evaluation_weights(states, weights)
  # jit: arrays may have shards on other processes.
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
  """Maps function(leaf, weight), in float32, over a tree of optimizer state; keeps weights that the tree lacks.

  In place of a missing weight, or of a subtree of them, the tree has None or optax.MaskedNode.
  """
  is_missing = lambda node: node is None or isinstance(node, optax.MaskedNode)

  def map_leaf(leaf: Any, weight: Any) -> Any:
    return weight if is_missing(leaf) else function(leaf, weight.astype(jnp.float32)).astype(weight.dtype)

  return jax.tree.map(map_leaf, tree, weights, is_leaf=is_missing)
