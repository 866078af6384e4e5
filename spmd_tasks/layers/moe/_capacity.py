"""Capacity: every expert computes a fixed number of slots per group of tokens, and overflow is dropped.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, k choices per token, E experts, C slots per expert
and group.

This is the dispatch of GShard (Lepikhin et al., 2020) by gathers in place of one-hot products. Which token takes which
slot is decided in _slots.py.

`SlotResharding` moves slots from the devices that hold their tokens to the devices that hold their experts, and back.
Sharding constraints describe every move, and the partitioner derives the collectives: all-to-alls if one mesh axis
moves from one dim to another and divides both. For several axes at once, or an uneven dim, it gathers whole arrays on
every device. Therefore G and E are padded, G is written as one dim per mesh axis, and each axis moves in its own step.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import expert_layout
from spmd_tasks.layers.moe._experts import Axes, ExpertWeights, batched_ffn
from spmd_tasks.layers.moe._permutation import gather_rows, sum_rows, take_rows
from spmd_tasks.layers.moe._router import RouterOutput
from spmd_tasks.layers.moe._slots import (
  GroupSize,
  SlotAssignment,
  Slots,
  assign_slots,
  expert_capacity,
  tokens_per_group,
)
from spmd_tasks.sharding import SplitDims, constrain, padding
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityGather:
  """Gathers tokens into slots, applies every expert to its slots, and gathers the results back to the tokens.

  Time and memory follow the number of slots. If tokens choose, both directions and their gradients are gathers. If
  experts choose, a token may have any number of slots, and the sums over them are scatter-adds.

  Fields:
    capacity_factor: slots per expert relative to balanced top-1 routing, C = factor * S / E, see `expert_capacity`; 0
      drops nothing, at the cost of S slots per expert.
    eval_capacity_factor: the same outside of training; None uses `capacity_factor`.
    capacity_counts_choices: whether the factor is relative to balanced top-k routing: C = factor * k * S / E
      (MegaBlocks). If not, as in T5X, a factor of 1 has slots for half of the choices of top-2 routing.
    capacity_rounding: how C is rounded, to the 'nearest' integer (T5X) or 'down' (MegaBlocks).
    min_capacity: least number of slots of an expert in a group; with 0, a group whose C is rounded to 0 drops nothing
      (MegaBlocks).
    group_size: S: a divisor of B * T, a `DerivedGroupSize`, or None for one group per row. Small groups make drops
      more likely.
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

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, Ratios]:
    """Returns ([B, T, D] in x's dtype, statistics) for x [B, T, D].

    If experts choose, the router has decided groups and slots, and the fields about them are not read. The statistics
    are `fraction_dropped`, of the real tokens' choices, and `expert_usage`, of slots that hold a token. Raises a
    UserError if group_size does not fit.
    """
    batch_size, length, _ = x.shape
    if routing.slots is None:
      group_size = tokens_per_group(batch_size, length, self.group_size)
    else:
      group_size = batch_size * length // routing.slots.token_ids.shape[0]
    resharding, scope = SlotResharding(), current_sharding_scope()
    if scope is not None:
      layout = expert_layout(scope, weights, self.activation_split_dims, (batch_size, length))
      axes = {'tokens': layout.tokens, 'expert': layout.expert, 'hidden': layout.hidden}
      resharding = SlotResharding(**axes, sizes=scope.mesh.shape)
    grouped = resharding.group_tokens(x.astype(weights.up.dtype), group_size)
    if routing.slots is None:
      assignment = self._assign(routing, resharding, group_size, train=train)
    else:
      assignment = SlotAssignment(
        slots=_pad_slots(routing.slots, resharding, len(grouped), group_size), group_size=group_size
      )
    gate = lambda rows: (rows * assignment.slots.gates[..., None]).astype(rows.dtype)
    rows = self._dispatch(grouped, assignment)
    rows = resharding.apply_experts(gate(rows) if weights.gates_inputs else rows, weights)
    rows = rows if weights.gates_inputs else gate(rows)
    y = resharding.ungroup_tokens(self._combine(rows, assignment), batch_size, length)
    return constrain(y.astype(x.dtype), self.activation_split_dims), _statistics(routing, assignment)

  def _assign(
    self, routing: RouterOutput, resharding: 'SlotResharding', group_size: int, *, train: bool
  ) -> SlotAssignment:
    """Assigns slots if tokens choose, with G and E padded."""
    assert routing.expert_ids is not None
    assert routing.gates is not None
    num_experts = routing.scores.shape[-1]
    factor = self.capacity_factor if train or self.eval_capacity_factor is None else self.eval_capacity_factor
    num_padded = resharding.padded_num_experts(num_experts)  # which is then the id that means 'not routed'
    expert_ids = jnp.where(routing.expert_ids == num_experts, num_padded, routing.expert_ids)
    priorities = None
    if self.priority == 'score':
      first_choices = jnp.minimum(routing.expert_ids[..., :1], num_experts - 1)
      scores = jnp.take_along_axis(jax.lax.stop_gradient(routing.scores), first_choices, axis=-1)
      priorities = resharding.group_tokens(scores, group_size)[..., 0]
    return assign_slots(
      resharding.group_tokens(expert_ids, group_size, fill_value=num_padded),
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

  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    token_ids = assignment.slots.token_ids
    if assignment.permutation is None:
      rows = jax.vmap(take_rows)(x, token_ids.reshape(len(x), -1))
    else:
      rows = jax.vmap(gather_rows)(x, assignment.permutation)
    return rows.reshape(*token_ids.shape, x.shape[-1])

  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    num_groups, model_dim = len(rows), rows.shape[-1]
    rows = rows.reshape(num_groups, -1, model_dim)
    if assignment.permutation is not None:
      return jax.vmap(sum_rows)(rows, assignment.permutation)
    zeros, ids = jnp.zeros((assignment.group_size, model_dim)), assignment.slots.token_ids.reshape(num_groups, -1)
    summed = jax.vmap(lambda rows, ids: zeros.at[ids].add(rows.astype(jnp.float32), mode='drop'))(rows, ids)
    return summed.astype(rows.dtype)


def _pad_slots(slots: Slots, resharding: 'SlotResharding', num_groups: int, group_size: int) -> Slots:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotResharding:
  """The mesh axes that split tokens and experts, and their sizes. Without any axes, one device holds everything.

  Attributes:
    tokens: axes that split the tokens, and hence the groups.
    expert, hidden: axes that split E and F.
    sizes: size of each mesh axis.
  """

  tokens: Axes = ()
  expert: Axes = ()
  hidden: Axes = ()
  sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def padded_num_experts(self, num_experts: int) -> int:
    """Returns E rounded up so that every device has equally many experts."""
    return _round_up(num_experts, num_parts(self.expert, self.sizes))

  def group_tokens(self, x: jax.Array, group_size: int, fill_value: float = 0) -> jax.Array:
    """Returns [G, S, N] for x [B, T, N], padding B with `fill_value` so that every device has equally many groups."""
    batch_size, length, _ = x.shape
    rows_per_group = math.lcm(group_size, length) // length
    num_rows = _round_up(batch_size, rows_per_group * num_parts(self.tokens, self.sizes))
    x = jnp.pad(x, ((0, num_rows - batch_size), (0, 0), (0, 0)), constant_values=fill_value)
    return self._split_groups(x.reshape(-1, group_size, x.shape[-1]))

  def ungroup_tokens(self, x: jax.Array, batch_size: int, length: int) -> jax.Array:
    """Returns [B, T, N] for x [G, S, N], without the padding."""
    return self._split_groups(x).reshape(-1, length, x.shape[-1])[:batch_size]

  def _split_groups(self, x: jax.Array) -> jax.Array:
    """Constrains `x` [G, ...] to the sharding of the tokens."""
    return constrain(x, (self.tokens, *[None] * (x.ndim - 1)))

  def apply_experts(self, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """Moves rows [G, E, C, D] to their experts, applies the networks, and moves the results [G, E, C, D] back.

    G and E of the rows are padded, E of the weights is not.
    """
    num_groups, num_experts, capacity, model_dim = rows.shape
    # [E, the size of each axis that splits tokens, the groups of one device, C, D]
    rows = self._split_groups(rows)
    by_axis = [num_experts, *[self.sizes[axis] for axis in self.tokens], -1]
    rows = rows.swapaxes(0, 1).reshape(*by_axis, capacity, model_dim)
    steps = self._steps()
    for split_dims in steps:
      rows = constrain(rows, split_dims)
    padded = padding.pad_evenly(weights, weights.specs(self.expert, self.hidden), self.sizes)
    hidden_split_dims = (*steps[-1][:-1], self.hidden)
    factors = self._dropout_factors(weights, num_groups, padded.up.shape)
    if factors is not None:
      factors = constrain(factors.reshape(*by_axis, 1, factors.shape[-1]), hidden_split_dims)
    rows = batched_ffn(rows, padded, hidden_split_dims=hidden_split_dims, factors=factors)
    for split_dims in reversed(steps):
      rows = constrain(rows, split_dims)
    return self._split_groups(rows.reshape(num_experts, num_groups, capacity, model_dim).swapaxes(0, 1))

  def _steps(self) -> list[tuple[Axes | str | None, ...]]:
    """Returns the rows' split dims after each step, from the sharding of the tokens to the sharding of the experts."""
    remaining = list(self.tokens)  # axes that still split the groups

    def layout(expert: Axes) -> tuple[Axes | str | None, ...]:
      return (expert, *[axis if axis in remaining else None for axis in self.tokens], None, None, None)

    steps = [layout(())]
    for i, axis in enumerate(self.expert):
      if axis in remaining:
        remaining.remove(axis)
      steps.append(layout(self.expert[: i + 1]))
    for axis in self.hidden:
      if axis in remaining:
        remaining.remove(axis)
        steps.append(layout(self.expert))
    return steps

  def _dropout_factors(self, weights: ExpertWeights, num_groups: int, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns [E, G, F], E and F as in `shape` [E, D, F]: the same numbers on any mesh; None for no dropout."""
    if weights.dropout_key is None:
      return None
    num_experts, _, hidden_dim = weights.up.shape
    kept = jax.random.bernoulli(weights.dropout_key, 1 - weights.dropout_rate, (num_groups, num_experts, hidden_dim))
    padding = ((0, 0), (0, shape[0] - num_experts), (0, shape[2] - hidden_dim))
    return jnp.pad(kept / (1 - weights.dropout_rate), padding).swapaxes(0, 1)


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
