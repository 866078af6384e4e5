"""batched_ffn: every expert's feed-forward network over as many rows as every other's.

Shapes: E experts, D model, F ffn.
"""

import jax
import jax.numpy as jnp

from spmd_tasks.layers.feed_forward import activation_function
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

  activation = activation_function(weights.activation)
  up = constrain(multiply(rows, weights.up), hidden_split_dims)
  if weights.gate is None:
    hidden = activation(up)
  else:
    hidden = activation(constrain(multiply(rows, weights.gate), hidden_split_dims)) * up
  return multiply(hidden, weights.down)
