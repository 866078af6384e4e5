"""Routers: decide which experts compute each token, and with which gates.

Shapes: B batch, T sequence, D model, E experts, k choices per token; G groups of S tokens, C slots per
expert and group.

A router maps x [B, T, D] and a mask of the real tokens to a RouterOutput. In TopKRouter every token chooses k experts;
in ExpertChoiceRouter every expert chooses C tokens per group.

Routers compute in float32 at the highest matmul precision, whatever x's dtype: a rounding error that swaps two experts
changes a token's whole output.
"""

import functools
import math
from typing import Any, Literal

from flax import struct
import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import (
  REPLAYED,
  FanInNormal,
  current_layer_scope,
  declare_weight,
)
from spmd_tasks.layers.moe._slots import GroupSize, Slots, expert_capacity, tokens_per_group
from spmd_tasks.layers.norm import RmsNorm
from spmd_tasks.layers.transformer import ROUTING_NAME
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import current_sharding_scope
from spmd_tasks.sharding.weights import Initializer

# From logits to the logarithm of a token's affinity to each expert. Normalizing logarithms cannot divide by 0.
LOG_AFFINITIES = {'softmax': jax.nn.log_softmax, 'sigmoid': jax.nn.log_sigmoid}


class RouterOutput(struct.PyTreeNode):
  """A router's decision for a batch of tokens. Padding tokens are not routed.

  Attributes:
    logits: float32 [B, T, E], of the jittered input if there is jitter, without the balance bias.
    scores: float32 [B, T, E], softmax(logits), or sigmoid(logits) over their sum. Only losses, statistics and slot
      priorities read the scores.
    token_mask: bool [B, T], False for padding; None if every token is real.
    expert_ids: int32 [B, T, k], first choice first. The id E means 'not routed' (padding). None if experts choose.
    gates: float32 [B, T, k], the weights of the experts' outputs; 0 for padding. None if experts choose.
    slots: the tokens that experts chose; None if tokens choose.
    balance_bias: float32 [E], which took part in the choice (see `attach_balance_gradient`); None without one.
  """

  logits: jax.Array
  scores: jax.Array
  token_mask: jax.Array | None
  expert_ids: jax.Array | None = None
  gates: jax.Array | None = None
  slots: Slots | None = None
  balance_bias: jax.Array | None = None


def within_row_capacity(routing: RouterOutput, capacity: int) -> tuple[RouterOutput, tuple[jax.Array, jax.Array]]:
  """Drops all but each expert's first `capacity` choices in each row; returns also (number dropped, of how many)."""
  assert routing.expert_ids is not None
  assert routing.gates is not None
  ids, num_experts = routing.expert_ids, routing.scores.shape[-1]
  is_chosen = ids.reshape(ids.shape[0], -1, 1) == jnp.arange(num_experts)[None, None]  # [B, T * k, E]
  places = jnp.sum(jnp.where(is_chosen, jnp.cumsum(is_chosen, axis=1), 0), axis=-1).reshape(ids.shape)
  fits = places <= capacity
  kept = routing.replace(expert_ids=jnp.where(fits, ids, num_experts), gates=jnp.where(fits, routing.gates, 0.0))
  counts = jnp.sum(~fits, dtype=jnp.float32), jnp.sum(places > 0, dtype=jnp.float32)
  return kept, counts


