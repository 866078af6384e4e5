"""grouped_ffn: every expert's feed-forward network over its own rows.

Shapes: R rows, E experts, D model, F ffn.
"""

import jax

from spmd_tasks.layers.feed_forward import activation_function
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.grouped_matmul import grouped_matmul


def grouped_ffn(
  rows: jax.Array,
  group_sizes: jax.Array,
  weights: ExpertWeights,
  *,
  recompute_activation: bool = False,
  backend: str | None = None,
) -> jax.Array:
  """Returns [R, D]: row r through the network of its expert. Rows past the groups' end give zeros.

  Args:
    rows: [R, D], sorted by expert.
    group_sizes: int32 [E], with a sum of at most R.
    weights: of all E experts.
    recompute_activation: save the rows and the pre-activation only.
    backend: of the grouped matmuls; None for the best here.
  """
  del recompute_activation
  up = grouped_matmul(rows, weights.up, group_sizes, backend=backend)
  activation = activation_function(weights.activation)
  if weights.gate is None:
    hidden = activation(up)
  else:
    hidden = activation(grouped_matmul(rows, weights.gate, group_sizes, backend=backend)) * up
  return grouped_matmul(hidden, weights.down, group_sizes, backend=backend)
