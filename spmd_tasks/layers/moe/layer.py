"""MixtureOfExperts: a feed-forward sublayer whose weights are many experts, of which a router picks a few per token.

Shapes: B batch, T sequence, D model, E experts, k choices per token.

    MixtureOfExperts(
      router=TopKRouter(num_experts=8, num_selected=2, normalize_gates=1.0),
      experts=Experts(num_experts=8, hidden_dim=384),
      computation=Dropless(),
    )

stands wherever a block takes its `ffn`.
"""

import dataclasses
from typing import Literal, Protocol

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.kv_cache import is_decoding
from spmd_tasks.layers.declaration import declare_weight
from spmd_tasks.layers.moe.balance import RoutingSums, routing_sums
from spmd_tasks.layers.moe.bias_balancing import attach_balance_gradient
from spmd_tasks.layers.moe.dropless import Dropless
from spmd_tasks.layers.moe.experts import Experts, ExpertWeights
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.layers.sublayers import WithSublayers


class ExpertComputation(Protocol):
  """How the experts' outputs are computed from a router's decision: Dropless, CapacityEinsum or CapacityGather."""

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (y, fractions): y [B, T, D] in x's dtype, the sum of the chosen experts' outputs by their gates.

    The fractions are float32 scalars, among them `fraction_dropped`: of the real tokens' choices, those that were not
    computed.
    """
    ...


class MixtureOfExperts(WithSublayers, kw_only=True):
  """Router, experts and what is shared by all tokens. Weights under `router`, `experts`, `shared_expert`, `bias`.

  Text is generated without dropping tokens, whatever `computation` is: with a capacity, what a request gets would
  depend on the requests beside it.

  Fields:
    router: router(x, token_mask, train=...) -> RouterOutput.
    experts: declares the experts' weights.
    computation: how they meet the tokens.
    shared_expert: a feed-forward sublayer that every token passes; None for none.
    shared_combination: 'sum' (DeepSeekMoE), or 'mean': (shared + k * routed) / (k + 1), as in MegaBlocks, the mean over
      k + 1 experts where gates sum to 1.
    output_bias: whether a bias [D] is added to the result, once.
    load_balance_shards: in how many equal parts of the batch the balance loss is computed, see `routing_sums`; 1 is
      over all tokens, wherever they are.
    load_balance_divide_by_k: see `load_balance_loss`.
  """

  router: nn.Module
  experts: Experts
  computation: ExpertComputation = Dropless()
  shared_expert: nn.Module | None = None
  shared_combination: Literal['sum', 'mean'] = 'sum'
  output_bias: bool = False
  load_balance_shards: int = 1
  load_balance_divide_by_k: bool = False

  def __post_init__(self):
    num_routed = getattr(self.router, 'num_experts', self.experts.num_experts)
    if num_routed != self.experts.num_experts:
      raise UserError(
        f'router.num_experts={num_routed} and experts.num_experts={self.experts.num_experts} must be equal.'
      )
    if self.shared_combination not in ('sum', 'mean'):
      raise UserError(f"shared_combination={self.shared_combination!r} must be 'sum' or 'mean'.")
    if self.shared_combination == 'mean' and not hasattr(self.router, 'num_selected'):
      raise UserError(
        f"shared_combination='mean' needs a router with num_selected, not a {type(self.router).__name__}: where "
        "experts choose, take 'sum'."
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, x: jax.Array, segment_ids: jax.Array | None = None, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, RoutingSums]]:
    """Returns ([B, T, D], {'routing': sums}); tokens of segment 0 are padding and meet no routed expert.

    Of the sums' values, `load_balance_loss` and `router_z_loss` enter the loss by its `aux_loss_weights`.

    Raises:
      UserError: text is generated with a router that looks ahead.
    """
    decoding = is_decoding(self)
    token_mask = None if segment_ids is None else segment_ids != 0
    routing = self.router(x, token_mask, train=train)
    num_shards = 1 if decoding else self.load_balance_shards
    sums = routing_sums(routing, num_shards=num_shards, divide_by_k=self.load_balance_divide_by_k)
    computation = self._without_drops(routing) if decoding else self.computation
    y, fractions = computation(x, routing, self.experts(x.shape[-1]), train=train)
    if train and routing.balance_bias is not None:
      y = attach_balance_gradient(y, routing.balance_bias, sums)
    if self.shared_expert is not None:
      shared, _ = self.shared_expert(x, segment_ids, train=train)
      if self.shared_combination == 'mean':
        k = self.router.num_selected
        y = (shared + k * y) / (k + 1)
      else:
        y = shared + y
    if self.output_bias:
      bias = declare_weight(
        self, 'bias', shape=x.shape[-1:], init=nn.initializers.zeros, split_dims=(None,), tags=('no_decay',)
      )
      y = y + bias.astype(y.dtype)[None, None, :]
    return y, {'routing': sums.with_fractions(fractions)}

  def _without_drops(self, routing: RouterOutput) -> ExpertComputation:
    if routing.expert_ids is None:
      raise UserError(
        f'{type(self.router).__name__} lets experts choose among all tokens of a text, those to come included: such a '
        'model cannot generate text token by token. Train it with a TopKRouter.'
      )
    if isinstance(self.computation, Dropless):
      return dataclasses.replace(self.computation, capacity_factor=None)
    return Dropless()
