"""LocalExperts: the experts that one device holds, applied to rows or to tokens.

Shapes: n tokens, k choices per token, R rows, E the experts held here, D model.
"""

from flax import struct
import jax

from spmd_tasks.layers.moe.combine import combine_rows
from spmd_tasks.layers.moe.expert_ffn import grouped_ffn
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.permutation import Permutation, gather_rows, sort_by_expert


class LocalExperts(struct.PyTreeNode):
  """Some experts' weights and how to compute with them.

  Attributes:
    weights: of E experts.
    recompute_activation: see `grouped_ffn`.
    saved_bits: see `combine_rows`.
    backend: see `grouped_matmul`.
  """

  weights: ExpertWeights
  recompute_activation: bool = struct.field(pytree_node=False)
  saved_bits: int | None = struct.field(pytree_node=False)
  backend: str | None = struct.field(pytree_node=False)

  @property
  def num_experts(self) -> int:
    return self.weights.up.shape[0]

  def apply_to_rows(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[R, D] for rows [R, D] sorted by expert; group_sizes is int32 [E]."""
    return grouped_ffn(
      rows, group_sizes, self.weights, recompute_activation=self.recompute_activation, backend=self.backend
    )

  def combine(self, rows: jax.Array, gates: jax.Array, permutation: Permutation) -> jax.Array:
    """[n, D], each token's rows summed by their gates float32 [n, k]."""
    return combine_rows(rows, gates, permutation, saved_bits=self.saved_bits)

  def apply_to_tokens(self, x: jax.Array, expert_ids: jax.Array, gates: jax.Array) -> jax.Array:
    """Each token's sum over its experts' results by their gates.

    Args:
      x: [..., D], with the same leading dims as the others.
      expert_ids: int32 [..., k] in [0, E]; E is nowhere.
      gates: float32 [..., k], 0 for nowhere.
    """
    shape = x.shape
    x, expert_ids, gates = (array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
    permutation = sort_by_expert(expert_ids, self.num_experts)
    rows = self.apply_to_rows(gather_rows(x, permutation), permutation.group_sizes)
    return self.combine(rows, gates, permutation).reshape(shape)
