"""The loop of the gpipe and circular schedules: one scan over ticks, differentiated by JAX.

Shapes: P stages, K = M / P microbatches of each stage, V repeats, N layers of one stage in one repeat.

The backward pass is the same loop in reverse, with the same bubbles. Between the two, every tick keeps what the layers'
remat policy says: memory grows with M.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.pipeline.schedule import Schedule
from spmd_tasks.layers.pipeline.stage import Microbatch, Stage, StageWeights
from spmd_tasks.layers.pipeline.stream import (
  end_turn,
  in_order,
  put,
  select,
  send_up,
  take,
  take_turn,
)


def run_loop(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """The stage's share of the pipeline's work, in a region that is manual over the stage axis.

  Args:
    stage: the computation of a stage.
    schedule: P, M and V.
    weights: the stage's.
    microbatches: the stage's K, stacked.

  Returns:
    (x of its K microbatches after all layers, the aux of its layers [V, N, ...] summed over all microbatches).
  """
  axis, p = stage.axis, jax.lax.axis_index(stage.axis)
  # Stage 0 gets a result of the last stage one tick later and needs it M ticks after its input went in: P - 1 ticks on
  # the way, one to come back, and the rest of them in a delay line.
  delay = schedule.num_microbatches - schedule.num_stages
  is_circular = schedule.num_repeats > 1
  idle = take(microbatches, jnp.int32(0))

  def tick(carry, t):
    slots, below, delayed, total = carry
    index, repeat, is_work = schedule.work(p, t)
    leaving, arriving = take_turn(slots, t, axis)
    first = leaving
    if is_circular:
      delayed = put(delayed, t % (delay + 1), below)
      first = select(t < schedule.num_microbatches, leaving, take(delayed, (t + 1) % (delay + 1)))
    result, aux = stage(weights, select(p == 0, first, below), index, repeat, is_work)
    slots = end_turn(slots, t, arriving, result, axis)
    return (slots, send_up(result, axis), delayed, add_work(total, aux, repeat, is_work)), None

  total = zeros_of_aux(stage, weights, idle, schedule.num_repeats)
  delayed = jax.tree.map(lambda x: jnp.stack([x] * (delay + 1)), idle) if is_circular else None
  carry = (microbatches, idle, delayed, total)
  (slots, _, _, total), _ = jax.lax.scan(tick, carry, jnp.arange(schedule.num_ticks))
  return in_order(slots.x, schedule.num_stages - 1), total


def zeros_of_aux(stage: Stage, weights: StageWeights, microbatch: Microbatch, num_repeats: int) -> Any:
  """Zeros for the sum of a stage's aux, [V, N, ...]."""
  zero = jnp.int32(0)
  _, aux = jax.eval_shape(stage, weights, microbatch, zero, zero, zero == 0)
  return jax.tree.map(lambda a: jnp.zeros((num_repeats, *a.shape), a.dtype), aux)


def add_work(total: Any, aux: Any, repeat: jax.Array, is_work: jax.Array) -> Any:
  """The total with one tick's aux added to its repeat; a bubble adds nothing, not even a NaN."""

  def add(t, a):
    return t.at[repeat].add(jnp.where(is_work, a, 0))

  return jax.tree.map(add, total, aux)
