"""Runs a stage's layers, and the schedules.

`Stage` runs the layers of one stage on one microbatch, in a tick.

`run_loop` implements gpipe and circular: one scan over ticks, which JAX differentiates. Its backward pass is the same
loop in reverse, with the same bubbles. Every tick of the forward pass saves the values that the layers' remat policy
selects, so memory grows with M.

`run_one_forward_one_backward` saves one activation per microbatch: the input of the stage. In each tick of its backward
pass, a stage runs one microbatch forward again, to recompute the activations within its layers, and then backward. So
these activations are held for one microbatch at a time, and each layer runs forward twice. The loss is computed outside
of the stack, after the last microbatch, so no stage can begin the backward pass earlier.

Shapes: B rows of a microbatch, T sequence, D model, L layers, P stages, M microbatches, K = M / P microbatches of each
stage, V repeats, N layers of one stage in one repeat.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from spmd_tasks.layers.base import BatchPart, layer_scope, run_layer
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
from spmd_tasks.layers.transformer import name_layer_input, remat_policy
from spmd_tasks.sharding import AxisRules
from spmd_tasks.sharding.specs import sharding_scope


class StageWeights(NamedTuple):
  """The weights of one stage, [N, ...] or [N, V, ...] for several repeats, and the rng of dropout, an array or None."""

  layers: Any
  rng: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """One stage of a pipeline, called in a region that is manual over the stage axis.

  The device's index along the stage axis is the number of the stage. If P does not divide the layers, identity layers
  fill up the last stages, which then have fewer true layers, or none.

  Attributes:
    block: unbound template of the layers.
    path: of the block in the model.
    remat_policy: a name in REMAT_POLICIES: which values each layer keeps for its backward pass.
    train: whether dropout is on.
    axis: the mesh axis of the stages.
    axis_rules: without the stage axis, for the block's activations.
    num_microbatches, num_repeats: M and V.
    layers_per_repeat: L / V, without identity layers.
  """

  block: nn.Module
  path: tuple[str, ...]
  remat_policy: str
  train: bool
  axis: str
  axis_rules: AxisRules
  num_microbatches: int
  layers_per_repeat: int
  num_repeats: int

  def __call__(
    self, weights: StageWeights, microbatch: Microbatch, index: jax.Array, repeat: jax.Array, is_work: jax.Array
  ) -> tuple[Microbatch, Any]:
    """Returns (the microbatch with the stage's output as x, the block's aux with a dim [N] in front).

    Args:
      weights, microbatch: of this stage, and its input.
      index: the number of the microbatch. Dropout masks depend on it and on the layer only.
      repeat: in [0, V).
      is_work: False in a bubble, which contributes no gradient, whatever the cotangents and the block's derivatives.
    """
    return self._traced_once(weights, microbatch, index, repeat, is_work)

  @functools.cached_property
  def _traced_once(self) -> Callable[..., tuple[Microbatch, Any]]:
    # Traced once for all calls of a schedule: a backward pass may run outside of the LayerScope.
    return jax.jit(self._run, inline=True)

  def _run(
    self, weights: StageWeights, microbatch: Microbatch, index: jax.Array, repeat: jax.Array, is_work: jax.Array
  ) -> tuple[Microbatch, Any]:
    num_layers = jax.tree.leaves(weights.layers)[0].shape[0]
    first = jax.lax.axis_index(self.axis) * num_layers
    has_identity_layers = num_layers * jax.lax.axis_size(self.axis) > self.layers_per_repeat
    segment_ids, segment_pos = microbatch.segment_ids, microbatch.segment_pos

    def run_block(layer_weights, x, rngs):
      # What nn.apply does, but below the block's path in the model, by which `task.quantization` finds a Linear.
      scope = flax.core.Scope({'params': layer_weights}, rngs=rngs, path=self.path)
      block = self.block.clone(parent=scope, _deep_clone=True)
      return run_layer('block', block, x, segment_ids=segment_ids, segment_pos=segment_pos, train=self.train)

    def layer(x, weights_and_position):
      layer_weights, position = weights_and_position
      if self.num_repeats > 1:
        layer_weights = tree_read(layer_weights, repeat)
      rngs = None
      if weights.rng is not None:
        layer_index = repeat * self.layers_per_repeat + position
        rngs = {'dropout': jax.random.fold_in(jax.random.fold_in(weights.rng, layer_index), index)}
      x = name_layer_input(x, self.remat_policy)
      is_real = position < self.layers_per_repeat
      layer_weights, block_input = gate_gradient((layer_weights, x), is_real & is_work)
      part = BatchPart(index=index, count=self.num_microbatches, is_work=is_real & is_work)
      with layer_scope(part=part):
        y, aux = run_block(layer_weights, block_input, rngs)
      return tree_where(is_real, y, x) if has_identity_layers else y, aux

    policy = remat_policy(self.remat_policy)
    if policy is None and self.num_repeats > 1:
      policy = _keep_all_but_slices
    if policy is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    mesh: Any = jax.sharding.get_abstract_mesh()  # the mesh inside shard_map, whose stage axis is manual
    with sharding_scope(mesh, self.axis_rules):
      x, aux = jax.lax.scan(layer, microbatch.x, (weights.layers, first + jnp.arange(num_layers)))
    return microbatch._replace(x=x), aux


def split_by_gradient(tree: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
  """Splits off the leaves that can have gradients: quantized weights are integers, which have none.

  Returns (these leaves, join). `join(new)` returns the tree with `new` in their places; `join(new, others=None)` has
  None in place of the other leaves.
  """
  leaves, structure = jax.tree.flatten(tree)
  is_floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

  def join(new: Sequence[Any], others: Sequence[Any] | None = tuple(leaves)) -> Any:
    rest = iter(new)
    fixed = [None] * len(leaves) if others is None else others
    joined = [next(rest) if floating else leaf for floating, leaf in zip(is_floating, fixed)]
    return jax.tree.unflatten(structure, joined)

  return [leaf for leaf, floating in zip(leaves, is_floating) if floating], join


def gate_gradient(tree: Any, is_open: jax.Array) -> Any:
  """Returns the tree unchanged; its cotangent is 0 if `is_open` is false.

  A cotangent of 0 at the output of a block is not enough: an infinite derivative turns zeros into NaNs (an identity
  layer has weights of zero), and the gradient of a balance bias does not depend on it. The results of a `where` in the
  forward pass would be saved for every tick.
  """
  floating, join = split_by_gradient(tree)
  return join(_gate(floating, is_open))


@jax.custom_vjp
def _gate(tree: Any, is_open: jax.Array) -> Any:
  del is_open
  return tree


_gate.defvjp(
  lambda tree, is_open: (tree, is_open),
  lambda is_open, cotangents: (jax.tree.map(lambda c: jnp.where(is_open, c, 0), cotangents), None),
)


def _keep_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
  """The remat policy 'none' for V > 1. Slices of the weights are not saved: every tick would save a copy."""
  return primitive.name not in ('dynamic_slice', 'squeeze')


def run_loop(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch
) -> tuple[jax.Array, Any]:
  """Runs one stage's part of the pipeline, in a region that is manual over the stage axis.

  `microbatches` are the K microbatches of this stage, stacked. Returns (their x after all layers, the aux of this
  stage's layers [V, N, ...], summed over all microbatches).
  """
  return _run(stage, schedule, weights, microbatches, keep_inputs=False)[0]


def _run(
  stage: Stage, schedule: Schedule, weights: StageWeights, microbatches: Microbatch, *, keep_inputs: bool
) -> tuple[tuple[jax.Array, Any], Any]:
  """Returns (the result of `run_loop`, the input of the stage in each tick, [ticks, ...], or None)."""
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
    # The stage's input is read one tick ahead. If it were read in the tick itself, XLA's CPU compiler would fuse the
    # read into every operation that needs it, down to each element of the attention mask.
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