class Router(nn.Module, kw_only=True):
  """Base class: projects tokens to logits. Weight `kernel` [D, E]; with `use_bias` also `bias` [E].

  Fields:
    num_experts: E.
    use_bias: whether the logits have a bias (initially zero, tagged `no_decay`; gpt-oss).
    input_norm: template of a norm of the input, which is then divided by sqrt(D) (Gemma 4); None for neither.
    jitter_eps: in training the input is multiplied by U(1 - eps, 1 + eps), by the rng `dropout` (Switch: Fedus et al.).
    init_scale: variance scale of the kernel.
    split_dims, activation_split_dims: of the kernel and of the logits.
  """

  num_experts: int
  use_bias: bool = False
  input_norm: RmsNorm | None = None
  jitter_eps: float = 0.0
  init_scale: float = 1.0
  split_dims: SplitDims = ('embed', None)
  activation_split_dims: SplitDims = ('batch', 'seq', None)

  def __post_init__(self):
    if self.num_experts < 1:
      raise UserError(f'num_experts={self.num_experts} must be at least 1.')
    if not 0.0 <= self.jitter_eps < 1.0:
      raise UserError(f'jitter_eps={self.jitter_eps} must be at least 0 and less than 1.')
    super().__post_init__()

  def _logits(self, x: jax.Array, *, train: bool) -> jax.Array:
    """Returns float32 [B, T, E] for x [B, T, D]."""
    x = x.astype(jnp.float32)
    if train and self.jitter_eps:
      low, high = 1.0 - self.jitter_eps, 1.0 + self.jitter_eps
      x = x * jax.random.uniform(self.make_rng('dropout'), x.shape, jnp.float32, low, high)
    if self.input_norm is not None:
      x = self.input_norm.copy(name='norm_of_input')(x) / math.sqrt(x.shape[-1])
    shape, init = (x.shape[-1], self.num_experts), FanInNormal(scale=self.init_scale)
    kernel = declare_weight(self, 'kernel', shape=shape, init=init, split_dims=self.split_dims, num_input_dims=1)
    multiply = functools.partial(jnp.einsum, 'btd,de->bte', precision='highest')
    logits = multiply(x, kernel)
    if self.use_bias:
      logits = logits + self._per_expert('bias', tags=('no_decay',))[None, None, :]
    return constrain(logits, self.activation_split_dims)

  def _per_expert(self, name: str, tags: tuple[str, ...], init: Initializer = jax.nn.initializers.zeros) -> jax.Array:
    """Declares a weight [E]."""
    return declare_weight(self, name, shape=(self.num_experts,), init=init, split_dims=(None,), tags=tags)


