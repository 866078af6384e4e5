"""CapacityComputation: what the two forms of the capacity computation share, which is all but how rows move.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, E experts, C slots per expert and group.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.batched_ffn import batched_ffn
from spmd_tasks.layers.moe.capacity import (
  Priority,
  SlotAssignment,
  assign_slots,
  expert_capacity,
  tokens_per_group,
)
from spmd_tasks.layers.moe.expert_parallel import expert_layout
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.sharding.specs import SplitDims, constrain, current_sharding_scope


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
    priority: 'position' or 'score', see `assign_slots`.
    renormalize: see `assign_slots`.
    activation_split_dims: of x and of the result.
  """

  capacity_factor: float = 1.25
  eval_capacity_factor: float | None = None
  min_capacity: int = 4
  group_size: int | None = None
  priority: Priority = 'position'
  renormalize: bool = False
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    for name in ('capacity_factor', 'eval_capacity_factor'):
      factor = getattr(self, name)
      if factor is not None and not factor >= 0:
        raise ValueError(f'{name}={factor} must be positive, or 0 to drop nothing.')
    if self.min_capacity < 1:
      raise ValueError(f'min_capacity={self.min_capacity} must be at least 1.')
    if self.priority not in ('position', 'score'):
      raise ValueError(f"priority={self.priority!r} must be 'position' or 'score'.")

  @abc.abstractmethod
  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """[G, E, C, D] for x [G, S, D]: the token in each slot, 0 where it is empty."""

  @abc.abstractmethod
  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    """[G, S, D] for rows [G, E, C, D]: each token's rows summed by their gates, in the rows' dtype."""

  def _assign(self, routing: RouterOutput, *, train: bool) -> SlotAssignment:
    batch_size, length, num_experts = routing.scores.shape
    if routing.slots is not None:
      num_groups = routing.slots.token_ids.shape[0]
      return SlotAssignment(group_size=batch_size * length // num_groups, slots=routing.slots)
    factor = self.capacity_factor
    if not train and self.eval_capacity_factor is not None:
      factor = self.eval_capacity_factor
    group_size = tokens_per_group(batch_size, length, self.group_size)
    capacity = expert_capacity(group_size, num_experts, factor=factor, min_capacity=self.min_capacity)
    return assign_slots(
      routing, group_size=group_size, capacity=capacity, priority=self.priority, renormalize=self.renormalize
    )

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D] in x's dtype, statistics) for x [B, T, D].

    Where experts choose, they have chosen the groups and slots too, and only those are used.

    The statistics are `fraction_dropped`, of the real tokens' choices those without a slot (0 where experts choose),
    and `expert_usage`, the fraction of slots that hold a token.

    Raises:
      ValueError: group_size does not fit.
    """
    assignment = self._assign(routing, train=train)
    grouped = x.reshape(-1, assignment.group_size, x.shape[-1])
    batch = self.activation_split_dims[0] if self.activation_split_dims is not None else None
    rows = constrain(self._dispatch(grouped, assignment), (batch, None, None, None))
    rows = self._compute(rows.swapaxes(0, 1), weights).swapaxes(0, 1)
    y = self._combine(constrain(rows, (batch, None, None, None)), assignment)
    y = constrain(y.reshape(x.shape), self.activation_split_dims)
    return y, self._statistics(assignment, routing)

  def _statistics(self, assignment: SlotAssignment, routing: RouterOutput) -> dict[str, jax.Array]:
    is_used = assignment.slots.token_ids < assignment.group_size
    dropped = jnp.zeros((), jnp.float32)
    if routing.expert_ids is not None:
      num_chosen = jnp.sum(routing.expert_ids < routing.scores.shape[-1], dtype=jnp.float32)
      num_kept = jnp.sum(is_used, dtype=jnp.float32)
      dropped = (num_chosen - num_kept) / jnp.maximum(num_chosen, 1.0)
    return {'fraction_dropped': dropped, 'expert_usage': jnp.mean(is_used, dtype=jnp.float32)}

  def _compute(self, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """[E, G, C, D] for rows [E, G, C, D], where the experts are: the two changes of layout are the all-to-alls."""
    scope = current_sharding_scope()
    if scope is None:
      return batched_ffn(rows, weights)
    layout = expert_layout(scope, weights, self.activation_split_dims)
    groups = tuple(axis for axis in layout.batch if axis not in layout.expert + layout.hidden)
    split_dims = (layout.expert, groups, None, None)
    hidden_split_dims = (layout.expert, groups, None, layout.hidden)
    return constrain(batched_ffn(constrain(rows, split_dims), weights, hidden_split_dims=hidden_split_dims), split_dims)
