"""Stage: runs the layers of one pipeline stage on one microbatch.

Shapes: B rows of a microbatch, M microbatches, T sequence, D model, L layers, V repeats, N layers of one stage in one
repeat.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import BatchPart, layer_scope, run_layer
from spmd_tasks.layers.pipeline.microbatches import Microbatch, tree_read, tree_where
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
    remat_policy: a name in REMAT_POLICIES: which values each layer keeps for its backward pass.
    train: whether dropout is on.
    axis: the mesh axis of the stages.
    axis_rules: without the stage axis, for the block's activations.
    num_microbatches, num_repeats: M and V.
    layers_per_repeat: L / V, without identity layers.
  """

  block: nn.Module
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
    # One trace for all calls of a schedule, of which backward passes may run outside of the LayerScope.
    return jax.jit(self._run, inline=True)

  def _run(
    self, weights: StageWeights, microbatch: Microbatch, index: jax.Array, repeat: jax.Array, is_work: jax.Array
  ) -> tuple[Microbatch, Any]:
    num_layers = jax.tree.leaves(weights.layers)[0].shape[0]
    first = jax.lax.axis_index(self.axis) * num_layers
    has_identity_layers = num_layers * jax.lax.axis_size(self.axis) > self.layers_per_repeat
    segment_ids, segment_pos = microbatch.segment_ids, microbatch.segment_pos

    def call(block, x, segment_ids, segment_pos):
      return run_layer('block', block, x, segment_ids=segment_ids, segment_pos=segment_pos, train=self.train)

    run_block = nn.apply(call, self.block)

    def layer(x, weights_and_position):
      layer_weights, position = weights_and_position
      if self.num_repeats > 1:
        layer_weights = tree_read(layer_weights, repeat)
      rngs = None
      if weights.rng is not None:
        layer_index = repeat * self.layers_per_repeat + position
        rngs = {'dropout': jax.random.fold_in(jax.random.fold_in(weights.rng, layer_index), index)}
      x = name_layer_input(x, self.remat_policy)
      is_true = position < self.layers_per_repeat
      layer_weights, block_input = gate_gradient((layer_weights, x), is_true & is_work)
      part = BatchPart(index=index, count=self.num_microbatches, is_work=is_true & is_work)
      with layer_scope(part=part):
        y, aux = run_block({'params': layer_weights}, block_input, segment_ids, segment_pos, rngs=rngs)
      return tree_where(is_true, y, x) if has_identity_layers else y, aux

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

  Returns (these leaves, a function that returns the tree with new ones in their places, and the other leaves as they
  are; or None in the others' places, with `others=None`).
  """
  leaves, structure = jax.tree.flatten(tree)
  is_floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

  def join(new: Sequence[Any], others: Sequence[Any] | None = tuple(leaves)) -> Any:
    rest = iter(new)
    kept = [None] * len(leaves) if others is None else others
    return jax.tree.unflatten(structure, [next(rest) if each else leaf for each, leaf in zip(is_floating, kept)])

  return [leaf for leaf, each in zip(leaves, is_floating) if each], join


def gate_gradient(tree: Any, is_open: jax.Array) -> Any:
  """Returns the tree unchanged; its cotangent is 0 if `is_open` is false.

  A cotangent of 0 at the output of a block is not enough: an infinite derivative turns zeros into NaNs (an identity
  layer has weights of zero), and the gradient of a balance bias does not depend on it. The results of a `where` in the
  forward pass would be kept for every tick.
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
  """The remat policy 'none' for V > 1. Slices of the weights are not kept: every tick would keep a copy."""
  return primitive.name not in ('dynamic_slice', 'squeeze')
