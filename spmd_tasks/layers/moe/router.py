"""Routers in which tokens choose their experts.

Shapes: B batch, T sequence, D model, E experts, k choices per token.

A router maps x [B, T, D] and a mask of the real tokens to a RouterOutput. Everything in it is float32, at the highest
matmul precision, whatever x's dtype: a rounding that swaps two experts changes a token's output as a whole.
"""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.declaration import declare_weight
from spmd_tasks.layers.initializers import FanInNormal
from spmd_tasks.layers.moe.routing import RouterOutput
from spmd_tasks.layers.moe.top_k import top_k_ids
from spmd_tasks.layers.remat import ROUTING_NAME
from spmd_tasks.sharding.specs import SplitDims, constrain

# The logarithm of a token's affinity to each expert, from its logits. Normalising in logarithms cannot divide by 0.
LOG_AFFINITIES = {'softmax': jax.nn.log_softmax, 'sigmoid': jax.nn.log_sigmoid}


class Router(nn.Module, kw_only=True):
  """Base: the projection to logits. Weight `kernel` [D, E].

  Fields:
    num_experts: E.
    jitter_eps: in training the input is multiplied by U(1 - eps, 1 + eps) (Fedus et al., 2022); needs the rng
      `dropout`.
    init_scale: variance scale of the kernel.
    split_dims: the kernel's.
    activation_split_dims: of the logits.
  """

  num_experts: int
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
    """float32 [B, T, E] for x [B, T, D]."""
    x = x.astype(jnp.float32)
    if train and self.jitter_eps:
      low, high = 1.0 - self.jitter_eps, 1.0 + self.jitter_eps
      x = x * jax.random.uniform(self.make_rng('dropout'), x.shape, jnp.float32, low, high)
    kernel = declare_weight(
      self,
      'kernel',
      shape=(x.shape[-1], self.num_experts),
      init=FanInNormal(scale=self.init_scale),
      split_dims=self.split_dims,
    )
    logits = jnp.einsum('btd,de->bte', x, kernel, precision='highest')
    return constrain(logits, self.activation_split_dims)


class TopKRouter(Router, kw_only=True):
  """Every token goes to the k experts of its highest scores; of equal ones, to the lowest id.

  Router's fields and weight, and, with `balance_bias`, the weight `balance_bias` [E] (see bias_balancing.py).

  Fields:
    num_selected: k.
    score_function: 'softmax' over the experts (Shazeer et al., 2017), or 'sigmoid' of each (DeepSeek-V3).
    normalize_gates: p of the p-norm by which a token's k gates are divided; 1.0 makes their sum 1 (Mixtral). None
      leaves them.
    gate_scale: factor of the gates after that (DeepSeek's routed scaling factor).
    balance_bias: whether a bias per expert is added to the scores for the choice only, not for the gates.
  """

  num_selected: int
  score_function: str = 'softmax'
  normalize_gates: float | None = None
  gate_scale: float = 1.0
  balance_bias: bool = False

  def __post_init__(self):
    if not 1 <= self.num_selected <= self.num_experts:
      raise UserError(
        f'num_selected={self.num_selected} must be at least 1 and at most num_experts={self.num_experts}.'
      )
    if self.score_function not in LOG_AFFINITIES:
      raise UserError(f'score_function {self.score_function!r} is unknown: choose one of {sorted(LOG_AFFINITIES)}.')
    if self.normalize_gates is not None and not self.normalize_gates > 0:
      raise UserError(
        f'normalize_gates={self.normalize_gates} must be the p > 0 of a p-norm, or None to leave the gates.'
      )
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, token_mask: jax.Array | None = None, *, train: bool = False) -> RouterOutput:
    """Returns the RouterOutput for x [B, T, D] and token_mask bool [B, T], or None where every token is real."""
    logits = self._logits(x, train=train)
    log_affinities = LOG_AFFINITIES[self.score_function](logits)
    # Logits have the order of the scores, and none of the ties of scores that round to 0 or 1.
    preferences, bias = logits, None
    if self.balance_bias:
      bias = declare_weight(
        self,
        'balance_bias',
        shape=(self.num_experts,),
        init=jax.nn.initializers.zeros,
        split_dims=(None,),
        tags=('balance_bias', 'no_decay'),
      )
      preferences = jnp.exp(log_affinities) + bias[None, None, :]
    chosen_ids = top_k_ids(preferences, self.num_selected, self.activation_split_dims)
    chosen_ids = checkpoint_name(chosen_ids, ROUTING_NAME)
    log_gates = jnp.take_along_axis(log_affinities, chosen_ids, axis=-1)
    if self.normalize_gates is not None:
      p = self.normalize_gates
      log_gates = log_gates - jax.nn.logsumexp(p * log_gates, axis=-1, keepdims=True) / p
    gates = self.gate_scale * jnp.exp(log_gates)
    expert_ids = self._assign(chosen_ids)
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

  def _assign(self, chosen_ids: jax.Array) -> jax.Array:
    """Where the tokens go, int32 [B, T, k], given the experts that they chose."""
    return chosen_ids


class UniformRouter(TopKRouter, kw_only=True):
  """Sends assignment i, in order of tokens and choices, to expert i mod E, with the gates of the choice (MegaBlocks).

  For benchmarks: the cost of a router, and perfectly balanced experts.
  """

  def _assign(self, chosen_ids: jax.Array) -> jax.Array:
    return jnp.arange(chosen_ids.size, dtype=jnp.int32).reshape(chosen_ids.shape) % self.num_experts
