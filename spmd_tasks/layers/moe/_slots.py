"""Assigns tokens to slots: every expert has the same number C of slots in each group of S tokens.

Shapes: B batch, T sequence, G groups of S tokens, k choices per token, E experts, C slots per expert and group.

Slots make all shapes static, whatever the routing: an expert computes C tokens per group, some slots stay empty, and an
assignment that finds no free slot is dropped (GShard: Lepikhin et al., 2020). Groups are consecutive tokens of the
batch. Groups do not depend on the mesh, so the same tokens are dropped on every mesh. In a pipeline a group lies within
one microbatch, so groups of a given size do not depend on the microbatches either.
"""

import dataclasses
from typing import Literal

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import SmallMicrobatchError, current_layer_scope
from spmd_tasks.layers.moe._permutation import Permutation, gather_gates, sort_by_expert
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
    permutation: for each group, from its tokens' choices to its slots, of which slot c of expert e is row c + C * e;
      None if experts chose their tokens.
    group_size: S.
  """

  slots: Slots
  permutation: Permutation | None = None
  group_size: int = struct.field(pytree_node=False, kw_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivedGroupSize:
  """A group size that follows from the number of tokens, as Flaxformer's does.

  The number of groups is the least multiple of `num_groups_multiple_of` that divides the tokens and is at least their
  number over `max_size`, rounded down.

  Fields:
    max_size: Flaxformer's `max_group_size`.
    num_groups_multiple_of: in Flaxformer num_experts * max(1, devices / (expert partitions * model partitions)), so
      there the groups, and hence the drops, depend on the number of devices.
  """

  max_size: int
  num_groups_multiple_of: int

  def __post_init__(self):
    for name in ('max_size', 'num_groups_multiple_of'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} of a group size must be at least 1.')

  def tokens(self, num_tokens: int) -> int:
    """Returns S. Raises a UserError if Flaxformer would add padding tokens."""
    step, least = self.num_groups_multiple_of, max(num_tokens // self.max_size, self.num_groups_multiple_of)
    for num_groups in range(-(-least // step) * step, num_tokens + 1, step):
      if num_tokens % num_groups == 0:
        return num_tokens // num_groups
    raise UserError(
      f'{num_tokens} tokens cannot be cut into groups whose number is a multiple of num_groups_multiple_of={step}: '
      f'choose a batch with a multiple of {step} tokens.'
    )


GroupSize = int | DerivedGroupSize | None  # in tokens; None for one group per row


def tokens_per_group(batch_size: int, length: int, group_size: GroupSize) -> int:
  """Returns S for tokens [batch_size, length].

  Raises a UserError if group_size does not divide B * T, and a SmallMicrobatchError if it fits the batch, but not a
  microbatch of the pipeline.
  """
  num_tokens, num_parts = batch_size * length, current_layer_scope().part.count
  if group_size is None:
    return length
  if isinstance(group_size, DerivedGroupSize):
    return group_size.tokens(num_tokens)
  if group_size >= 1 and num_tokens % group_size == 0:
    return group_size
  if group_size >= 1 and num_tokens * num_parts % group_size == 0:
    raise SmallMicrobatchError(
      f"group_size={group_size} makes groups of {group_size} tokens, but each of the pipeline's {num_parts} "
      f'microbatches has {num_tokens}, and a group lies within one: choose a smaller group_size, fewer microbatches or '
      'a larger batch.'
    )
  raise UserError(
    f'group_size={group_size} does not fit a batch of {batch_size} rows of {length} tokens: choose a divisor of '
    f'{num_tokens}, or None for one group per row.'
  )


def expert_capacity(
  group_size: int,
  num_experts: int,
  *,
  factor: float,
  min_capacity: int,
  num_choices: int = 1,
  rounding: Literal['nearest', 'down'] = 'nearest',
) -> int:
  """Returns C = max(min_capacity, factor * num_choices * S / E, rounded), at most S: the slots for all tokens.

  If this is 0 (a factor of 0, or rounded to 0 with `min_capacity` 0), C is S, which drops nothing.
  """
  capacity = min(factor * num_choices * group_size / num_experts, group_size)
  capacity = max(min_capacity if factor else 0, int(capacity) if rounding == 'down' else round(capacity))
  return min(capacity, group_size) or group_size


def assign_slots(
  expert_ids: jax.Array,
  gates: jax.Array,
  priorities: jax.Array | None,
  *,
  num_experts: int,
  capacity: int,
  is_by_token: bool = False,
) -> SlotAssignment:
  """Assigns slots to the tokens' choices: to all first choices before any second choice, and so on.

  Args:
    expert_ids: int32 [G, S, k], each in [0, E]. The id E means 'not routed' and takes no slot.
    gates: float32 [G, S, k].
    priorities: float32 [G, S]. Among choices of the same rank, tokens of higher priority come first; equal priorities
      keep the order of tokens. None means the order of tokens.
    num_experts, capacity: E and C.
    is_by_token: whether all choices of a token come before those of the next token instead (without priorities).
  """
  group_size, num_choices = expert_ids.shape[1:]
  if is_by_token:
    in_order = expert_ids.reshape(expert_ids.shape[0], -1, 1)  # as S * k tokens with one choice each
  else:
    in_order = expert_ids
  if priorities is None:
    slot_ids, positions = jax.vmap(lambda ids: _fill_in_order(ids, num_experts, capacity))(in_order)
    positions = positions.reshape(expert_ids.shape)
  else:
    fill = lambda ids, priorities: _fill_by_priority(ids, priorities, num_experts, capacity)
    slot_ids, positions = jax.vmap(fill)(expert_ids, priorities)
  slot_ids, positions = (checkpoint_name(ids, ROUTING_NAME) for ids in (slot_ids, positions))
  token_ids, by_row = slot_ids // num_choices, (len(slot_ids), -1)
  permutation = Permutation(
    token_ids=token_ids.reshape(by_row),
    positions=positions,
    group_sizes=jnp.sum(token_ids < group_size, axis=-1, dtype=jnp.int32),
    assignments=slot_ids.reshape(by_row),
  )
  gates = jax.vmap(gather_gates)(gates, permutation).reshape(token_ids.shape)
  return SlotAssignment(group_size=group_size, slots=Slots(token_ids=token_ids, gates=gates), permutation=permutation)


def _fill_in_order(expert_ids: jax.Array, num_experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
  """Fills the slots of one group in the order of tokens.

  Assignments of expert_ids int32 [S, k] are numbered by token: choice c of token s is assignment s * k + c.
  Returns int32 [E, C], the assignment in each slot, S * k for an empty slot; and int32 [S, k], the slot of each
  assignment, E * C for one without a slot.
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
