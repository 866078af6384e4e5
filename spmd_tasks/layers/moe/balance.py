"""Losses that balance the experts' load, and statistics of a routing: explicit outputs of each layer.

All of them are functions of sums over tokens, so that parts of a batch can be added up first (layers/statistics.py).
They leave padding out, read the decision before any token is dropped, and are 0 for a batch of padding only.

Shapes: B batch, T sequence, E experts, k choices per token; G groups of S tokens, C slots per expert and group;
N shards of the batch.
"""

from collections.abc import Mapping
import itertools

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.layers.statistics import Statistics


class RoutingSums(Statistics):
  """Sums over the real tokens of each of N shards of the batch, float32. `scores` and `z` carry gradients.

  Attributes:
    num_tokens: scalar, over all shards.
    shard_tokens: [N].
    scores: [N, E].
    entropy: [N].
    z: [N], squares of the log-normalizers.
    counts: [N, E], assignments per expert.
    chosen_scores: [N], over all assignments.
    fractions: name -> scalar, sums over assignments of what a computation reports as a fraction of them.
    divide_by_k: see `load_balance_loss`.
  """

  shard_tokens: jax.Array
  scores: jax.Array
  entropy: jax.Array
  z: jax.Array
  counts: jax.Array
  chosen_scores: jax.Array
  fractions: dict[str, jax.Array] = struct.field(default_factory=dict)
  divide_by_k: bool = struct.field(pytree_node=False, default=False)

  def with_fractions(self, fractions: Mapping[str, jax.Array]) -> 'RoutingSums':
    """Adds fractions of the assignments: what a computation drops, for example."""
    num_assigned = jnp.sum(self.counts)
    return self.replace(fractions={name: fraction * num_assigned for name, fraction in fractions.items()})

  def values(self) -> dict[str, jax.Array]:
    """`load_balance_loss`, `router_z_loss`, `routing_statistics` and the fractions."""
    num_assigned = jnp.sum(self.counts)
    losses = {'load_balance_loss': load_balance_loss(self), 'router_z_loss': router_z_loss(self)}
    return losses | routing_statistics(self) | {name: _mean(x, num_assigned) for name, x in self.fractions.items()}


def _sum_shards(columns: list[jax.Array], num_shards: int) -> list[jax.Array]:
  """Columns [B, ...] to their sums [N, ...], by one reduction: over a sharded B one all-reduce for all of them."""
  num_rows = columns[0].shape[0]
  if num_shards < 1 or num_rows % num_shards:
    raise UserError(
      f'num_shards={num_shards} must be positive and divide the {num_rows} rows (or groups) of the batch: statistics '
      'are taken per equal part.'
    )
  flat = [column.reshape(num_rows, -1) for column in columns]
  sums = jnp.sum(jnp.concatenate(flat, axis=1).reshape(num_shards, num_rows // num_shards, -1), axis=1)
  parts = jnp.split(sums, list(itertools.accumulate(column.shape[1] for column in flat[:-1])), axis=1)
  return [part.reshape(num_shards, *column.shape[1:]) for part, column in zip(parts, columns, strict=True)]


def _token_columns(routing: RouterOutput) -> list[jax.Array]:
  """Per row: number of real tokens [B], and the sums over them of scores [B, E], entropy [B] and z [B]."""
  scores = routing.scores
  per_token = {
    'num_tokens': jnp.ones(scores.shape[:2], jnp.float32),
    'entropy': jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(scores)), axis=-1),
    'z': jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)),
  }
  if routing.token_mask is not None:
    mask = routing.token_mask
    per_token = {name: jnp.where(mask, x, 0.0) for name, x in per_token.items()}
    scores = jnp.where(mask[..., None], scores, 0.0)
  rows = {name: jnp.sum(x, axis=1) for name, x in per_token.items()}
  return [rows['num_tokens'], jnp.sum(scores, axis=1), rows['entropy'], rows['z']]