class TopKRouter(Router, kw_only=True):
  """Sends every token to the k experts with its highest scores; the lowest id wins a tie.

  Router's fields and weight; `balance_bias=True` adds the weight `balance_bias` [E], `expert_scales=True` the weight
  `expert_scales` [E].

  Fields:
    num_selected: k.
    score_function: 'softmax' over the experts (Shazeer et al., 2017), or 'sigmoid' of each logit (DeepSeek-V3).
    normalize_gates: p of the p-norm that divides a token's k gates; 1.0 makes their sum 1 (Mixtral). None does not.
    gate_scale: factor of the gates after normalization (DeepSeek's routed scaling factor).
    expert_scales: whether each expert's gates are then multiplied by a weight that starts at 1 (Gemma 4).
    gate_margin: if set, the gate of a token's j-th choice is its share in a softmax over the experts that were not
      chosen before and whose logit z is close to the choice's logit z_j: (z_j - z) / max(|z|, z_j) <= gate_margin.
      These are the gates of SparseMixer in evaluation (PhiMoE: 2024; twice its `jitter_eps`); its training samples the
      choices, this layer's does not. Needs 'softmax' and `normalize_gates=None`.
    balance_bias: whether a bias per expert joins the scores for the choice only, not for the gates (balancing without
      an auxiliary loss: Wang et al., 2024).
    num_groups: number of groups of experts with consecutive ids; 1 for no groups.
    num_selected_groups: a token chooses among the experts of this many groups, the best by `group_score` (DeepSeek-V2:
      2024); None for all groups.
    group_score: score of a group: 'max', the best of its experts' scores (DeepSeek-V2), or 'top2_sum', the sum of the
      two best, balance bias included (DeepSeek-V3: 2024).
  """

  num_selected: int
  score_function: str = 'softmax'
  normalize_gates: float | None = None
  gate_scale: float = 1.0
  expert_scales: bool = False
  gate_margin: float | None = None
  balance_bias: bool = False
  num_groups: int = 1
  num_selected_groups: int | None = None
  group_score: Literal['max', 'top2_sum'] = 'max'

  def __post_init__(self):
    if not 1 <= self.num_selected <= self.num_experts:
      raise UserError(f'num_selected={self.num_selected} must be from 1 to num_experts={self.num_experts}.')
    if self.score_function not in LOG_AFFINITIES:
      raise UserError(f'score_function {self.score_function!r} is unknown: choose one of {sorted(LOG_AFFINITIES)}.')
    if self.normalize_gates is not None and not self.normalize_gates > 0:
      raise UserError(f'normalize_gates={self.normalize_gates} must be the p > 0 of a p-norm, or None for no norm.')
    if self.gate_margin is not None and (self.score_function != 'softmax' or self.normalize_gates is not None):
      raise UserError("gate_margin needs score_function='softmax' and normalize_gates=None: set them.")
    if self.group_score not in ('max', 'top2_sum'):
      raise UserError(f"group_score={self.group_score!r} must be 'max' or 'top2_sum'.")
    groups, experts = self.num_groups, self.num_experts
    if groups < 1 or experts % groups or (self.group_score == 'top2_sum' and experts // groups < 2):
      raise UserError(
        f"num_groups={groups} must divide num_experts={experts}, and group_score='top2_sum' needs at least two experts "
        'in a group: choose fewer groups.'
      )
    selected = groups if self.num_selected_groups is None else self.num_selected_groups
    if not 1 <= selected <= groups or self.num_selected > selected * (experts // groups):
      raise UserError(
        f'num_selected_groups={selected} must be from 1 to num_groups={groups}, and these groups of '
        f'{experts // groups} experts must have the num_selected={self.num_selected} that a token chooses.'
      )
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, token_mask: jax.Array | None = None, *, train: bool = False) -> RouterOutput:
    """Routes x [B, T, D]; token_mask is bool [B, T], or None if every token is real."""
    logits = self._logits(x, train=train)
    log_affinities = LOG_AFFINITIES[self.score_function](logits)
    # Logits order the experts as the scores do, but have no ties when scores round to 0 or 1.
    preferences, bias = logits, None
    if self.balance_bias or self.group_score == 'top2_sum':
      preferences = jnp.exp(log_affinities)
    if self.balance_bias:
      bias = self._per_expert('balance_bias', tags=('balance_bias', 'no_decay'))
      preferences = preferences + bias[None, None, :]
    if self.num_selected_groups is not None:
      preferences = self._of_best_groups(preferences, self.num_selected_groups)
    chosen_ids: Any = self.get_variable(REPLAYED, 'expert_ids')
    if chosen_ids is None:
      chosen_ids = top_k_ids(preferences, self.num_selected, self.activation_split_dims)
    if (cache := current_layer_scope().cache) is not None:
      cache.write_routing(self, chosen_ids, self.activation_split_dims)
    chosen_ids = checkpoint_name(chosen_ids, ROUTING_NAME)
    gates, expert_ids = self._gates(log_affinities, chosen_ids), chosen_ids
    if self.gate_margin is not None:
      gates = self.gate_scale * _shares_of_close_experts(logits, chosen_ids, self.gate_margin)
    if self.expert_scales:
      gates = gates * self._per_expert('expert_scales', ('no_decay',), jax.nn.initializers.ones)[chosen_ids]
    if token_mask is not None:
      expert_ids = jnp.where(token_mask[..., None], expert_ids, self.num_experts)
      gates = jnp.where(token_mask[..., None], gates, 0.0)
    return RouterOutput(
      logits=logits,
      scores=jax.nn.softmax(log_affinities),
      token_mask=token_mask,
      expert_ids=checkpoint_name(expert_ids, ROUTING_NAME),
      gates=checkpoint_name(gates, ROUTING_NAME),
      balance_bias=bias,
    )

  @nn.nowrap
  def _gates(self, log_affinities: jax.Array, chosen_ids: jax.Array) -> jax.Array:
    log_gates = jnp.take_along_axis(log_affinities, chosen_ids, axis=-1)
    if self.normalize_gates is not None:
      p = self.normalize_gates
      log_gates = log_gates - jax.nn.logsumexp(p * log_gates, axis=-1, keepdims=True) / p
    return self.gate_scale * jnp.exp(log_gates)

  def _of_best_groups(self, preferences: jax.Array, num_selected: int) -> jax.Array:
    """Returns the preferences [B, T, E] with -inf for the experts of the groups that a token does not choose."""
    grouped = jax.lax.stop_gradient(preferences).reshape(*preferences.shape[:2], self.num_groups, -1)
    scores = jnp.max(grouped, axis=-1)
    if self.group_score == 'top2_sum':
      is_best = jnp.argmax(grouped, axis=-1)[..., None] == jnp.arange(grouped.shape[-1])[None, None, None]
      scores = scores + jnp.max(jnp.where(is_best, -jnp.inf, grouped), axis=-1)
    group_ids = top_k_ids(scores, num_selected, self.activation_split_dims)
    is_chosen = jnp.any(group_ids[..., None] == jnp.arange(self.num_groups)[None, None, None], axis=2)  # [B, T, groups]
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(preferences.shape)


def _shares_of_close_experts(logits: jax.Array, chosen_ids: jax.Array, margin: float) -> jax.Array:
  """Returns gates float32 [B, T, k] of logits [B, T, E] and choices int32 [B, T, k]; see TopKRouter.gate_margin."""
  gates, experts = [], jnp.arange(logits.shape[-1])[None, None]
  for j in range(chosen_ids.shape[-1]):
    chosen = jnp.take_along_axis(logits, chosen_ids[..., j : j + 1], axis=-1)
    distance = jax.lax.stop_gradient((chosen - logits) / jnp.maximum(jnp.abs(logits), chosen))
    is_earlier = jnp.any(chosen_ids[..., :j, None] == experts[:, :, None], axis=2)
    close = jnp.where((distance > margin) | is_earlier, -jnp.inf, logits)
    gates.append(jnp.exp(chosen - jax.nn.logsumexp(close, axis=-1, keepdims=True)))
  return jnp.concatenate(gates, axis=-1)


class ExpertChoiceRouter(Router, kw_only=True):
  """Lets every expert take the C tokens with the highest scores in each group (Zhou et al., 2022).

  All experts have the same load, and no assignment is dropped; a token may be taken by any number of experts, or by
  none. In a causal language model the router looks ahead: whether an expert takes a token depends on later tokens, so
  that the training loss is too low, and generation token by token cannot repeat its choices.

  Scores are the softmax over the experts, and the gates are the scores of the chosen tokens. The earliest token wins a
  tie. If a group has fewer than C real tokens, the remaining slots stay empty. Router's fields and weight.

  Fields:
    capacity_factor: C = round(capacity_factor * S / E), at most S: the mean number of experts per token.
    eval_capacity_factor: the same outside of training; None uses `capacity_factor`.
    min_capacity: the least C; 4 in T5X.
    group_size: S: a divisor of B * T, a `DerivedGroupSize`, or None for one group per row.
  """

  capacity_factor: float = 2.0
  eval_capacity_factor: float | None = None
  min_capacity: int = 1
  group_size: GroupSize = None

  def __post_init__(self):
    for name in ('capacity_factor', 'eval_capacity_factor', 'min_capacity'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise UserError(f'{name}={value} must be positive.')
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, token_mask: jax.Array | None = None, *, train: bool = False) -> RouterOutput:
    """Routes x [B, T, D]; token_mask is bool [B, T], or None. Raises a UserError if group_size does not fit."""
    group_size = tokens_per_group(x.shape[0], x.shape[1], self.group_size)
    factor = self.capacity_factor if train or self.eval_capacity_factor is None else self.eval_capacity_factor
    capacity = expert_capacity(group_size, self.num_experts, factor=factor, min_capacity=self.min_capacity)
    logits = self._logits(x, train=train)
    scores = jax.nn.softmax(logits)
    # [G, E, S]: the search for the best tokens runs over the last dim.
    grouped = scores.reshape(-1, group_size, self.num_experts).swapaxes(1, 2)
    preferences = grouped
    if token_mask is not None:
      group_mask = token_mask.reshape(-1, 1, group_size)
      preferences = jnp.where(group_mask, preferences, -1.0)  # below every score
    split_dims = self.activation_split_dims
    token_ids = top_k_ids(preferences, capacity, None if split_dims is None else (split_dims[0], None, None))
    if token_mask is not None:
      is_real = jnp.take_along_axis(group_mask, token_ids, axis=-1)
      token_ids = jnp.where(is_real, token_ids, group_size)
    token_ids = checkpoint_name(token_ids, ROUTING_NAME)
    gates = jnp.take_along_axis(grouped, token_ids, axis=-1, mode='fill', fill_value=0.0)
    slots = Slots(token_ids=token_ids, gates=checkpoint_name(gates, ROUTING_NAME))
    return RouterOutput(logits=logits, scores=scores, token_mask=token_mask, slots=slots)


def top_k_ids(x: jax.Array, k: int, split_dims: SplitDims) -> jax.Array:
  """Returns int32 [..., k]: the indices of the k greatest entries of x's last dim, greatest first, first index on ties.

  Every device searches its own rows, as split_dims say inside a `sharding_scope`, one entry per dim of x; for
  `jax.lax.top_k` of sharded rows, the compiler gathers all rows on every device (jax 0.10). No gradient passes.
  """
  x = jax.lax.stop_gradient(x)
  scope = current_sharding_scope()
  if scope is None or split_dims is None:
    return _search(x, k)
  spec = scope.activation_spec((*split_dims[:-1], None), x.shape, is_even=True)
  return jax.shard_map(lambda rows: _search(rows, k), mesh=scope.mesh, in_specs=spec, out_specs=spec)(x)


def _search(x: jax.Array, k: int) -> jax.Array:
  # XLA expands a top_k into a sort and a slice and recognizes that pair again as a search. If another slice follows,
  # XLA merges both slices and really sorts, which takes 8 to 30 times as long on CPU. The barrier prevents the merge.
  return jax.lax.optimization_barrier(jax.lax.top_k(x, k)[1])
