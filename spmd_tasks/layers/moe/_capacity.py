"""Capacity: every expert computes a fixed number of slots per group of tokens, and overflow is dropped.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, k choices per token, E experts, C slots per expert
and group.

Two forms give the same numbers and differ in how tokens move into the slots and back: `CapacityEinsum` multiplies by
one-hot masks (GShard: Lepikhin et al., 2020), `CapacityGather` gathers rows. `CapacityComputation` is their common
base. _slot_resharding.py moves slots between devices.

Slots make all shapes static, whatever the routing: an assignment that finds no free slot is dropped. Groups are
consecutive tokens of the batch and do not depend on the mesh, so the same tokens are dropped on every mesh. In a
pipeline a group lies within one microbatch.
"""

import abc
import dataclasses
from typing import Any

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios, SmallMicrobatchError, current_layer_scope
from spmd_tasks.layers.moe._experts import ExpertWeights
from spmd_tasks.layers.moe._permutation import Permutation, combine_rows, gather_rows, sort_by_expert, take_rows
from spmd_tasks.layers.moe._router import RouterOutput
from spmd_tasks.layers.moe._slot_resharding import SlotResharding, slot_resharding
from spmd_tasks.layers.transformer import ROUTING_NAME
from spmd_tasks.sharding import SplitDims, constrain


class SlotAssignment(struct.PyTreeNode):
  """The token in each slot of each expert, by group, and the slots of each token's choices.

  Attributes:
    token_ids: int32 [G, E, C], the token's index in its group; S for an empty slot.
    slot_gates: float32 [G, E, C], 0 for an empty slot.
    positions: int32 [G, S, k], the slot c + C * e of each of a token's choices; E * C for a choice without a slot.
    gates: float32 [G, S, k], by choice; 0 for a choice without a slot.
    group_size: S.
  """

  token_ids: jax.Array
  slot_gates: jax.Array
  positions: jax.Array
  gates: jax.Array
  group_size: int = struct.field(pytree_node=False, kw_only=True)


