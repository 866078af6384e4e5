"""Dropless: every token meets every expert that it chose, however uneven the choice (MegaBlocks).

Shapes: B batch, T sequence, D model, E experts, k choices per token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.exchange import Dispatch
from spmd_tasks.layers.moe.expert_parallel import apply_experts
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.local_experts import LocalExperts
from spmd_tasks.layers.moe.padded_all_to_all import padded_all_to_all
from spmd_tasks.layers.moe.ragged_all_to_all import ragged_all_to_all
from spmd_tasks.layers.moe.ring import ring
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.sharding.specs import SplitDims

# How tokens meet experts of other devices.
DISPATCHES: dict[str, Dispatch] = {
  'ring': ring,
  'padded_all_to_all': padded_all_to_all,
  'ragged_all_to_all': ragged_all_to_all,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropless:
  """Sorts the tokens' choices by expert and computes each expert on exactly the rows that it gets.

  Inside a `sharding_scope` every device computes with the experts that it holds; `expert_layout` says which these are.

  Fields:
    dispatch: a name in DISPATCHES.
    capacity_factor: the room for rows in the buffers of an all-to-all, in multiples of what balanced routing fills.
      What exceeds it is dropped, and counted in `fraction_dropped`. None leaves room for the worst case.
    recompute_activation: keep the experts' inputs and pre-activations only for the backward pass.
    saved_bits: of each number that is kept for the gates' gradient: 8, 4, or None for those of the dtype.
    backend: of the grouped matmuls; None for the best here.
    activation_split_dims: of x and of the result.
  """

  dispatch: str = 'ring'
  capacity_factor: float | None = None
  recompute_activation: bool = False
  saved_bits: int | None = None
  backend: str | None = None
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    if self.dispatch not in DISPATCHES:
      raise UserError(f'dispatch {self.dispatch!r} is unknown: choose one of {list(DISPATCHES)}.')
    if self.capacity_factor is not None:
      if self.dispatch == 'ring':
        raise UserError(
          f"capacity_factor={self.capacity_factor} has no effect with dispatch='ring', which has no buffers to bound: "
          'set it to None, or use an all-to-all.'
        )
      if not self.capacity_factor > 0:
        raise UserError(f'capacity_factor={self.capacity_factor} must be positive, or None for the worst case.')

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (y [B, T, D] in x's dtype, statistics) for x [B, T, D].

    The statistics are float32 scalars: `fraction_dropped`, and the all-to-all's capacity.

    Raises:
      UserError: the router lets experts choose; or see `apply_experts`.
    """
    del train
    if routing.expert_ids is None or routing.gates is None:
      raise UserError(
        'Dropless computes what tokens choose, but with this router experts choose: use CapacityGather or '
        'CapacityEinsum.'
      )
    experts = LocalExperts(
      weights=weights,
      recompute_activation=self.recompute_activation,
      saved_bits=self.saved_bits,
      backend=self.backend,
    )
    y, statistics = apply_experts(
      x.astype(weights.up.dtype),
      routing.expert_ids,
      routing.gates,
      experts,
      activation_split_dims=self.activation_split_dims,
      dispatch=DISPATCHES[self.dispatch],
      capacity_factor=self.capacity_factor,
    )
    return y.astype(x.dtype), {'fraction_dropped': jnp.zeros((), jnp.float32), **statistics}
