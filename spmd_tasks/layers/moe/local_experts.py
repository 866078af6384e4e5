"""LocalExperts: the experts that one device holds, applied to rows or to tokens.

Shapes: n tokens, k choices per token, R rows, E the experts held here, D model.
"""

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.moe.combine import combine_rows
from spmd_tasks.layers.moe.expert_ffn import grouped_ffn
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.permutation import Permutation, gather_rows, sort_by_expert
from spmd_tasks.layers.remat import ROUTING_NAME


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
    if self.num_experts < expert_ids.shape[1]:
      expert_ids, gates = _one_choice_per_expert(expert_ids, gates, self.num_experts)
    permutation = name_routing(sort_by_expert(expert_ids, self.num_experts))
    rows = self.apply_to_rows(gather_rows(x, permutation), permutation.group_sizes)
    return self.combine(rows, gates, permutation).reshape(shape)


def _one_choice_per_expert(expert_ids: jax.Array, gates: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """The assignments [n, k] as [n, E], choice e being of expert e or nowhere: fewer rows where E < k."""
  experts = jnp.arange(num_experts, dtype=expert_ids.dtype)
  is_chosen = expert_ids[:, None, :] == experts[None, :, None]  # [n, E, k]
  gates = jnp.sum(jnp.where(is_chosen, gates[:, None, :], 0.0), axis=-1)
  return jnp.where(jnp.any(is_chosen, axis=-1), experts[None, :], num_experts), gates


def name_routing(permutation: Permutation) -> Permutation:
  """The permutation under the name by which every remat policy keeps routing decisions, rather than sort again."""
  return jax.tree.map(lambda array: checkpoint_name(array, ROUTING_NAME), permutation)
