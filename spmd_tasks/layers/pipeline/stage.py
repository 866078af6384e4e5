"""What one stage of a pipeline does to one microbatch: its layers in sequence.

Shapes: B rows of a microbatch, T sequence, D model, L layers, V repeats, N layers of one stage in one repeat.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.pipeline.stream import select, take
from spmd_tasks.layers.remat import remat_policy
from spmd_tasks.sharding.specs import AxisRules, sharding_scope


class Microbatch(NamedTuple):
  """What travels from stage to stage: x [B, T, D], and int32 [B, T] or None as blocks take them."""

  x: jax.Array
  segment_ids: jax.Array | None = None
  segment_pos: jax.Array | None = None


class StageWeights(NamedTuple):
  """One stage's weights, [N, ...] or, of several repeats, [N, V, ...]; and the rng of dropout, an array or None."""

  layers: Any
  rng: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A stage, called in a region that is manual over the stage axis; which one it is, the device knows.

  Layers that do not divide the stages are filled up with identity layers, which leave x as it is: the last stages have
  fewer true layers, or none.

  Attributes:
    block: unbound template of the layers.
    remat_policy: what each layer keeps for its backward pass.
    train: whether dropout is on.
    axis: the mesh axis of the stages.
    axis_rules: of the automatic axes, under which the block's activations are laid out.
    layers_per_repeat: L / V, without identity layers.
    num_repeats: V.
  """

  block: nn.Module
  remat_policy: str
  train: bool
  axis: str
  axis_rules: AxisRules
  layers_per_repeat: int
  num_repeats: int

  def __call__(
    self, weights: StageWeights, microbatch: Microbatch, index: jax.Array, repeat: jax.Array, is_work: jax.Array
  ) -> tuple[Microbatch, Any]:
    """Returns (the microbatch with the stage's x, the block's aux with a dim [N] in front).

    Args:
      weights: of this stage.
      microbatch: the stage's input.
      index: which microbatch it is; its dropout depends on this and the layer, on nothing else.
      repeat: in [0, V).
      is_work: False in a bubble, from which no gradient comes, whatever the cotangents and the block's derivatives.
    """
    num_layers = jax.tree.leaves(weights.layers)[0].shape[0]
    first = jax.lax.axis_index(self.axis) * num_layers
    has_identity_layers = num_layers * jax.lax.axis_size(self.axis) > self.layers_per_repeat
    segment_ids, segment_pos = microbatch.segment_ids, microbatch.segment_pos

    def layer(x, weights_and_position):
      layer_weights, position = weights_and_position
      if self.num_repeats > 1:
        layer_weights = take(layer_weights, repeat)
      rngs = None
      if weights.rng is not None:
        layer_index = repeat * self.layers_per_repeat + position
        rngs = {'dropout': jax.random.fold_in(jax.random.fold_in(weights.rng, layer_index), index)}
      is_true = position < self.layers_per_repeat
      layer_weights, block_input = gate_gradient((layer_weights, x), is_true & is_work)
      y, aux = self.block.apply(
        {'params': layer_weights}, block_input, segment_ids, segment_pos, train=self.train, rngs=rngs
      )
      return select(is_true, y, x) if has_identity_layers else y, aux

    policy = remat_policy(self.remat_policy)
    if policy is None and self.num_repeats > 1:
      policy = _keep_all_but_slices
    if policy is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    mesh: Any = jax.sharding.get_abstract_mesh()  # as it is in here, with a manual axis
    with sharding_scope(mesh, self.axis_rules):
      x, aux = jax.lax.scan(layer, microbatch.x, (weights.layers, first + jnp.arange(num_layers)))
    return microbatch._replace(x=x), aux


@jax.custom_vjp
def gate_gradient(tree: Any, is_open: jax.Array) -> Any:
  """Returns the tree; its cotangent is 0 where the gate is not open.

  A cotangent of 0 at the other end of a block does not ensure that: an infinite derivative makes NaNs of zeros (an
  identity layer has weights of zero), and a balance bias has a gradient that no cotangent scales. A `where` in the
  forward pass would do the same, but its results, which differ from tick to tick, would be kept for each.
  """
  del is_open
  return tree


def _gate_forward(tree: Any, is_open: jax.Array) -> tuple[Any, jax.Array]:
  return tree, is_open


def _gate_backward(is_open: jax.Array, cotangents: Any) -> tuple[Any, None]:
  return jax.tree.map(lambda c: jnp.where(is_open, c, 0), cotangents), None


gate_gradient.defvjp(_gate_forward, _gate_backward)


def _keep_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
  """The remat policy 'none' for repeats, whose slices of the weights would be kept once for every tick."""
  return primitive.name not in ('dynamic_slice', 'squeeze')
