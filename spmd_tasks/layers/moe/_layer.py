"""MixtureOfExperts: a feed-forward sublayer in which a router picks a few of many experts for each token.

Shapes: B batch, T sequence, D model, E experts, k choices per token.

    MixtureOfExperts(
      router=TopKRouter(num_experts=8, num_selected=2, normalize_gates=1.0),
      experts=Experts(num_experts=8, hidden_dim=384),
      computation=Dropless(),
    )

A transformer block takes this layer as its `ffn`.
"""

import dataclasses
from typing import Protocol

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.kv_cache import is_decoding
from spmd_tasks.layers.base import Ratios, WithSublayers
from spmd_tasks.layers.moe._balance import RoutingSums, attach_balance_gradient, routing_sums, whole_batch_rows
from spmd_tasks.layers.moe._dropless import Dropless
from spmd_tasks.layers.moe._experts import Experts, ExpertWeights
from spmd_tasks.layers.moe._router import RouterOutput


class ExpertComputation(Protocol):
  """Computes the experts' outputs from a router's decision: Dropless, CapacityEinsum or CapacityGather."""

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, Ratios]:
    """Returns (y, ratios): y [B, T, D] in x's dtype is the sum of the chosen experts' outputs by their gates.

    The ratios are pairs of float32 scalars: numerator and denominator, which are added over the microbatches of a
    pipeline. `fraction_dropped` is the fraction of the real tokens' choices that were not computed.
    """
    ...


class MixtureOfExperts(WithSublayers, kw_only=True):
  """Routes tokens to experts and adds shared parts. Weights under `router`, `experts`, `shared_expert`.

  Decoding drops no tokens, whatever `computation` is: with a capacity, a request's text would depend on the other
  requests in its batch.

  Fields:
    router: router(x, token_mask, train=...) -> RouterOutput.
    experts: declares the experts' weights.
    computation: computes the experts' outputs.
    shared_expert: a feed-forward sublayer that every token passes through, whose output is added (DeepSeekMoE), or
      None.
    load_balance_shards: the number of equal parts of the batch over which the balance loss is computed, see
      `routing_sums`; 1 computes it over all tokens on all devices. Outside of training, where batches may have other
      sizes, the largest smaller number that divides the batch takes its place.
    load_balance_divide_by_k: see `load_balance_loss` (Praxis divides).
  """

  router: nn.Module
  experts: Experts
  computation: ExpertComputation = Dropless()
  shared_expert: nn.Module | None = None
  load_balance_shards: int = 1
  load_balance_divide_by_k: bool = False

  def __post_init__(self):
    if self.load_balance_shards < 1:
      raise UserError(f'load_balance_shards={self.load_balance_shards} must be at least 1.')
    num_routed = getattr(self.router, 'num_experts', self.experts.num_experts)
    if num_routed != self.experts.num_experts:
      raise UserError(
        f'router.num_experts={num_routed} and experts.num_experts={self.experts.num_experts} must be equal.'
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, x: jax.Array, segment_ids: jax.Array | None = None, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, RoutingSums]]:
    """Returns ([B, T, D], {'routing': sums}). Tokens of segment 0 are padding and reach no routed expert.

    The sums' values `load_balance_loss` and `router_z_loss` enter the loss by the loss's `aux_loss_weights`.

    Raises:
      UserError: a model with a router that looks ahead is decoding; or load_balance_shards does not divide the
        training batch.
    """
    decoding = is_decoding(self)
    token_mask = None if segment_ids is None else segment_ids != 0
    routing = self.router(x, token_mask, train=train)
    num_shards = 1 if decoding else self.load_balance_shards
    if not train:
      num_shards = max(n for n in range(1, num_shards + 1) if all(rows % n == 0 for rows in whole_batch_rows(routing)))
    sums = routing_sums(routing, num_shards=num_shards, divide_by_k=self.load_balance_divide_by_k)
    computation = self._without_drops(routing) if decoding else self.computation
    y, ratios = computation(x, routing, self.experts(x.shape[-1]), train=train)
    if train and routing.balance_bias is not None:
      y = attach_balance_gradient(y, routing.balance_bias, sums)
    if self.shared_expert is not None:
      shared, _ = self.shared_expert(x, segment_ids, train=train)
      y = shared + y
    return y, {'routing': sums.replace(ratios=ratios)}

  def _without_drops(self, routing: RouterOutput) -> ExpertComputation:
    if routing.expert_ids is None:
      raise UserError(
        f'{type(self.router).__name__} lets experts choose among all tokens of a text, including later ones, so this '
        'model cannot generate text token by token. Train it with a TopKRouter.'
      )
    if isinstance(self.computation, Dropless):
      return dataclasses.replace(self.computation, capacity_factor=None)
    return Dropless()
