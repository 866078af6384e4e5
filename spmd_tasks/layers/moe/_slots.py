"""Assigns tokens to slots: every expert has the same number C of slots in each group of S tokens.

Shapes: B batch, T sequence, G groups of S tokens, k choices per token, E experts, C slots per expert and group.

Slots make all shapes static, whatever the routing: an expert computes C tokens per group, some slots stay empty, and an
assignment that finds no free slot is dropped (GShard: Lepikhin et al., 2020). Groups are consecutive tokens of the
batch. Groups do not depend on the mesh, so the same tokens are dropped on every mesh. In a pipeline a group lies within
one microbatch, so groups do not depend on the microbatches either.
"""

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import SmallMicrobatchError, current_layer_scope
from spmd_tasks.layers.moe._permutation import sort_by_expert, take_rows
from spmd_tasks.layers.transformer import ROUTING_NAME


class Slots(struct.PyTreeNode):
  """The token in each slot of each expert, by group. ExpertChoiceRouter decides the slots directly.

  Attributes:
    token_ids: int32 [G, E, C], the token's index in its group; S for an empty slot.
    gates: float32 [G, E, C], 0 for an empty slot.
  """

  token_ids: jax.Array
  gates: jax.Array


class SlotAssignment(struct.PyTreeNode):
  """The slots, and for each token the slots of its choices.

  Attributes:
    slots: the token in each slot.
    positions: int32 [G, S, k], the slot c + C * e of each of a token's choices; E * C for a choice without a slot. None
      if experts chose their tokens.
    gates: float32 [G, S, k], by choice; 0 for a choice without a slot. None if experts chose their tokens.
    group_size: S.
  """

  slots: Slots
  positions: jax.Array | None = None
  gates: jax.Array | None = None
  group_size: int = struct.field(pytree_node=False, kw_only=True)


def tokens_per_group(batch_size: int, length: int, group_size: int | None) -> int:
  """Returns S for tokens [batch_size, length], given `group_size`; None means one group per row.

  Raises:
    UserError: group_size neither divides T, nor is a multiple of T that divides B * T.
    SmallMicrobatchError: group_size fits the batch, but not a microbatch of the pipeline.
  """
  if group_size is None:
    return length
  num_tokens, num_parts = batch_size * length, current_layer_scope().part.count
  if group_size < 1 or (length % group_size and (group_size % length or num_tokens % group_size)):
    if group_size >= 1 and group_size % length == 0 and num_tokens * num_parts % group_size == 0:
      raise SmallMicrobatchError(
        f'group_size={group_size} makes groups of {group_size // length} rows of {length} tokens, but each of the '
        f"pipeline's {num_parts} microbatches has {batch_size} rows, and a group lies within one: choose a smaller "
        f'group_size, fewer microbatches or a larger batch.'
      )
    raise UserError(
      f'group_size={group_size} does not fit a batch of {batch_size} rows of {length} tokens: choose a divisor of '
      f'{length}, a multiple of {length} that divides {num_tokens}, or None for one group per row.'
    )
  return group_size


def expert_capacity(group_size: int, num_experts: int, *, factor: float, min_capacity: int) -> int:
  """Returns C = max(min_capacity, round(factor * S / E)), at most S: a token takes at most one slot per expert.

  Factor 0 gives C = S, which drops nothing. As in T5X, the number of choices k does not enter: with factor 1, top-2
  routing has slots for half of its assignments.
  """
  if factor == 0:
    return group_size
  return min(max(min_capacity, round(factor * group_size / num_experts)), group_size)


def assign_slots(
  expert_ids: jax.Array,
  gates: jax.Array,
  priorities: jax.Array | None,
  *,
  num_experts: int,
  capacity: int,
) -> SlotAssignment:
  """Assigns slots to the tokens' choices: to all first choices before any second choice, and so on.

  Args:
    expert_ids: int32 [G, S, k], each in [0, E]. The id E means 'not routed' and takes no slot.
    gates: float32 [G, S, k].
    priorities: float32 [G, S]. Among choices of the same rank, tokens of higher priority come first; equal priorities
      keep the order of tokens. None means the order of tokens.
    num_experts: E.
    capacity: C.
  """
  group_size, num_choices = expert_ids.shape[1:]
  if priorities is None:
    slot_ids, positions = jax.vmap(lambda ids: _fill_in_order(ids, num_experts, capacity))(expert_ids)
  else:
    fill = lambda ids, priorities: _fill_by_priority(ids, priorities, num_experts, capacity)
    slot_ids, positions = jax.vmap(fill)(expert_ids, priorities)
  slot_ids, positions = (checkpoint_name(ids, ROUTING_NAME) for ids in (slot_ids, positions))
  kept_gates = jnp.where(positions < num_experts * capacity, gates, 0.0)
  return SlotAssignment(
    group_size=group_size,
    slots=Slots(
      token_ids=slot_ids // num_choices,
      gates=jax.vmap(take_rows)(kept_gates.reshape(kept_gates.shape[0], -1), slot_ids),
    ),
    positions=positions,
    gates=kept_gates,
  )


def _fill_in_order(expert_ids: jax.Array, num_experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
  """Fills the slots of one group in the order of tokens.

  Args:
    expert_ids: int32 [S, k]. Assignments are numbered token by token: choice c of token s is assignment s * k + c.
    num_experts: E.
    capacity: C.

  Returns:
    (int32 [E, C], the assignment in each slot, S * k for an empty slot; int32 [S, k], the slot of each assignment, E *
    C for an assignment without a slot).
  """
  group_size, num_choices = expert_ids.shape
  by_choice = expert_ids.T.reshape(-1, 1)  # First choices come first; the sort keeps this order within each expert.
  permutation = sort_by_expert(by_choice, num_experts)
  ends = jnp.cumsum(permutation.group_sizes)
  starts = ends - permutation.group_sizes
  rows = starts[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
  choices, token_ids = jnp.divmod(permutation.token_ids.at[rows].get(mode='clip'), group_size)
  slot_ids = jnp.where(rows < ends[:, None], token_ids * num_choices + choices, expert_ids.size)
  places = permutation.positions - starts.at[by_choice].get(mode='clip')
  positions = jnp.where(
    (by_choice < num_experts) & (places < capacity), by_choice * capacity + places, num_experts * capacity
  )
  return slot_ids, positions.reshape(num_choices, group_size).T


def _fill_by_priority(
  expert_ids: jax.Array, priorities: jax.Array, num_experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
  """Fills the slots of one group as `_fill_in_order` does, in descending order of priorities float32 [S]."""
  num_choices = expert_ids.shape[1]
  token_order = jnp.argsort(priorities, stable=True, descending=True).astype(jnp.int32)
  slot_ids, positions = _fill_in_order(expert_ids[token_order], num_experts, capacity)
  ranks, choices = jnp.divmod(slot_ids, num_choices)
  token_ids = token_order.at[ranks].get(mode='fill', fill_value=expert_ids.shape[0])
  return token_ids * num_choices + choices, positions[jnp.argsort(token_order)]
