"""CapacityGather: tokens move to and from the slots by gathers.

Shapes: D model; G groups of S tokens, k choices per token, E experts, C slots per expert and group.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.capacity import SlotAssignment
from spmd_tasks.layers.moe.capacity_computation import CapacityComputation
from spmd_tasks.layers.moe.combine import combine_rows
from spmd_tasks.layers.moe.permutation import Permutation, gather_rows, take_rows
from spmd_tasks.layers.moe.routing import Slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityGather(CapacityComputation):
  """The form whose cost is that of moving each row once: time and memory are those of the slots, whatever S.

  Where tokens choose, both directions and their gradients are gathers. Where experts choose, a token may have any
  number of slots, and the sums over them are scatter-adds.

  Fields: CapacityComputation's, and
    saved_bits: of what is kept for the gradient of the gates where tokens choose: None (as computed), 8 or 4; see
      `combine_rows`.
  """

  saved_bits: int | None = None

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
    combine = functools.partial(combine_rows, saved_bits=self.saved_bits)
    return jax.vmap(combine)(flat, assignment.gates, _permutation(assignment, assignment.positions))


def _permutation(assignment: SlotAssignment, positions: jax.Array) -> Permutation:
  """Tokens to slots, group by group: a permutation with empty rows and with assignments that have none."""
  token_ids = assignment.slots.token_ids
  return Permutation(
    token_ids=token_ids.reshape(token_ids.shape[0], -1),
    positions=positions,
    group_sizes=jnp.sum(token_ids < assignment.group_size, axis=-1, dtype=jnp.int32),
  )


def _scatter_rows(rows: jax.Array, slots: Slots, group_size: int) -> jax.Array:
  """[S, D] for one group's rows [E * C, D], with its slots flat too."""
  result = jnp.zeros((group_size, rows.shape[-1]), jnp.float32)
  return result.at[slots.token_ids].add(rows * slots.gates[:, None], mode='drop').astype(rows.dtype)
