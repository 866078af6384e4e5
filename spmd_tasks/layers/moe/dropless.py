"""Dropless: every token meets every expert that it chose, however uneven the choice (MegaBlocks).

Shapes: B batch, T sequence, D model, E experts, k choices per token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.expert_parallel import Dispatch, apply_experts, apply_to_batch
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.local_experts import LocalExperts, name_routing
from spmd_tasks.layers.moe.ring import ring
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.sharding.specs import SplitDims, current_sharding_scope

# How tokens reach experts on other devices.
DISPATCHES: dict[str, Dispatch] = {'ring': ring}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropless:
  """Sorts the tokens' choices by expert and computes each expert on exactly the rows that it gets.

  Inside a `sharding_scope` each device computes the experts that it holds; see `expert_parallel`.

  Fields:
    dispatch: a name in DISPATCHES.
    recompute_activation: keep only the experts' inputs and pre-activations for the backward pass.
    saved_bits: of what is kept for the gradient of the gates: None (as computed), 8 or 4.
    backend: of the grouped matmuls; None for the best here.
    activation_split_dims: of x and of the result.
  """

  dispatch: str = 'ring'
  recompute_activation: bool = False
  saved_bits: int | None = None
  backend: str | None = None
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    if self.dispatch not in DISPATCHES:
      raise ValueError(f'dispatch {self.dispatch!r} is unknown: choose one of {list(DISPATCHES)}.')

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D] in x's dtype, statistics) for x [B, T, D].

    Raises:
      ValueError: the router lets experts choose.
    """
    del train
    if routing.expert_ids is None or routing.gates is None:
      raise ValueError('Dropless needs a router by which tokens choose experts; where experts choose, use a capacity.')
    expert_ids, gates = name_routing((routing.expert_ids, routing.gates))
    experts = LocalExperts(
      weights=weights,
      recompute_activation=self.recompute_activation,
      saved_bits=self.saved_bits,
      backend=self.backend,
    )
    scope = current_sharding_scope()
    if scope is None:
      y = apply_to_batch(x, expert_ids, gates, experts.apply_to_tokens)
    else:
      y = apply_experts(
        x,
        expert_ids,
        gates,
        experts,
        scope=scope,
        activation_split_dims=self.activation_split_dims,
        dispatch=DISPATCHES[self.dispatch],
      )
    return y.astype(x.dtype), {'fraction_dropped': jnp.zeros((), jnp.float32)}
