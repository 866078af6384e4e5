"""grouped_ffn: every expert's feed-forward network over rows sorted by expert.

Shapes: R rows, E experts, D model, F ffn.
"""

import jax

from spmd_tasks.layers.feed_forward import hidden_layer
from spmd_tasks.layers.moe.expert_ffn_loop import ffn_by_loop
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.grouped_matmul import grouped_matmul, resolve_backend


def grouped_ffn(
  rows: jax.Array,
  group_sizes: jax.Array,
  weights: ExpertWeights,
  *,
  recompute_activation: bool = False,
  backend: str | None = None,
) -> jax.Array:
  """Returns [R, D], in the rows' dtype: each row through its expert's network.

  Rows past the groups' end give zeros and take no gradient, whatever they hold.

  Args:
    rows: [R, D], sorted by expert.
    group_sizes: int32 [E], with a sum of at most R.
    weights: of all E experts, in the rows' dtype.
    recompute_activation: save the rows and the pre-activation [R, F] only, and compute the activation again in the
      backward pass (MegaBlocks' memory-optimised form). The backend 'loop' always does: there it is also faster.
    backend: of the grouped matmuls; see `grouped_matmul`.
  """
  backend = resolve_backend(backend)
  if backend == 'loop':
    return ffn_by_loop(rows, group_sizes, weights)

  def multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    return grouped_matmul(rows, kernels, group_sizes, backend=backend)

  up = multiply(rows, weights.up)
  gate = None if weights.gate is None else multiply(rows, weights.gate)

  def project_down(up: jax.Array, gate: jax.Array | None, down: jax.Array) -> jax.Array:
    return multiply(hidden_layer(weights.activation, up, gate), down)

  if recompute_activation:
    project_down = jax.checkpoint(project_down)  # its gradients need the hidden layer, but not its result again
  return project_down(up, gate, weights.down)