def _assignment_columns(routing: RouterOutput) -> list[jax.Array]:
  """Per row or group: assignments per expert, [B or G, E], and the sum of the chosen scores, [B or G]."""
  num_experts = routing.scores.shape[-1]
  if routing.slots is not None:
    tokens_per_group = routing.scores[..., 0].size // routing.slots.token_ids.shape[0]
    filled = (routing.slots.token_ids < tokens_per_group).astype(jnp.float32)
    # An expert's gate is its score, see expert_choice.py.
    return [jnp.sum(filled, axis=2), jnp.sum(jax.lax.stop_gradient(routing.slots.gates), axis=(1, 2))]
  assert routing.expert_ids is not None
  # Comparisons, not a scatter, which is slow on TPUs; choice by choice, because a CPU writes [B, T, k, E] out, which
  # takes 14 times as long for 8 choices of 256.
  experts = jnp.arange(num_experts)[None, None, :]
  choices = [routing.expert_ids[..., i, None] == experts for i in range(routing.expert_ids.shape[-1])]
  assigned = sum((chosen.astype(jnp.float32) for chosen in choices), start=jnp.zeros_like(routing.scores))  # [B, T, E]
  return [jnp.sum(assigned, axis=1), jnp.sum(assigned * jax.lax.stop_gradient(routing.scores), axis=(1, 2))]


def routing_sums(routing: RouterOutput, *, num_shards: int = 1, divide_by_k: bool = False) -> RoutingSums:
  """The sums for a batch.

  Args:
    routing: of the batch.
    num_shards: N; the balance loss takes f and P over each N-th of the batch's rows apart, and is the mean over them. 1
      is over all tokens. T5X has one value per group and MegaBlocks one per data-parallel process; here the numbers do
      not depend on the mesh.
    divide_by_k: see `load_balance_loss`.

  Raises:
    UserError: num_shards does not divide the batch.
  """
  tokens, assignments = _token_columns(routing), _assignment_columns(routing)
  if routing.slots is None:
    sums = _sum_shards(tokens + assignments, num_shards)
  else:
    sums = _sum_shards(tokens, num_shards) + _sum_shards(assignments, num_shards)
  num_tokens, scores, entropy, z, counts, chosen_scores = sums
  return RoutingSums(
    num_tokens=jnp.sum(num_tokens),
    shard_tokens=num_tokens,
    scores=scores,
    entropy=entropy,
    z=z,
    counts=counts,
    chosen_scores=chosen_scores,
    divide_by_k=divide_by_k,
  )


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
  """Total / count, and 0 where nothing was counted; counts are whole numbers."""
  return total / jnp.maximum(count, 1.0)


def load_balance_loss(sums: RoutingSums) -> jax.Array:
  """E * sum over experts of f * P, float32 scalar: the least where the load and the scores are even.

  f is the number of an expert's assignments per token, P its mean score. The gradient flows through P only. Perfectly
  even f and P give k (GShard: Lepikhin et al., 2020; Switch: Fedus et al., 2022), or, with `divide_by_k`, 1. The mean
  of the latter over L layers of n tokens each is E / (L * n * k) times the dot product of all layers' counts with all
  layers' mean scores: MegaBlocks' formula (Gale et al., 2022). k is the mean number of assignments per token, which
  need not be whole where experts choose.
  """
  num_tokens = sums.shard_tokens[:, None]
  num_assigned = jnp.sum(sums.counts, axis=1, keepdims=True) if sums.divide_by_k else num_tokens
  products = _mean(sums.counts, num_assigned) * _mean(sums.scores, num_tokens)
  return sums.counts.shape[-1] * jnp.mean(jnp.sum(products, axis=1))


def router_z_loss(sums: RoutingSums) -> jax.Array:
  """Mean over tokens of logsumexp(logits)^2, float32 scalar: keeps logits small (ST-MoE: Zoph et al., 2022)."""
  return _mean(jnp.sum(sums.z), sums.num_tokens)


def routing_statistics(sums: RoutingSums) -> dict[str, jax.Array]:
  """What a run reports of a routing, float32 without gradients.

  Returns:
    expert_load: [E], each expert's fraction of all assignments, with sum 1.
    max_expert_load: E times the greatest of them; 1 is perfect balance, E is collapse.
    router_entropy: mean over tokens of the entropy of their scores, in nats; log(E) where they are even.
    router_confidence: mean over assignments of the chosen expert's score. T5X (flaxformer, MoeLayer) has the mean gate
      of the assignments that were not dropped; this is the same where none is and gates are scores. Of normalized
      gates the mean is 1/k whatever the router does.
  """
  counts, entropy, chosen_scores = jax.lax.stop_gradient((sums.counts, sums.entropy, sums.chosen_scores))
  num_assigned = jnp.sum(counts)
  load = _mean(jnp.sum(counts, axis=0), num_assigned)
  return {
    'expert_load': load,
    'max_expert_load': load.size * jnp.max(load),
    'router_entropy': _mean(jnp.sum(entropy), sums.num_tokens),
    'router_confidence': _mean(jnp.sum(chosen_scores), num_assigned),
  }
