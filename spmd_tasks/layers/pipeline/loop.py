"""Runs the gpipe and circular schedules: one scan over ticks, which JAX differentiates.

The backward pass is the same loop in reverse, with the same bubbles. Every tick of the forward pass keeps the values
that the layers' remat policy selects, so memory grows with M.

Shapes: P stages, K = M / P microbatches of each stage, V repeats, N layers of one stage in one repeat.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.pipeline.microbatches import (
  Microbatch,
  read_slot,
  send_up,
  slots_in_order,
  tree_read,
  tree_where,
  tree_write,
  write_slot,
)
from spmd_tasks.layers.pipeline.schedule import Schedule
from spmd_tasks.layers.pipeline.stage import Stage, StageWeights


def run_loop(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """Runs one stage's part of the pipeline, in a region that is manual over the stage axis.

  Args:
    stage: the computation of a stage.
    schedule: P, M and V.
    weights: of this stage.
    microbatches: the K microbatches of this stage, stacked.

  Returns:
    (x of the K microbatches after all layers, the aux of this stage's layers [V, N, ...] summed over all microbatches).
  """
  return _run(stage, schedule, weights, microbatches, keep_inputs=False)[0]


def run_loop_and_keep_inputs(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[tuple[jax.Array, Any], Microbatch]:
  """Returns (what `run_loop` returns, what entered the stage in each tick, [ticks, ...])."""
  return _run(stage, schedule, weights, microbatches, keep_inputs=True)


def _run(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch, *, keep_inputs: bool
) -> tuple[tuple[jax.Array, Any], Any]:
  axis, p = stage.axis, jax.lax.axis_index(stage.axis)
  # Stage 0 gets a result of the last stage one tick later, which is P ticks after the input entered. It needs the
  # result M ticks after the input entered; a delay line holds the result for the other M - P ticks.
  delay = schedule.num_microbatches - schedule.num_stages
  is_circular = schedule.num_repeats > 1
  idle = tree_read(microbatches, jnp.int32(0))

  def tick(carry, t):
    slots, below, delayed, total = carry
    index, repeat, is_work = schedule.work(p, t)
    leaving, arriving = read_slot(slots, t, axis)
    first = leaving
    if is_circular:
      delayed = tree_write(delayed, t % (delay + 1), below)
      first = tree_where(t < schedule.num_microbatches, leaving, tree_read(delayed, (t + 1) % (delay + 1)))
    entering = tree_where(p == 0, first, below)
    result, aux = stage(weights, entering, index, repeat, is_work)
    slots = write_slot(slots, t, arriving, result, axis)
    carry = (slots, send_up(result, axis), delayed, _add_aux(total, aux, repeat, is_work))
    return carry, entering if keep_inputs else None

  abstract_aux = _abstract_aux(stage, weights, idle)
  total = _zero_aux(abstract_aux, schedule.num_repeats)
  delayed = jax.tree.map(lambda x: jnp.stack([x] * (delay + 1)), idle) if is_circular else None
  carry = (microbatches, idle, delayed, total)
  (slots, _, _, total), inputs = jax.lax.scan(tick, carry, jnp.arange(schedule.num_ticks))
  return (slots_in_order(slots.x, schedule.num_stages - 1), _split_aux(total, abstract_aux)), inputs


def _abstract_aux(stage: Stage, weights: StageWeights, microbatch: Microbatch) -> Any:
  """Returns shapes and dtypes of a stage's aux, leaves [N, ...]."""
  zero = jnp.int32(0)
  return jax.eval_shape(stage, weights, microbatch, zero, zero, zero == 0)[1]


def _zero_aux(abstract_aux: Any, num_repeats: int) -> jax.Array | None:
  """Returns zeros for the sum of a stage's aux, float32 [V, N, numbers], or None if there are no statistics.

  All statistics are in one array, so that one addition sums them.
  """
  leaves = jax.tree.leaves(abstract_aux)
  if not leaves:
    return None
  num_numbers = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
  return jnp.zeros((num_repeats, leaves[0].shape[0], num_numbers), jnp.float32)


def _add_aux(total: jax.Array | None, aux: Any, repeat: jax.Array, is_work: jax.Array) -> jax.Array | None:
  """Adds one tick's aux to the total of its repeat; a bubble adds nothing, not even a NaN."""
  if total is None:
    return None
  flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(aux)], axis=1)
  added = jnp.where(is_work, flat, 0)
  return total + added[None] if len(total) == 1 else total.at[repeat].add(added)


def _split_aux(total: jax.Array | None, abstract_aux: Any) -> Any:
  """Returns the sum as aux, leaves [V, N, ...]."""
  if total is None:
    return abstract_aux
  leaves, structure = jax.tree.flatten(abstract_aux)
  ends = itertools.accumulate(math.prod(leaf.shape[1:]) for leaf in leaves)
  parts = jnp.split(total, list(ends)[:-1], axis=2)
  shapes = [(len(total), *leaf.shape) for leaf in leaves]
  return jax.tree.unflatten(structure, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
