"""Runs the schedules. `run_loop` is gpipe and circular: one scan over ticks, which JAX differentiates.

Its backward pass is the same loop in reverse, with the same bubbles. Every tick of the forward pass keeps the values
that the layers' remat policy selects, so memory grows with M.

`run_one_forward_one_backward` stores one activation per microbatch, whatever the layers are: what enters the stage. In
a tick of its backward pass each stage runs one microbatch forward, for the activations within its layers, and at once
backward. So these activations are stored of one microbatch only, and each layer runs forward twice. The loss is
computed outside of the stack, after the last microbatch, so no stage can begin the backward pass earlier.

Shapes: P stages, M microbatches, K = M / P microbatches of each stage, V repeats, N layers of one stage in one repeat.
"""

import functools
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from spmd_tasks.layers.pipeline.microbatches import (
  Microbatch,
  read_slot,
  send,
  slots_in_order,
  tree_read,
  tree_where,
  tree_write,
  write_slot,
)
from spmd_tasks.layers.pipeline.schedule import Schedule
from spmd_tasks.layers.pipeline.stage import Stage, StageWeights, split_by_gradient


def run_loop(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """Runs one stage's part of the pipeline, in a region that is manual over the stage axis.

  `microbatches` are the K of this stage, stacked. Returns (x of them after all layers, the aux of this stage's layers
  [V, N, ...] summed over all microbatches).
  """
  return _run(stage, schedule, weights, microbatches, keep_inputs=False)[0]


def _run(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch, *, keep_inputs: bool
) -> tuple[tuple[jax.Array, Any], Any]:
  """Returns (what `run_loop` returns, what entered the stage in each tick, [ticks, ...], or None)."""
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
    if total.size:
      flat = jax.vmap(lambda aux: ravel_pytree(aux)[0])(aux)
      added = jnp.where(is_work, flat, 0)  # a bubble adds nothing, not even a NaN
      total = total + added[None] if len(total) == 1 else total.at[repeat].add(added)
    carry = (slots, send(result, axis, 1), delayed, total)
    return carry, entering if keep_inputs else None

  zero = jnp.int32(0)
  abstract_aux = jax.eval_shape(stage, weights, idle, zero, zero, zero == 0)[1]  # leaves [N, ...]
  # All statistics are in one array [V, N, numbers], so that one addition sums them.
  numbers, unflatten = ravel_pytree(jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), abstract_aux))
  num_layers = jax.tree.leaves(weights.layers)[0].shape[0]
  total = jnp.zeros((schedule.num_repeats, num_layers, numbers.size), jnp.float32)
  delayed = jax.tree.map(lambda x: jnp.stack([x] * (delay + 1)), idle) if is_circular else None
  carry = (microbatches, idle, delayed, total)
  (slots, _, _, total), inputs = jax.lax.scan(tick, carry, jnp.arange(schedule.num_ticks))
  aux = jax.vmap(jax.vmap(unflatten))(total) if total.size else abstract_aux
  return (slots_in_order(slots.x, schedule.num_stages - 1), aux), inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_one_forward_one_backward(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """Computes what `run_loop` computes for one repeat, with its own gradient rule."""
  return run_loop(stage, schedule, weights, microbatches)


def _forward(stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch) -> tuple[Any, Any]:
  result, inputs = _run(stage, schedule, weights, microbatches, keep_inputs=True)
  return result, (weights, inputs)


def _backward(
  stage: Stage, schedule: Schedule, saved: tuple[StageWeights, Microbatch], cotangents: tuple[jax.Array, Any]
) -> tuple[StageWeights, Microbatch]:
  """Returns the cotangents of the stage's weights and of x of its microbatches.

  Cotangents go down from the last stage, and are stored in slots until their turn. When the last stage reads the
  cotangent of a result, it writes the cotangent of an input to the same slot: stage 0 sent it in the tick before.
  """
  weights, inputs = saved
  result_cotangents, aux_cotangents = cotangents
  aux_cotangents = jax.tree.map(lambda a: a[0], aux_cotangents)  # there is one repeat
  axis, p = stage.axis, jax.lax.axis_index(stage.axis)
  is_last = p == schedule.num_stages - 1

  floating, join = split_by_gradient(weights.layers)

  def work(t):  # the forward pass from the other end
    return schedule.work(schedule.num_stages - 1 - p, t)

  def read_entered(t):
    index, _, _ = work(t)
    return tree_read(inputs, index + p)  # the tick in which the microbatch entered this stage

  def tick(carry, t):
    # What entered is read one tick ahead. Read in the tick itself, XLA's CPU compiler would fuse the read into every
    # operation that needs it, down to each element of the attention mask.
    slots, above, entered, total = carry
    index, repeat, is_work = work(t)
    _, arriving = read_slot(slots, t, axis)
    cotangent = jnp.where(is_last, arriving, above)

    def run(floating, x):
      result, aux = stage(weights._replace(layers=join(floating)), entered._replace(x=x), index, repeat, is_work)
      return result.x, aux

    _, pull_back = jax.vjp(run, floating, entered.x)
    layers_cotangent, cotangent = pull_back((cotangent, aux_cotangents))
    slots = write_slot(slots, t, arriving, above, axis)
    total = jax.tree.map(jnp.add, total, layers_cotangent)
    return (slots, send(cotangent, axis, -1), read_entered(t + 1), total), None

  first = read_entered(jnp.int32(0))
  carry = (result_cotangents, jnp.zeros_like(first.x), first, jax.tree.map(jnp.zeros_like, floating))
  (slots, above, _, layers_cotangents), _ = jax.lax.scan(tick, carry, jnp.arange(schedule.num_ticks))
  # The cotangent of the last input is still on its way to the last stage.
  last = jnp.int32(schedule.num_ticks)
  _, arriving = read_slot(slots, last, axis)
  slots = write_slot(slots, last, arriving, above, axis)
  ordered = slots_in_order(slots, schedule.num_stages)
  return StageWeights(join(layers_cotangents, others=None), None), Microbatch(ordered)


run_one_forward_one_backward.defvjp(_forward, _backward)
