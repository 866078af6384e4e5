"""batched_ffn: every expert's feed-forward network over as many rows as every other's.

Shapes: E experts, D model, F ffn.
"""

import jax
import jax.numpy as jnp

from spmd_tasks.layers.feed_forward import hidden_layer
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.sharding.specs import SplitDims, constrain


def batched_ffn(rows: jax.Array, weights: ExpertWeights, *, hidden_split_dims: SplitDims = None) -> jax.Array:
  """[E, ..., D]: rows [E, ..., D] of each expert through its network, in the rows' dtype.

  Args:
    rows: in the dtype of the computation.
    weights: of all E experts.
    hidden_split_dims: of the hidden layer [E, ..., F].
  """

  def multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    return jnp.einsum('e...i,eio->e...o', rows, kernels)

  up = constrain(multiply(rows, weights.up), hidden_split_dims)
  gate = None if weights.gate is None else constrain(multiply(rows, weights.gate), hidden_split_dims)
  return multiply(hidden_layer(weights.activation, up, gate), weights.down)
