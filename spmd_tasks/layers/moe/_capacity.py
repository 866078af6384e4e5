"""Capacity: every expert computes a fixed number of slots per group of tokens, and overflow is dropped.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, k choices per token, E experts, C slots per expert
and group.

Two forms give the same numbers and differ in how tokens move into the slots and back: `CapacityEinsum` multiplies by
one-hot masks (GShard: Lepikhin et al., 2020), `CapacityGather` gathers rows. `CapacityComputation` is their common
base. Which token takes which slot is decided in _slots.py; _slot_resharding.py moves slots between devices.
"""

import abc
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._experts import ExpertWeights
from spmd_tasks.layers.moe._permutation import Permutation, combine_rows, gather_rows, take_rows
from spmd_tasks.layers.moe._router import RouterOutput
from spmd_tasks.layers.moe._slot_resharding import SlotResharding, slot_resharding
from spmd_tasks.layers.moe._slots import (
  GroupSize,
  SlotAssignment,
  Slots,
  assign_slots,
  expert_capacity,
  tokens_per_group,
)
from spmd_tasks.sharding import SplitDims, constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityComputation(abc.ABC):
  """Base class: moves tokens into slots, applies every expert to its slots, and moves the results back to the tokens.

  Fields:
    capacity_factor: slots per expert relative to balanced top-1 routing, C = factor * S / E, see `expert_capacity`; 0
      drops nothing, at the cost of S slots per expert.
    eval_capacity_factor: the same outside of training; None uses `capacity_factor`.
    capacity_counts_choices: whether the factor is relative to balanced top-k routing: C = factor * k * S / E
      (MegaBlocks). Without, as in T5X, factor 1 has slots for half of the choices of top-2 routing.
    capacity_rounding: of C, 'nearest' (T5X) or 'down' (MegaBlocks).
    min_capacity: least number of slots of an expert in a group. With 0, a group whose C is rounded to 0 drops nothing
      (MegaBlocks).
    group_size: S: a divisor of B * T, a `DerivedGroupSize`, or None for one group per row. Small groups make the einsum
      form cheaper, and drops more likely.
    priority: which choice gets a slot first. 'position' (T5X): all first choices before all second ones, each in the
      order of tokens. 'score': the same, in the order of the scores of the tokens' first choices (batch prioritized
      routing, V-MoE: Riquelme et al., 2021); a causal model then looks ahead. 'token' (MegaBlocks): all choices of the
      first token, then those of the second.
    activation_split_dims: of x and of the result.
  """

  capacity_factor: float = 1.25
  eval_capacity_factor: float | None = None
  capacity_counts_choices: bool = False
  capacity_rounding: Literal['nearest', 'down'] = 'nearest'
  min_capacity: int = 4
  group_size: GroupSize = None
  priority: Literal['position', 'score', 'token'] = 'position'
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    for name in ('capacity_factor', 'eval_capacity_factor'):
      factor = getattr(self, name)
      if factor is not None and not factor >= 0:
        raise UserError(f'{name}={factor} must be positive, or 0 to drop nothing.')
    if self.min_capacity < 0:
      raise UserError(f'min_capacity={self.min_capacity} must be at least 0.')
    for name, known in (('priority', ('position', 'score', 'token')), ('capacity_rounding', ('nearest', 'down'))):
      if getattr(self, name) not in known:
        raise UserError(f'{name}={getattr(self, name)!r} must be one of {known}.')

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

    If experts choose, the router has decided groups and slots too, and the fields that shape these are not read.

    Statistics:
      fraction_dropped: the fraction of the real tokens' choices that have no slot; 0 if experts choose.
      expert_usage: the fraction of slots that hold a token.

    Raises:
      UserError: group_size does not fit.
    """
    batch_size, length, _ = x.shape
    if routing.slots is None:
      group_size = tokens_per_group(batch_size, length, self.group_size)
    else:
      group_size = batch_size * length // routing.slots.token_ids.shape[0]
    resharding = slot_resharding(weights, self.activation_split_dims, (batch_size, length))
    grouped = resharding.group_tokens(x.astype(weights.up.dtype), group_size)
    if routing.slots is None:
      assignment = self._assign(routing, resharding, group_size, train=train)
    else:
      assignment = SlotAssignment(
        slots=_pad_slots(routing.slots, resharding, len(grouped), group_size), group_size=group_size
      )
    rows = resharding.apply_experts(self._dispatch(grouped, assignment), weights)
    y = resharding.ungroup_tokens(self._combine(rows, assignment), batch_size, length)
    return constrain(y.astype(x.dtype), self.activation_split_dims), _statistics(routing, assignment)

  def _assign(
    self, routing: RouterOutput, resharding: SlotResharding, group_size: int, *, train: bool
  ) -> SlotAssignment:
    """Assigns slots if tokens choose, with G and E padded."""
    assert routing.expert_ids is not None
    assert routing.gates is not None
    num_experts = routing.scores.shape[-1]
    factor = self.capacity_factor
    if not train and self.eval_capacity_factor is not None:
      factor = self.eval_capacity_factor
    num_padded = resharding.padded_num_experts(num_experts)
    unrouted, padded_unrouted = num_experts, num_padded
    expert_ids = jnp.where(routing.expert_ids == unrouted, padded_unrouted, routing.expert_ids)
    priorities = None
    if self.priority == 'score':
      first_choices = jnp.minimum(routing.expert_ids[..., :1], num_experts - 1)
      scores = jnp.take_along_axis(jax.lax.stop_gradient(routing.scores), first_choices, axis=-1)
      priorities = resharding.group_tokens(scores, group_size)[..., 0]
    return assign_slots(
      resharding.group_tokens(expert_ids, group_size, fill_value=padded_unrouted),
      resharding.group_tokens(routing.gates, group_size),
      priorities,
      num_experts=num_padded,
      capacity=expert_capacity(
        group_size,
        num_experts,
        factor=factor,
        min_capacity=self.min_capacity,
        num_choices=expert_ids.shape[-1] if self.capacity_counts_choices else 1,
        rounding=self.capacity_rounding,
      ),
      is_by_token=self.priority == 'token',
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
    weighed = rows * assignment.slots.gates[..., None]
    return jnp.einsum('gecs,gecd->gsd', _mask(assignment, rows.dtype), weighed.astype(rows.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityGather(CapacityComputation):
  """Moves tokens into and out of the slots by gathers. Time and memory follow the number of slots, whatever S.

  If tokens choose, both directions and their gradients are gathers. If experts choose, a token may have any number of
  slots, and the sums over them are scatter-adds.

  Fields: as in CapacityComputation.
  """

  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    token_ids = assignment.slots.token_ids
    if assignment.positions is None:
      rows = jax.vmap(take_rows)(x, token_ids.reshape(x.shape[0], -1))
    else:
      rows = jax.vmap(gather_rows)(x, _permutation(assignment, assignment.positions))
    return rows.reshape(*token_ids.shape, x.shape[-1])

  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    if assignment.positions is None or assignment.gates is None:
      slots = jax.tree.map(lambda x: x.reshape(x.shape[0], -1), assignment.slots)
      return jax.vmap(functools.partial(_scatter_rows, group_size=assignment.group_size))(flat, slots)
    return jax.vmap(combine_rows)(flat, assignment.gates, _permutation(assignment, assignment.positions))


def _pad_slots(slots: Slots, resharding: SlotResharding, num_groups: int, group_size: int) -> Slots:
  """Adds empty slots for the groups and experts of the padding."""
  missing_groups = num_groups - slots.token_ids.shape[0]
  missing_experts = resharding.padded_num_experts(slots.token_ids.shape[1]) - slots.token_ids.shape[1]
  padding = ((0, missing_groups), (0, missing_experts), (0, 0))
  return Slots(
    token_ids=jnp.pad(slots.token_ids, padding, constant_values=group_size), gates=jnp.pad(slots.gates, padding)
  )


def _statistics(routing: RouterOutput, assignment: SlotAssignment) -> Ratios:
  """Counts real tokens and experts only: padding takes no slot."""
  batch_size, length, num_experts = routing.scores.shape
  num_slots = batch_size * length // assignment.group_size * num_experts * assignment.slots.token_ids.shape[-1]
  num_used = jnp.sum(assignment.slots.token_ids < assignment.group_size, dtype=jnp.float32)
  num_chosen = num_used
  if routing.expert_ids is not None:
    num_chosen = jnp.sum(routing.expert_ids < num_experts, dtype=jnp.float32)
  return {
    'fraction_dropped': (num_chosen - num_used, num_chosen),
    'expert_usage': (num_used, jnp.float32(num_slots)),
  }


def _mask(assignment: SlotAssignment, dtype: Any) -> jax.Array:
  """Returns [G, E, C, S]: 1 where the slot holds the token."""
  return jax.nn.one_hot(assignment.slots.token_ids, assignment.group_size, dtype=dtype)


def _permutation(assignment: SlotAssignment, positions: jax.Array) -> Permutation:
  """Returns the permutation from tokens to slots per group, with empty rows and with assignments that have no row."""
  token_ids = assignment.slots.token_ids
  return Permutation(
    token_ids=token_ids.reshape(token_ids.shape[0], -1),
    positions=positions,
    group_sizes=jnp.sum(token_ids < assignment.group_size, axis=-1, dtype=jnp.int32),
  )


def _scatter_rows(rows: jax.Array, slots: Slots, group_size: int) -> jax.Array:
  """Returns [S, D] for one group's rows [E * C, D] and its slots, flattened to [E * C]."""
  result = jnp.zeros((group_size, rows.shape[-1]), jnp.float32)
  return result.at[slots.token_ids].add(rows * slots.gates[:, None], mode='drop').astype(rows.dtype)
