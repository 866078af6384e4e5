"""CapacityComputation: what the two forms of the capacity computation share, which is all but how rows move.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, E experts, C slots per expert and group.
"""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.capacity import SlotAssignment, assign_slots, expert_capacity, tokens_per_group
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.routing import RouterOutput, Slots
from spmd_tasks.layers.moe.slot_exchange import SlotExchange, slot_exchange
from spmd_tasks.sharding.specs import SplitDims, constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityComputation(abc.ABC):
  """Tokens into the slots of their experts, every expert's network over its slots, and back to the tokens.

  Fields:
    capacity_factor: slots per token and expert, see `expert_capacity`; 0 drops nothing, at the cost of S slots per
      expert.
    eval_capacity_factor: the same outside of training; None for the same.
    min_capacity: least number of slots of an expert in a group.
    group_size: S: a divisor of T, or a multiple of T that divides B * T. None for one group per row. Small groups make
      the einsum form cheaper, and drops more likely.
    priority: of tokens whose choices are of the same rank. 'position': the earliest first. 'score': the one whose first
      choice has the highest score first (batch prioritized routing, V-MoE: Riquelme et al., 2021), for which a causal
      model looks ahead.
    renormalize: see `assign_slots`.
    activation_split_dims: of x and of the result.
  """

  capacity_factor: float = 1.25
  eval_capacity_factor: float | None = None
  min_capacity: int = 4
  group_size: int | None = None
  priority: Literal['position', 'score'] = 'position'
  renormalize: bool = False
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    for name in ('capacity_factor', 'eval_capacity_factor'):
      factor = getattr(self, name)
      if factor is not None and not factor >= 0:
        raise UserError(f'{name}={factor} must be positive, or 0 to drop nothing.')
    if self.min_capacity < 1:
      raise UserError(f'min_capacity={self.min_capacity} must be at least 1.')
    if self.priority not in ('position', 'score'):
      raise UserError(f"priority={self.priority!r} must be 'position' or 'score'.")

  @abc.abstractmethod
  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """[G, E, C, D] for x [G, S, D]: the token in each slot, 0 where it is empty."""

  @abc.abstractmethod
  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """[G, S, D] for rows [G, E, C, D]: each token's rows summed by their gates, in the rows' dtype."""

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D] in x's dtype, statistics) for x [B, T, D].

    Where experts choose, they have chosen groups and slots too, and the fields that shape these are not read.

    The statistics are `fraction_dropped`, of the real tokens' choices those without a slot (0 where experts choose),
    and `expert_usage`, the fraction of slots that hold a token.

    Raises:
      UserError: group_size does not fit.
    """
    batch_size, length, _ = x.shape
    if routing.slots is None:
      group_size = tokens_per_group(batch_size, length, self.group_size)
    else:
      group_size = batch_size * length // routing.slots.token_ids.shape[0]
    exchange = slot_exchange(weights, self.activation_split_dims)
    grouped = exchange.group_tokens(x.astype(weights.up.dtype), group_size)
    if routing.slots is None:
      assignment = self._assign(routing, exchange, group_size, train=train)
    else:
      assignment = SlotAssignment(
        slots=_pad_slots(routing.slots, exchange, len(grouped), group_size), group_size=group_size
      )
    rows = exchange.apply_experts(self._dispatch(grouped, assignment), weights)
    y = exchange.ungroup_tokens(self._combine(rows, assignment), batch_size, length)
    return constrain(y.astype(x.dtype), self.activation_split_dims), _statistics(routing, assignment)

  def _assign(self, routing: RouterOutput, exchange: SlotExchange, group_size: int, *, train: bool) -> SlotAssignment:
    """The slots of a routing in which tokens choose, G and E padded."""
    assert routing.expert_ids is not None
    assert routing.gates is not None
    num_experts = routing.scores.shape[-1]
    factor = self.capacity_factor
    if not train and self.eval_capacity_factor is not None:
      factor = self.eval_capacity_factor
    num_padded = exchange.padded_num_experts(num_experts)
    expert_ids = jnp.where(routing.expert_ids == num_experts, num_padded, routing.expert_ids)
    priorities = None
    if self.priority == 'score':
      first_choices = jnp.minimum(routing.expert_ids[..., :1], num_experts - 1)
      scores = jnp.take_along_axis(jax.lax.stop_gradient(routing.scores), first_choices, axis=-1)
      priorities = exchange.group_tokens(scores, group_size)[..., 0]
    return assign_slots(
      exchange.group_tokens(expert_ids, group_size, fill_value=num_padded),
      exchange.group_tokens(routing.gates, group_size),
      priorities,
      num_experts=num_padded,
      capacity=expert_capacity(group_size, num_experts, factor=factor, min_capacity=self.min_capacity),
      renormalize=self.renormalize,
    )


def _pad_slots(slots: Slots, exchange: SlotExchange, num_groups: int, group_size: int) -> Slots:
  """`slots` with empty ones for the groups and experts of the padding."""
  missing_groups = num_groups - slots.token_ids.shape[0]
  missing_experts = exchange.padded_num_experts(slots.token_ids.shape[1]) - slots.token_ids.shape[1]
  padding = ((0, missing_groups), (0, missing_experts), (0, 0))
  return Slots(
    token_ids=jnp.pad(slots.token_ids, padding, constant_values=group_size), gates=jnp.pad(slots.gates, padding)
  )


def _statistics(routing: RouterOutput, assignment: SlotAssignment) -> dict[str, jax.Array]:
  """Of the real tokens and experts: padding takes no slot."""
  batch_size, length, num_experts = routing.scores.shape
  num_slots = batch_size * length // assignment.group_size * num_experts * assignment.slots.token_ids.shape[-1]
  num_used = jnp.sum(assignment.slots.token_ids < assignment.group_size, dtype=jnp.float32)
  fraction_dropped = jnp.zeros((), jnp.float32)
  if routing.expert_ids is not None:
    num_chosen = jnp.sum(routing.expert_ids < num_experts, dtype=jnp.float32)
    fraction_dropped = (num_chosen - num_used) / jnp.maximum(num_chosen, 1.0)
  return {'fraction_dropped': fraction_dropped, 'expert_usage': num_used / num_slots}
