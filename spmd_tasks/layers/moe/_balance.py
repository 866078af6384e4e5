"""Balances the experts' load: auxiliary losses, statistics, and a bias that needs no loss.

Shapes: B batch, T sequence, E experts, k choices per token; G groups of S tokens, C slots per expert and group;
N shards of the batch.

All losses and statistics are functions of sums over tokens (`RoutingSums`), so that a pipeline adds the sums of its
microbatches first. The sums leave padding out and count the router's choices before any are dropped. For a batch of
padding only, all losses and statistics are 0.

The bias (Wang et al., 2024; DeepSeek-V3) is added to the scores for the choice of experts only. After every step it
moves by a fixed rate: up for experts below the mean load, down for experts above. The model reports the load as the
bias's *gradient*, a sum over tokens in whole numbers, because a step has no other state beside the weights. The learner
moves weights tagged `balance_bias` by `-rate * sign(gradient)`, outside the optimizer, clipping and norms.
"""

from collections.abc import Mapping
import itertools
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Statistics, current_layer_scope
from spmd_tasks.layers.moe._router import RouterOutput


class RoutingSums(Statistics):
  """Sums over the real tokens of each of N shards of the batch, float32. Only `scores` and `z` have gradients.

  Attributes:
    num_tokens: scalar, over all shards.
    shard_tokens, entropy: [N].
    scores: [N, E].
    z: [N], squares of the log-normalizers.
    counts: [N, E], assignments per expert.
    chosen_scores: [N], over all assignments.
    ratios: name -> (numerator, denominator), scalars, of values that a computation reports as ratios of two sums.
    divide_by_k: see `load_balance_loss`.
    is_balanced: whether experts chose, so that their load is even and there is no balance loss.
  """

  shard_tokens: jax.Array
  scores: jax.Array
  entropy: jax.Array
  z: jax.Array
  counts: jax.Array
  chosen_scores: jax.Array
  ratios: Mapping[str, tuple[jax.Array, jax.Array]] = struct.field(default_factory=dict)
  divide_by_k: bool = struct.field(pytree_node=False, default=False)
  is_balanced: bool = struct.field(pytree_node=False, default=False)

  def values(self) -> dict[str, jax.Array]:
    """Returns `load_balance_loss`, `router_z_loss`, the `routing_statistics` and the ratios."""
    balance = jnp.zeros((), jnp.float32) if self.is_balanced else load_balance_loss(self)
    losses = {'load_balance_loss': balance, 'router_z_loss': router_z_loss(self)}
    return losses | routing_statistics(self) | {name: _mean(*ratio) for name, ratio in self.ratios.items()}


def routing_sums(routing: RouterOutput, *, num_shards: int = 1, divide_by_k: bool = False) -> RoutingSums:
  """Sums the routing decision of a batch, or of the current `BatchPart` of one, over its tokens.

  The balance loss takes f and P over each of `num_shards` equal parts of the whole batch's tokens and is the mean over
  these shards; 1 takes them over all tokens. T5X computes one loss per group and MegaBlocks one per data-parallel
  process; here the numbers do not depend on the mesh. Raises a UserError if num_shards does not divide the batch.
  """
  routing = _cut_rows(routing, num_shards)
  tokens, assignments = _token_columns(routing), _assignment_columns(routing)
  if routing.slots is None:
    sums = _sum_shards(tokens | assignments, num_shards)
  else:
    sums = _sum_shards(tokens, num_shards) | _sum_shards(assignments, num_shards)
  num_tokens, is_balanced = jnp.sum(sums['shard_tokens']), routing.slots is not None
  return RoutingSums(num_tokens=num_tokens, **sums, divide_by_k=divide_by_k, is_balanced=is_balanced)


