"""MixtureOfExperts: a feed-forward sublayer in which a router picks a few of many experts for each token.

Shapes: B batch, T sequence, D model, E experts, k choices per token.
"""

import dataclasses
from typing import Any, Literal, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import FanInNormal, Ratios, WithSublayers, current_layer_scope, declare_weight
from spmd_tasks.layers.moe._balance import RoutingSums, attach_balance_gradient, routing_sums, whole_batch_tokens
from spmd_tasks.layers.moe._dropless import Dropless
from spmd_tasks.layers.moe._experts import Experts, ExpertWeights
from spmd_tasks.layers.moe._router import RouterOutput, within_row_capacity
from spmd_tasks.layers.moe._slots import tokens_per_group
from spmd_tasks.layers.transformer import Aux, TransformerBlock


class ExpertComputation(Protocol):
  """Computes the experts' outputs from a router's decision: Dropless or CapacityGather."""

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, Ratios]:
    """Returns (y, ratios): y [B, T, D] in x's dtype is the sum of the chosen experts' outputs by their gates.

    The ratios are as in RoutingSums; `fraction_dropped` counts the real tokens' choices that were not computed.
    """


class MixtureOfExperts(WithSublayers, kw_only=True):
  """Routes each token to a few experts. Weights under `router`, `experts`, `shared_expert`; `shared_gate` and `bias`.

  With `branch_norm`, norms `experts_norm` and `experts_post_norm` of what the experts read and of their sum, and
  `shared_norm` and `shared_post_norm` of the shared expert likewise. The router then reads x itself.

  Decoding drops no tokens, whatever `computation` is: with a capacity, a request's text would depend on the others.

  Fields:
    router: router(x, token_mask, train=...) -> RouterOutput.
    experts: declares the experts' weights.
    computation: computes the experts' outputs.
    shared_expert: a feed-forward sublayer for all tokens, whose output is added (DeepSeekMoE), or None.
    shared_gate: whether the shared expert's output is multiplied by sigmoid(x . w), with a weight `shared_gate` [D]
      (Qwen2-MoE).
    branch_norm: template of norms of the inputs and outputs of the experts and of the shared expert, which is then a
      network beside the experts (Gemma 4); use it in a block with `ffn_pre_norm=False`. None for no such norms.
    averages_shared_expert: whether the output is the mean over the shared expert and the k chosen ones instead:
      (shared + k * (routed + bias)) / (k + 1), as MegaBlocks' `shared_expert_weighted_sum`. Needs a router with k.
    use_bias: whether a weight `bias` [D] is added to the experts' sum, once, whatever the gates (MegaBlocks).
    padding: how tokens of segment 0 are treated. 'ignored': they are not routed, and no loss or statistic counts them.
      'counted': they are not routed, but the losses are means over all positions, with scores and logits of 0 there
      (T5X with `ignore_padding_tokens`). 'routed': they are routed as zeros, take slots and are counted (T5X without);
      decoding ignores them.
    load_balance_shards: the number of equal parts of the batch's tokens over which the balance loss is computed, see
      `routing_sums`; 1: over all tokens on all devices; 'groups': over each of the groups of the capacity (T5X).
      Outside of training, a number that does not divide the tokens is replaced by the largest smaller one that does.
    load_balance_divide_by_k: see `load_balance_loss` (Praxis divides).
    row_capacity: each expert computes only the first `row_capacity` choices of a row's tokens, also in decoding
      (transformers' Switch); None for no limit per row.
  """

  router: nn.Module
  experts: Experts
  computation: ExpertComputation = Dropless()
  shared_expert: nn.Module | None = None
  shared_gate: bool = False
  branch_norm: nn.Module | None = None
  averages_shared_expert: bool = False
  use_bias: bool = False
  padding: Literal['ignored', 'counted', 'routed'] = 'ignored'
  load_balance_shards: int | Literal['groups'] = 1
  load_balance_divide_by_k: bool = False
  row_capacity: int | None = None

  def __post_init__(self):
    shards = self.load_balance_shards
    if shards != 'groups' and not (isinstance(shards, int) and shards >= 1):
      raise UserError(f"load_balance_shards={shards!r} must be at least 1, or 'groups'.")
    if self.padding not in ('ignored', 'counted', 'routed'):
      raise UserError(f"padding={self.padding!r} must be 'ignored', 'counted' or 'routed'.")
    if self.shared_gate and self.shared_expert is None:
      raise UserError('shared_gate=True needs a shared_expert: set it.')
    if self.averages_shared_expert and (self.shared_expert is None or not hasattr(self.router, 'num_selected')):
      raise UserError('averages_shared_expert=True needs a shared_expert and a router whose tokens choose k experts.')
    if (row := self.row_capacity) is not None and (row < 1 or not hasattr(self.router, 'num_selected')):
      raise UserError(f'row_capacity={row} must be at least 1, with a router whose tokens choose experts.')
    if self.experts.dropout_rate and isinstance(self.computation, Dropless):
      raise UserError(f'experts.dropout_rate={self.experts.dropout_rate} needs slots: use CapacityGather.')
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
    """Returns ([B, T, D], {'routing': sums}). Tokens of segment 0 are padding, see `padding`.

    The loss adds the sums' values `load_balance_loss` and `router_z_loss` with its `aux_loss_weights`. Raises a
    UserError if an ExpertChoiceRouter decodes, or load_balance_shards does not divide the training batch.
    """
    decoding = current_layer_scope().cache is not None
    token_mask = None if segment_ids is None else segment_ids != 0
    tokens = x
    if self.padding == 'routed' and token_mask is not None and not decoding:
      tokens, token_mask = jnp.where(token_mask[..., None], x, 0), None
    routing = self.router(tokens, token_mask, train=train)
    counted = routing
    if self.padding == 'counted' and token_mask is not None:
      logits, scores = (jnp.where(token_mask[..., None], array, 0.0) for array in (routing.logits, routing.scores))
      counted = routing.replace(logits=logits, scores=scores, token_mask=None)
    num_shards = 1 if decoding else self._num_balance_shards(routing, train=train)
    sums = routing_sums(counted, num_shards=num_shards, divide_by_k=self.load_balance_divide_by_k)
    computation = self._without_drops(routing) if decoding else self.computation
    row_dropped: Any = None
    if self.row_capacity is not None:
      routing, row_dropped = within_row_capacity(routing, self.row_capacity)
    tokens = self._norm('experts_norm', tokens)
    y, ratios = computation(tokens, routing, self.experts(x.shape[-1], train=train), train=train)
    if row_dropped is not None:
      ratios = {**ratios, 'fraction_dropped': (row_dropped[0] + ratios['fraction_dropped'][0], row_dropped[1])}
    if train and routing.balance_bias is not None:
      y = attach_balance_gradient(y, routing.balance_bias, sums)
    if self.use_bias:
      zeros, split_dims = jax.nn.initializers.zeros, ('embed',)
      bias = declare_weight(self, 'bias', shape=x.shape[-1:], init=zeros, split_dims=split_dims, tags=('no_decay',))
      y = y + bias.astype(y.dtype)[None, None, :]
    y = self._norm('experts_post_norm', y)
    if self.shared_expert is not None:
      shared, _ = self.shared_expert(self._norm('shared_norm', x), segment_ids, train=train)
      shared = self._norm('shared_post_norm', shared)
      if self.shared_gate:
        init = FanInNormal()
        gate = declare_weight(
          self, 'shared_gate', shape=x.shape[-1:], init=init, split_dims=('embed',), num_input_dims=1
        )
        logits = jnp.einsum('BTD,D->BT', x.astype(jnp.float32), gate)
        shared = (jax.nn.sigmoid(logits)[..., None] * shared).astype(shared.dtype)
      if self.averages_shared_expert:
        k = self.router.num_selected
        shared, y = shared / (k + 1), y * (k / (k + 1))
      y = shared + y
    return y, {'routing': sums.replace(ratios=ratios)}

  @nn.nowrap
  def _norm(self, name: str, x: jax.Array) -> jax.Array:
    return x if self.branch_norm is None else self.branch_norm.copy(name=name)(x)

  def _num_balance_shards(self, routing: RouterOutput, *, train: bool) -> int:
    tokens, shards = whole_batch_tokens(routing), self.load_balance_shards
    if shards == 'groups':
      if not hasattr(self.computation, 'group_size'):
        raise UserError("load_balance_shards='groups' needs groups: use CapacityGather.")
      if routing.slots is not None:
        return tokens[1]
      return tokens[0] // tokens_per_group(
        routing.scores.shape[0], routing.scores.shape[1], self.computation.group_size
      )
    return shards if train else max(n for n in range(1, shards + 1) if all(count % n == 0 for count in tokens))

  def _without_drops(self, routing: RouterOutput) -> ExpertComputation:
    if routing.expert_ids is None:
      raise UserError(
        f'{type(self.router).__name__} lets experts choose among all tokens of a text, including later ones, so this '
        'model cannot generate text token by token. Train it with a TopKRouter.'
      )
    if isinstance(self.computation, Dropless):
      return dataclasses.replace(self.computation, capacity_factor=None, overflow='drop')
    return Dropless()


class ExtraFfnBlock(TransformerBlock, kw_only=True):
  """A TransformerBlock with one more feed-forward sublayer after `ffn`, `extra_ffn` (ST-MoE: Zoph et al., 2022)."""

  extra_ffn: nn.Module

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    token_mask: jax.Array | None = None,
    train: bool = False,
    **context: Any,
  ) -> tuple[jax.Array, Aux]:
    """As TransformerBlock."""
    x, aux = super().__call__(x, segment_ids, segment_pos, token_mask=token_mask, train=train, **context)
    x, extra = self._add('extra_ffn', self.extra_ffn, x, train, {'segment_ids': segment_ids}, token_mask)
    return x, {**aux, **extra}
