"""CapacityEinsum: tokens move to and from the slots by products with one-hot masks (GShard).

Shapes: D model; G groups of S tokens, E experts, C slots per expert and group.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.capacity import SlotAssignment
from spmd_tasks.layers.moe.capacity_computation import CapacityComputation


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityEinsum(CapacityComputation):
  """The form that any partitioner understands: where tokens and experts are split, it makes the all-to-alls.

  The mask [G, E, C, S], in x's dtype, has E * C elements per token, which at capacity factor f are f * S. The two
  products with it cost as much as a dense plain network of F = f * S. So S should be small against F, by `group_size`;
  with factor 0 (C = S) both are E * S instead. CapacityGather has no mask.

  Fields: CapacityComputation's.
  """

  def _dispatch(self, x: jax.Array, assignment: SlotAssignment) -> jax.Array:
    return jnp.einsum('gecs,gsd->gecd', _mask(assignment, x.dtype), x)

  def _combine(self, rows: jax.Array, assignment: SlotAssignment) -> jax.Array:
    # The rows are weighed, not the mask: so one mask does for both directions.
    weighed = rows * assignment.slots.gates[..., None]
    return jnp.einsum('gecs,gecd->gsd', _mask(assignment, rows.dtype), weighed.astype(rows.dtype))


def _mask(assignment: SlotAssignment, dtype: Any) -> jax.Array:
  """[G, E, C, S], 1 where the slot holds the token."""
  return jax.nn.one_hot(assignment.slots.token_ids, assignment.group_size, dtype=dtype)
