"""Runs the one-forward-one-backward (1F1B) schedule, whose stored activations do not grow with M.

The forward pass stores its input only. The backward pass runs forward again, microbatch by microbatch, and backward
with each microbatch as soon as it has passed the last stage. A stage stores the inputs of at most 2 P - 1 microbatches,
and the activations within its layers of one microbatch. The loss is computed outside of the stack, after the last
microbatch, so each layer runs forward three times: for the loss, for the stages' inputs, and for the activations within
the layers. GPipe with remat `full` runs each layer forward twice, and stores every layer's input for every microbatch.

Shapes: P stages, M microbatches, K = M / P microbatches of each stage, N layers of one stage.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.pipeline.loop import run_loop
from spmd_tasks.layers.pipeline.microbatches import (
  Microbatch,
  read_slot,
  send_down,
  send_up,
  slots_in_order,
  tree_read,
  tree_where,
  tree_write,
  write_slot,
)
from spmd_tasks.layers.pipeline.schedule import BackwardSchedule, Schedule
from spmd_tasks.layers.pipeline.stage import Stage, StageWeights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_one_forward_one_backward(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """Computes what `run_loop` computes for one repeat, with its own gradient rule."""
  return run_loop(stage, schedule, weights, microbatches)


def _forward(stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch) -> tuple[Any, Any]:
  return run_loop(stage, schedule, weights, microbatches), (weights, microbatches)


def _backward(
  stage: Stage, schedule: Schedule, saved: tuple[StageWeights, Microbatch], cotangents: tuple[jax.Array, Any]
) -> tuple[StageWeights, Microbatch]:
  """Returns the cotangents of the stage's weights and of x of its microbatches.

  Activations go up from the first stage; cotangents go down from the last stage, and are stored in slots of the same
  order until their turn. When the last stage reads the cotangent of a result, it writes the cotangent of an input to
  the same slot: stage 0 sent it in the tick before, around the ring of stages.
  """
  weights, microbatches = saved
  result_cotangents, aux_cotangents = cotangents
  aux_cotangents = jax.tree.map(lambda a: a[0], aux_cotangents)  # there is one repeat
  backward = BackwardSchedule(num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
  axis, p, no_repeat = stage.axis, jax.lax.axis_index(stage.axis), jnp.int32(0)
  is_first, is_last = p == 0, p == schedule.num_stages - 1
  max_in_flight = backward.max_in_flight

  def go_forward(carry, t):
    slots, below, inputs = carry
    index, is_work = backward.forward(p, t)
    leaving, arriving = read_slot(slots, t, axis)
    entering = tree_where(is_first, leaving, below)
    result, _ = stage(weights, entering, index, no_repeat, is_work)
    slots = write_slot(slots, t, arriving, result, axis)
    return slots, send_up(result, axis), tree_write(inputs, (t - p) % max_in_flight, entering)

  def go_backward(carry, t, inputs):
    slots, above, total = carry
    turn = t - backward.steady.start
    index, is_work = backward.backward(p, t)
    entered = tree_read(inputs, (t - 2 * (schedule.num_stages - 1) + p) % max_in_flight)
    _, arriving = read_slot(slots, turn, axis)
    cotangent = jnp.where(is_last, arriving, above)

    def run(layers, x):
      result, aux = stage(weights._replace(layers=layers), entered._replace(x=x), index, no_repeat, is_work)
      return result.x, aux

    _, pull_back = jax.vjp(run, weights.layers, entered.x)
    layers_cotangent, cotangent = pull_back((cotangent, aux_cotangents))
    slots = write_slot(slots, turn, arriving, above, axis)
    return slots, send_down(cotangent, axis), jax.tree.map(jnp.add, total, layers_cotangent)

  def both(carry, t):
    up, down = carry
    up = go_forward(up, t)
    return (up, go_backward(down, t, up[-1])), None

  def ticks(ticks_range):
    return jnp.arange(ticks_range.start, ticks_range.stop)

  idle = tree_read(microbatches, no_repeat)
  inputs = jax.tree.map(lambda x: jnp.stack([x] * max_in_flight), idle)
  up = (microbatches, idle, inputs)
  down = (result_cotangents, jnp.zeros_like(idle.x), jax.tree.map(jnp.zeros_like, weights.layers))
  up, _ = jax.lax.scan(lambda carry, t: (go_forward(carry, t), None), up, ticks(backward.warm_up))
  (up, down), _ = jax.lax.scan(both, (up, down), ticks(backward.steady))
  inputs = up[-1]
  down, _ = jax.lax.scan(lambda carry, t: (go_backward(carry, t, inputs), None), down, ticks(backward.cool_down))
  slots, above, layers_cotangents = down
  # The cotangent of the last input is still on its way to the last stage.
  last_turn = backward.cool_down.stop - backward.steady.start
  _, arriving = read_slot(slots, jnp.int32(last_turn), axis)
  slots = write_slot(slots, jnp.int32(last_turn), arriving, above, axis)
  return StageWeights(layers_cotangents, None), Microbatch(slots_in_order(slots, schedule.num_stages))


run_one_forward_one_backward.defvjp(_forward, _backward)
