"""Experts: the weights of E feed-forward networks of one shape.

Shapes: E experts, D model, F ffn.
"""

from typing import Any

from flax import struct
import flax.linen as nn
import jax

from spmd_tasks.layers.declaration import declare_weight
from spmd_tasks.layers.feed_forward import activation_function
from spmd_tasks.layers.initializers import FanInNormal
from spmd_tasks.sharding.specs import SplitDims


class ExpertWeights(struct.PyTreeNode):
  """The weights, in the dtype of the computation, with what is known of them.

  Expert e maps x to act(x . up[e]) . down[e], or, gated, to (act(x . gate[e]) * (x . up[e])) . down[e].

  Attributes:
    up: [E, D, F].
    down: [E, F, D].
    gate: [E, D, F], or None for a plain network.
    activation: a name in ACTIVATIONS.
    up_split_dims, down_split_dims: of `up` and `gate`, and of `down`.
  """

  up: jax.Array
  down: jax.Array
  gate: jax.Array | None
  activation: str = struct.field(pytree_node=False)
  up_split_dims: SplitDims = struct.field(pytree_node=False)
  down_split_dims: SplitDims = struct.field(pytree_node=False)


class Experts(nn.Module, kw_only=True):
  """Declares the weights `up`, `down` and, gated, `gate`, all tagged `expert`.

  Fields:
    num_experts: E.
    hidden_dim: F.
    gated: whether there is a `gate`.
    activation: a name in ACTIVATIONS.
    dtype: of the computation; weights are float32.
    init_scale, down_init_scale: variance scale of the kernels into and out of the hidden layer.
    up_split_dims, down_split_dims: the kernels'.
  """

  num_experts: int
  hidden_dim: int
  gated: bool = True
  activation: str = 'silu'
  dtype: Any = 'float32'
  init_scale: float = 1.0
  down_init_scale: float = 1.0
  up_split_dims: SplitDims = ('expert', 'expert_embed', 'expert_mlp')
  down_split_dims: SplitDims = ('expert', 'expert_mlp', 'expert_embed')

  @nn.compact
  def __call__(self, model_dim: int) -> ExpertWeights:
    """Returns the weights for inputs of `model_dim`, cast to `dtype`."""
    activation_function(self.activation)  # an unknown name fails here

    def declare(name: str, num_inputs: int, num_outputs: int, scale: float, split_dims: SplitDims) -> jax.Array:
      weight = declare_weight(
        self,
        name,
        shape=(self.num_experts, num_inputs, num_outputs),
        init=FanInNormal(scale=scale, num_stacked_dims=1),
        split_dims=split_dims,
        tags=('expert',),
      )
      return weight.astype(self.dtype)

    gate = declare('gate', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims) if self.gated else None
    return ExpertWeights(
      up=declare('up', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims),
      down=declare('down', self.hidden_dim, model_dim, self.down_init_scale, self.down_split_dims),
      gate=gate,
      activation=self.activation,
      up_split_dims=self.up_split_dims,
      down_split_dims=self.down_split_dims,
    )