def _cut_rows(routing: RouterOutput, num_shards: int) -> RouterOutput:
  """Returns the routing with rows so short that each lies in one of `num_shards` shards of the whole batch's tokens."""
  num_rows, length, _ = routing.scores.shape
  num_tokens = num_rows * length * current_layer_scope().part.count
  if num_shards < 1 or num_tokens % num_shards or length == (piece := math.gcd(num_tokens // num_shards, length)):
    return routing
  cut = {
    name: None if (x := getattr(routing, name)) is None else x.reshape(-1, piece, *x.shape[2:])
    for name in ('logits', 'scores', 'token_mask', 'expert_ids', 'gates')
  }
  return routing.replace(**cut)


def _token_columns(routing: RouterOutput) -> dict[str, jax.Array]:
  """Returns per row the number of real tokens [B], and sums over them of scores [B, E], entropy [B] and z [B]."""
  scores = routing.scores
  per_token = {
    'shard_tokens': jnp.ones(scores.shape[:2], jnp.float32),
    'entropy': jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(scores)), axis=-1),
    'z': jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)),
  }
  if routing.token_mask is not None:
    mask = routing.token_mask
    per_token = {name: jnp.where(mask, x, 0.0) for name, x in per_token.items()}
    scores = jnp.where(mask[..., None], scores, 0.0)
  return {name: jnp.sum(x, axis=1) for name, x in (per_token | {'scores': scores}).items()}


def _assignment_columns(routing: RouterOutput) -> dict[str, jax.Array]:
  """Returns per row or group the assignments per expert, [B or G, E], and the sum of the chosen scores, [B or G]."""
  num_experts = routing.scores.shape[-1]
  if routing.slots is not None:
    tokens_per_group = routing.scores[..., 0].size // routing.slots.token_ids.shape[0]
    filled = (routing.slots.token_ids < tokens_per_group).astype(jnp.float32)
    chosen = jax.lax.stop_gradient(routing.slots.gates)  # ExpertChoiceRouter's gates are the scores
    return {'counts': jnp.sum(filled, axis=2), 'chosen_scores': jnp.sum(chosen, axis=(1, 2))}
  assert routing.expert_ids is not None
  # Comparisons replace a scatter, which is slow on TPUs. The comparisons run choice by choice: a CPU would write [B, T,
  # k, E] to memory, which takes 14 times as long for 8 choices of 256 experts.
  experts = jnp.arange(num_experts)[None, None, :]
  choices = [routing.expert_ids[..., i, None] == experts for i in range(routing.expert_ids.shape[-1])]
  assigned = sum((chosen.astype(jnp.float32) for chosen in choices), start=jnp.zeros_like(routing.scores))  # [B, T, E]
  chosen = assigned * jax.lax.stop_gradient(routing.scores)
  return {'counts': jnp.sum(assigned, axis=1), 'chosen_scores': jnp.sum(chosen, axis=(1, 2))}


def whole_batch_tokens(routing: RouterOutput) -> list[int]:
  """Returns the numbers that shards must divide: of the whole batch's tokens, and of its groups if experts choose."""
  counts = [routing.scores[..., 0].size] + ([] if routing.slots is None else [routing.slots.token_ids.shape[0]])
  return [n * current_layer_scope().part.count for n in counts]


