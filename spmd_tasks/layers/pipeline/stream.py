"""How microbatches reach the first stage of a pipeline and leave the last one: over neighbours, one step a tick.

Shapes: P stages, K = M / P microbatches of each stage.

Each stage keeps K of the M microbatches, stage p those from p K on, in K slots. In every tick one slot of all stages,
the same, moves one stage down: stage 0 takes what it held there, the last stage has room for a result. Slot t mod K
moves in tick t, so that stage 0 meets microbatch t in tick t, and no stage ever holds more than its share. All
functions here run in a region that is manual over the stage axis; trees of arrays are moved as one.
"""

from typing import Any

import jax
import jax.numpy as jnp


def take(tree: Any, index: jax.Array) -> Any:
  """The entries at `index` of the leading dim."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(tree: Any, index: jax.Array, entries: Any) -> Any:
  """The tree with `entries` at `index` of the leading dim."""
  return jax.tree.map(lambda x, e: jax.lax.dynamic_update_index_in_dim(x, e, index, 0), tree, entries)


def select(condition: jax.Array, if_true: Any, if_false: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def send_up(tree: Any, axis: str) -> Any:
  """What the stage below (p - 1) has; stage 0 gets the last stage's."""
  return _rotate(tree, axis, 1)


def send_down(tree: Any, axis: str) -> Any:
  """What the stage above (p + 1) has; the last stage gets stage 0's."""
  return _rotate(tree, axis, -1)


def _rotate(tree: Any, axis: str, by: int) -> Any:
  num_stages = jax.lax.axis_size(axis)
  neighbours = [(p, (p + by) % num_stages) for p in range(num_stages)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, neighbours), tree)


def take_turn(slots: Any, turn: jax.Array, axis: str) -> tuple[Any, Any]:
  """(what leaves this stage in this turn, what arrives from the stage above): slot `turn` mod K of each."""
  leaving = take(slots, turn % num_slots(slots))
  return leaving, send_down(leaving, axis)


def end_turn(slots: Any, turn: jax.Array, arriving: Any, result: Any, axis: str) -> Any:
  """The slots after the turn: what has arrived, and on the last stage the result."""
  is_last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
  return put(slots, turn % num_slots(slots), select(is_last, result, arriving))


def in_order(slots: Any, num_extra_turns: int) -> Any:
  """The slots by microbatch, if the result of microbatch m was put in `num_extra_turns` turns after turn m.

  Results then are with the right stage already: those of stage p have moved down P - 1 - p times.
  """
  return jax.tree.map(lambda x: jnp.roll(x, -num_extra_turns, axis=0), slots)


def num_slots(slots: Any) -> int:
  return jax.tree.leaves(slots)[0].shape[0]