def tokens_per_group(batch_size: int, length: int, group_size: int | None) -> int:
  """Returns S for tokens [batch_size, length], given the setting `group_size`; None means one group per row.

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
  *,
  num_experts: int,
  capacity: int,
) -> SlotAssignment:
  """Assigns slots to the tokens' choices: to all first choices before any second choice, and so on.

  Args:
    expert_ids: int32 [G, S, k], each in [0, E]. The id E means 'not routed' and takes no slot.
    gates: float32 [G, S, k].
    num_experts: E.
    capacity: C.
  """
  group_size, num_choices = expert_ids.shape[1:]
  slot_ids, positions = jax.vmap(lambda ids: _fill_in_order(ids, num_experts, capacity))(expert_ids)
  slot_ids, positions = (checkpoint_name(ids, ROUTING_NAME) for ids in (slot_ids, positions))
  kept_gates = jnp.where(positions < num_experts * capacity, gates, 0.0)
  return SlotAssignment(
    group_size=group_size,
    token_ids=slot_ids // num_choices,
    slot_gates=jax.vmap(take_rows)(kept_gates.reshape(kept_gates.shape[0], -1), slot_ids),
    positions=positions,
    gates=kept_gates,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityComputation(abc.ABC):
  """Base class: moves tokens into slots, applies every expert to its slots, and moves the results back to the tokens.

  Fields:
    capacity_factor: slots per expert relative to balanced top-1 routing, see `expert_capacity`; 0 drops nothing, at the
      cost of S slots per expert.
    eval_capacity_factor: the same outside of training; None uses `capacity_factor`.
    min_capacity: least number of slots of an expert in a group.
    group_size: S: a divisor of T, or a multiple of T that divides B * T. None for one group per row. Small groups make
      the einsum form cheaper, and drops more likely.
    activation_split_dims: of x and of the result.
  """

  capacity_factor: float = 1.25
  eval_capacity_factor: float | None = None
  min_capacity: int = 4
  group_size: int | None = None
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    for name in ('capacity_factor', 'eval_capacity_factor'):
      factor = getattr(self, name)
      if factor is not None and not factor >= 0:
        raise UserError(f'{name}={factor} must be positive, or 0 to drop nothing.')
    if self.min_capacity < 1:
      raise UserError(f'min_capacity={self.min_capacity} must be at least 1.')

  @abc.abstractmethod
  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """Returns [G, E, C, D] for x [G, S, D]: the token in each slot, 0 for an empty slot."""

  @abc.abstractmethod
  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """Returns [G, S, D] for rows [G, E, C, D]: each token's rows summed by their gates, in the rows' dtype."""

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, Ratios]:
    """Returns ([B, T, D] in x's dtype, statistics) for x [B, T, D].

    Statistics:
      fraction_dropped: the fraction of the real tokens' choices that have no slot.
      expert_usage: the fraction of slots that hold a token.

    Raises:
      UserError: group_size does not fit.
    """
    batch_size, length, _ = x.shape
    group_size = tokens_per_group(batch_size, length, self.group_size)
    resharding = slot_resharding(weights, self.activation_split_dims, (batch_size, length))
    grouped = resharding.group_tokens(x.astype(weights.up.dtype), group_size)
    assignment = self._assign(routing, resharding, group_size, train=train)
    rows = resharding.apply_experts(self._dispatch(grouped, assignment), weights)
    y = resharding.ungroup_tokens(self._combine(rows, assignment), batch_size, length)
    return constrain(y.astype(x.dtype), self.activation_split_dims), _statistics(routing, assignment)

  def _assign(
    self, routing: RouterOutput, resharding: SlotResharding, group_size: int, *, train: bool
  ) -> SlotAssignment:
    """Assigns slots, with G and E padded."""
    num_experts = routing.scores.shape[-1]
    factor = self.capacity_factor
    if not train and self.eval_capacity_factor is not None:
      factor = self.eval_capacity_factor
    num_padded = resharding.padded_num_experts(num_experts)
    unrouted, padded_unrouted = num_experts, num_padded
    expert_ids = jnp.where(routing.expert_ids == unrouted, padded_unrouted, routing.expert_ids)
    return assign_slots(
      resharding.group_tokens(expert_ids, group_size, fill_value=padded_unrouted),
      resharding.group_tokens(routing.gates, group_size),
      num_experts=num_padded,
      capacity=expert_capacity(group_size, num_experts, factor=factor, min_capacity=self.min_capacity),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityEinsum(CapacityComputation):
  """Moves tokens into and out of the slots by products with one-hot masks (GShard).

  Any partitioner understands this form and derives the all-to-alls if tokens and experts are split.

  The mask [G, E, C, S], in x's dtype, has E * C elements per token: f * S at capacity factor f. The two products with
  the mask cost as much as a dense plain network with F = f * S, so `group_size` should keep S small against F. Factor 0
  (C = S) raises both figures to E * S. CapacityGather has no mask.

  Fields: as in CapacityComputation.
  """

  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    return jnp.einsum('gecs,gsd->gecd', _mask(assignment, x.dtype), x)

  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    # Weighting the rows instead of the mask lets one mask serve both directions.
    weighed = rows * assignment.slot_gates[..., None]
    return jnp.einsum('gecs,gecd->gsd', _mask(assignment, rows.dtype), weighed.astype(rows.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityGather(CapacityComputation):
  """Moves tokens into and out of the slots by gathers. Time and memory follow the number of slots, whatever S.

  Both directions and their gradients are gathers.

  Fields: as in CapacityComputation.
  """

  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    rows = jax.vmap(gather_rows)(x, _permutation(assignment))
    return rows.reshape(*assignment.token_ids.shape, x.shape[-1])

  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    return jax.vmap(combine_rows)(flat, assignment.gates, _permutation(assignment))


def _statistics(routing: RouterOutput, assignment: SlotAssignment) -> Ratios:
  """Counts real tokens and experts only: padding takes no slot."""
  batch_size, length, num_experts = routing.scores.shape
  num_slots = batch_size * length // assignment.group_size * num_experts * assignment.token_ids.shape[-1]
  num_used = jnp.sum(assignment.token_ids < assignment.group_size, dtype=jnp.float32)
  num_chosen = jnp.sum(routing.expert_ids < num_experts, dtype=jnp.float32)
  return {
    'fraction_dropped': (num_chosen - num_used, num_chosen),
    'expert_usage': (num_used, jnp.float32(num_slots)),
  }


def _mask(assignment: SlotAssignment, dtype: Any) -> jax.Array:
  """Returns [G, E, C, S]: 1 where the slot holds the token."""
  return jax.nn.one_hot(assignment.token_ids, assignment.group_size, dtype=dtype)


def _permutation(assignment: SlotAssignment) -> Permutation:
  """Returns the permutation from tokens to slots per group, with empty rows and with assignments that have no row."""
  token_ids = assignment.token_ids
  return Permutation(
    token_ids=token_ids.reshape(token_ids.shape[0], -1),
    positions=assignment.positions,
    group_sizes=jnp.sum(token_ids < assignment.group_size, axis=-1, dtype=jnp.int32),
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