def _sum_shards(columns: dict[str, jax.Array], num_shards: int) -> dict[str, Any]:
  """Sums columns [B, ...] to [N, ...] in one reduction, so that a sharded B needs one all-reduce for all columns.

  Part m of M of a batch is cut into pieces, lcm(M, N) of them in the whole batch, each of which lies in one shard.
  """
  part, num_rows = current_layer_scope().part, len(next(iter(columns.values())))
  if num_shards < 1 or num_rows * part.count % num_shards:
    raise UserError(
      f'load_balance_shards={num_shards} must divide the tokens of the batch or, if the learner takes microbatches, '
      f'of a microbatch (if experts choose, its groups): choose a divisor of {num_rows * part.count}.'
    )
  num_pieces = math.lcm(part.count, num_shards) // part.count
  flat = [column.reshape(num_rows, -1) for column in columns.values()]
  sums = jnp.sum(jnp.concatenate(flat, axis=1).reshape(num_pieces, num_rows // num_pieces, -1), axis=1)
  if part.count > 1 and num_shards > 1:
    shard_ids = (part.index * num_pieces + jnp.arange(num_pieces)) * num_shards // (part.count * num_pieces)
    is_in = shard_ids[None, :, None] == jnp.arange(num_shards)[:, None, None]
    sums = jnp.sum(jnp.where(is_in, sums[None], 0.0), axis=1)
  parts = jnp.split(sums, list(itertools.accumulate(column.shape[1] for column in flat[:-1])), axis=1)
  named = zip(columns.items(), parts, strict=True)
  return {name: total.reshape(num_shards, *column.shape[1:]) for (name, column), total in named}


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
  """Returns total / count, or 0 if count is 0; counts are whole numbers."""
  return total / jnp.maximum(count, 1.0)


def load_balance_loss(sums: RoutingSums) -> jax.Array:
  """Returns E * sum over experts of f * P, a float32 scalar: smallest for even load and even scores.

  f is the number of an expert's assignments per token, P the expert's mean score. The gradient flows through P only.
  Perfectly even f and P give k (GShard: Lepikhin et al., 2020; Switch: Fedus et al., 2022), or 1 with `divide_by_k`,
  by the mean number k of assignments per token (MegaBlocks: Gale et al., 2022, for the mean over the layers).
  """
  num_tokens = sums.shard_tokens[:, None]
  num_assigned = jnp.sum(sums.counts, axis=1, keepdims=True) if sums.divide_by_k else num_tokens
  products = _mean(sums.counts, num_assigned) * _mean(sums.scores, num_tokens)
  return sums.counts.shape[-1] * jnp.mean(jnp.sum(products, axis=1))


def router_z_loss(sums: RoutingSums) -> jax.Array:
  """Returns the mean over tokens of logsumexp(logits)^2, float32: keeps logits small (ST-MoE: Zoph et al., 2022)."""
  return _mean(jnp.sum(sums.z), sums.num_tokens)


def routing_statistics(sums: RoutingSums) -> dict[str, jax.Array]:
  """Returns the metrics of a routing decision, float32, without gradients.

  expert_load: [E], each expert's fraction of all assignments; the sum is 1.
  max_expert_load: E times the greatest load; 1 is perfect balance, E is collapse.
  router_entropy: mean over tokens of the entropy of their scores, in nats; log(E) for even scores.
  router_confidence: mean over assignments of the chosen expert's score. T5X reports the mean gate of the assignments
    that were not dropped, which is equal if nothing is dropped and gates are scores.
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


def attach_balance_gradient(y: jax.Array, bias: jax.Array, sums: RoutingSums) -> jax.Array:
  """Returns y; in the backward pass the balance bias [E] gets the load violation as its gradient. For training only.

  The load violation is E times the number of assignments that an expert has above the mean, float32, with sum 0. It
  counts real tokens, before any assignment is dropped. The factor E keeps it a whole number: an expert with exactly the
  mean load has 0, in whatever order the gradients of the parts of a batch are added.
  """
  counts = jnp.sum(sums.counts, axis=0)
  return attach_gradient(y, bias, counts.size * counts - jnp.sum(counts))


@jax.custom_vjp
def attach_gradient(x: Any, bias: jax.Array, gradient: jax.Array) -> Any:
  """Returns x, an array or a tree; in the backward pass `bias` gets the cotangent `gradient`, whatever x's is.

  The cotangent of x passes unchanged. The loss must depend on x; otherwise JAX never runs the backward rule.
  """
  del bias, gradient
  return x


attach_gradient.defvjp(
  lambda x, bias, gradient: (x, gradient),
  lambda gradient, cotangent: (cotangent, gradient, jnp.zeros_like(gradient)),
)
