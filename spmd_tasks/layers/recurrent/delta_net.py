"""GatedDeltaNet: a recurrent layer that takes the place of attention, with a matrix per head in place of a KV cache.

    block = TransformerBlock(attention=GatedDeltaNet(num_heads=32, key_head_dim=128, value_head_dim=128), ...)

Yang et al. (2024, arXiv 2412.06464), as Qwen3-Next, Qwen 3.5 and OLMo Hybrid have it.

Shapes: B batch, T sequence, D model, H heads of values, G heads of queries and keys, K and V features of a head's key
and value, W taps of the convolution.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import math
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import ATTENTION_NAME
from spmd_tasks.layers.attention.attention import ATTENTION_INPUTS_NAME
from spmd_tasks.layers.base import FanInNormal, WithSublayers, current_layer_scope, declare_weight
from spmd_tasks.layers.feed_forward import ACTIVATIONS
from spmd_tasks.layers.linear import kernels, project
from spmd_tasks.layers.norm import RmsNorm
from spmd_tasks.layers.recurrent.delta_rule import delta_rule
from spmd_tasks.layers.recurrent.short_convolution import convolve, document_numbers, last_tokens
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import axes_of, current_sharding_scope, scope_of

_INITIAL_RATES = 0.01, 16.0  # uniform between these, as in transformers
_INITIAL_STEPS = 0.001, 0.1  # log-uniform between these, as in Mamba 2
_CONVOLVED, _GATES = ('query', 'key', 'value'), ('step', 'strength')
_EPSILON = 1e-6  # added to the squared lengths of queries and keys


class GatedDeltaNet(WithSublayers, kw_only=True):
  """A gated delta rule (delta_rule.py) over convolved queries, keys and values; has the call signature of `Attention`.

      q, k, v = silu(convolve(x . kernel))           q, k normalized to length 1
      b = sigmoid(x . strength)                      log a = -exp(log_rate) * softplus(x . step + step_bias)
      y = (out_norm(delta_rule(q / sqrt(K), k, v, a, b)) * silu(x . gate)) . out

  Kimi Delta Attention (2025, arXiv 2510.26692) is GatedDeltaNet(feature_decays=True, gate_rank=K,
  gate_activation='sigmoid').

  Weights: `query` and `key` [D, G, K], `value` and `gate` [D, H, V], `strength` and `step` [D, H], `out` [H, V, D]
  (each under `.../kernel`), `query_taps` and `key_taps` [W, G, K], `value_taps` [W, H, V], `log_rate` and `step_bias`
  [H], `out_norm/scale` [V]. With `feature_decays`, `step` is [D, H, K] and `step_bias` [H, K]. With `gate_rank`, there
  are `gate_down` and `step_down` [D, R], and `gate` and `step` have R in place of D. Head h reads query and key head
  h // (H / G).

  The state, and what the recurrence computes, are float32. A document of a packed row starts from no state, and its
  convolution does not see earlier documents. Padding, segment 0, changes no state. During generation, a slot has the
  state [H, K, V] and the last W - 1 tokens of each convolution.

  Fields:
    num_heads: H.
    num_key_heads: G, a divisor of H; None means H.
    key_head_dim, value_head_dim: K and V.
    conv_size: W.
    use_bias: whether the projections have a bias.
    max_strength: factor of b: above 1, a token may reverse what the state has for its key (OLMo Hybrid has 2).
    feature_decays: whether each feature of a key has a decay a of its own; otherwise each head has one.
    gate_rank: R, if the projections `step` and `gate` are products of two; None: they are not.
    gate_activation: a name in feed_forward.ACTIVATIONS, of the gate.
    out_norm: template of the norm of each head's output.
    chunk_tokens: how many tokens the recurrence computes at once in training, a power of two.
    dtype: of the projections, the convolution and the output.
    init_scale, out_init_scale: FanInNormal's scale for the input projections and for the output projection.
    key_split_dims: of `query` and `key`, and without the first of their taps.
    value_split_dims: of `value` and `gate`; without the last of `strength` and `step`, without the first of the taps.
    down_split_dims: of `step_down` and `gate_down`.
    out_split_dims: of `out`.
    key_activation_split_dims: of queries and keys [B, T, G, K].
    value_activation_split_dims: of values [B, T, H, V]. The recurrence gathers the tokens of a row that devices split.
    activation_split_dims: of the output.
    adapters: adapters of `query`, `key`, `value`, `gate`, `strength`, `step`, `out`, `step_down` and `gate_down`.
  """

  num_heads: int
  num_key_heads: int | None = None
  key_head_dim: int
  value_head_dim: int
  conv_size: int = 4
  use_bias: bool = False
  max_strength: float = 1.0
  feature_decays: bool = False
  gate_rank: int | None = None
  gate_activation: str = 'silu'
  out_norm: RmsNorm = RmsNorm()
  chunk_tokens: int = 64
  dtype: Any = 'float32'
  init_scale: float = 1.0
  out_init_scale: float = 1.0
  key_split_dims: SplitDims = ('embed', 'kv_heads', 'head_dim')
  value_split_dims: SplitDims = ('embed', 'heads', 'head_dim')
  down_split_dims: SplitDims = ('embed', None)
  out_split_dims: SplitDims = ('heads', 'head_dim', 'embed')
  key_activation_split_dims: SplitDims = ('batch', 'seq', 'act_kv_heads', None)
  value_activation_split_dims: SplitDims = ('batch', 'seq', 'act_heads', None)
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    down = () if layer.gate_rank is None else ('step_down', 'gate_down')
    return kernels('query', 'key', 'value', 'gate', 'strength', 'step', 'out', *down)

  def __post_init__(self):
    if self.num_heads < 1 or self._num_key_heads < 1 or self.num_heads % self._num_key_heads:
      raise UserError(
        f'num_heads={self.num_heads} is not divisible by num_key_heads={self.num_key_heads}: choose a divisor.'
      )
    if self.conv_size < 2:
      raise UserError(f'conv_size={self.conv_size} must be at least 2, the token itself and the one before it.')
    if self.chunk_tokens < 1 or self.chunk_tokens & (self.chunk_tokens - 1):
      raise UserError(f'chunk_tokens={self.chunk_tokens} must be a power of two, such as 64.')
    super().__post_init__()

  @property
  def _num_key_heads(self) -> int:
    return self.num_heads if self.num_key_heads is None else self.num_key_heads

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Returns [B, T, D] for x [B, T, D]; segment_ids (or None) and segment_pos, which generation needs, are [B, T]."""
    del train
    scope = current_layer_scope()
    if scope.balanced_tokens:
      raise UserError(
        'balances_tokens=True of the LanguageModel permutes the tokens of a row, which a GatedDeltaNet reads in their '
        'order: set it to False.'
      )
    if segment_ids is None:
      segment_ids = jnp.ones(x.shape[:2], jnp.int32)
    tokens, taps = {'segment_ids': segment_ids}, {}
    for name in _CONVOLVED:
      heads, split_dims, layout = self._value_heads() if name == 'value' else self._key_heads()
      projected = project(self, name, x, heads, split_dims, layout, scale=self.init_scale)
      tokens[name] = constrain(projected, whole_rows(layout))
      taps[name] = self._taps(f'{name}_taps', heads, split_dims)
    # Padding has strength 0 and log decay 0, which leave the state as it is.
    for name, gate in zip(_GATES, self._gates(x), strict=True):
      tokens[name] = jnp.where((segment_ids != 0).reshape(*x.shape[:2], *[1] * (gate.ndim - 2)), gate, 0.0)
    advance = functools.partial(self._advance, taps)
    if scope.cache is None:
      y, _ = advance(tokens, {})
    elif segment_pos is None:
      raise UserError('generation with a GatedDeltaNet needs segment_pos: pass it.')
    else:
      y = scope.cache.advance_state(self, advance, tokens, segment_pos, self._state_split_dims())

    y = constrain(checkpoint_name(y, ATTENTION_NAME), self.value_activation_split_dims)
    gate = project(self, 'gate', self._down('gate_down', x), *self._value_heads(), scale=self.init_scale)
    y = self.out_norm(y) * ACTIVATIONS[self.gate_activation](gate.astype(jnp.float32))
    layouts, scale = (self.out_split_dims, self.activation_split_dims), self.out_init_scale
    return project(self, 'out', y.astype(self.dtype), x.shape[-1], *layouts, scale=scale, num_input_dims=2)

  @nn.nowrap
  def _advance(
    self, taps: Mapping[str, jax.Array], tokens: Mapping[str, jax.Array], earlier: Mapping[str, jax.Array]
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the outputs [B, T, H, V] of the recurrence, and the state after the tokens.

    Args:
      taps: of each convolution.
      tokens: the projected queries, keys and values, the gates, and the segment ids.
      earlier: the state before the tokens; {} if there are none.
    """
    segment_ids = tokens['segment_ids']
    documents, lengths = document_numbers(segment_ids), jnp.sum(segment_ids != 0, axis=1)
    inputs, state = [], {}
    for name in _CONVOLVED:
      tail = earlier.get(f'{name}_tail')
      convolved = jax.nn.silu(convolve(tokens[name], taps[name], documents, tail))
      inputs.append(checkpoint_name(checkpoint_name(convolved, name), ATTENTION_INPUTS_NAME))
      state[f'{name}_tail'] = last_tokens(tokens[name], lengths, tail, self.conv_size - 1)
    first = earlier.get('state')
    if first is None:
      shape = (len(segment_ids), self.num_heads, self.key_head_dim, self.value_head_dim)
      first = jnp.zeros(shape, jnp.float32)
    gates = (tokens[name] for name in _GATES)
    y, state['state'] = _recomputed(self._recur)(*inputs, *gates, documents, first)
    return y, state

  @nn.nowrap
  def _recur(self, query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, H, V] of the recurrence, and the last state; `rest` are arguments of `delta_rule`."""
    query, key, value = (array.astype(jnp.float32) for array in (query, key, value))
    query, key = _normalize(query) / math.sqrt(self.key_head_dim), _normalize(key)
    query, key = (jnp.repeat(array, self.num_heads // self._num_key_heads, axis=2) for array in (query, key))
    layout = whole_rows(self.value_activation_split_dims)
    query, key, value = (constrain(array, layout) for array in (query, key, value))
    y, state = delta_rule(query, key, value, *rest, chunk=self.chunk_tokens)
    return y.astype(self.dtype), state

  def _key_heads(self) -> tuple[tuple[int, int], SplitDims, SplitDims]:
    """Returns the dims of queries and keys, and the split dims of their kernels and of themselves."""
    return (self._num_key_heads, self.key_head_dim), self.key_split_dims, self.key_activation_split_dims

  def _value_heads(self) -> tuple[tuple[int, int], SplitDims, SplitDims]:
    return (self.num_heads, self.value_head_dim), self.value_split_dims, self.value_activation_split_dims

  def _taps(self, name: str, heads: tuple[int, int], split_dims: SplitDims) -> jax.Array:
    """Declares the kernel of a convolution, [W, heads, features]."""
    init, split_dims = FanInNormal(), None if split_dims is None else (None, *split_dims[1:])
    shape = (self.conv_size, *heads)
    taps = declare_weight(self, name, shape=shape, init=init, split_dims=split_dims, num_input_dims=0)  # not a matrix
    return taps.astype(self.dtype)

  def _down(self, name: str, x: jax.Array) -> jax.Array:
    """Returns what `step` or `gate` projects: x, or its product with `name`."""
    if self.gate_rank is None:
      return x
    layout = self.activation_split_dims and (*self.activation_split_dims[:2], None)
    return project(self, name, x, self.gate_rank, self.down_split_dims, layout, scale=self.init_scale)

  def _gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithm of the decay, float32 [B, T, H] or [B, T, H, K], and the strength, float32 [B, T, H]."""
    whole = self.value_split_dims, self.value_activation_split_dims
    per_head = [dims and tuple(dims)[:-1] for dims in whole]

    def projected(name: str, x: jax.Array, heads: tuple[int, ...], kernel: SplitDims, layout: SplitDims) -> jax.Array:
      gate = project(self, name, x, heads, kernel, layout, scale=self.init_scale)
      return constrain(gate.astype(jnp.float32), whole_rows(layout))

    heads = (self.num_heads, self.key_head_dim) if self.feature_decays else (self.num_heads,)
    layouts = whole if self.feature_decays else per_head
    step = projected('step', self._down('step_down', x), heads, *layouts)
    strength = projected('strength', x, (self.num_heads,), *per_head)

    def vector(name: str, shape: tuple[int, ...], init: Any) -> jax.Array:
      split_dims = self.value_split_dims and tuple(self.value_split_dims)[1 : 1 + len(shape)]
      value = declare_weight(self, name, shape=shape, init=init, split_dims=split_dims, tags=('no_decay',))
      return value.reshape(1, 1, *shape, *[1] * (len(heads) - len(shape)))

    log_rate, step_bias = vector('log_rate', heads[:1], _log_rates), vector('step_bias', heads, _step_biases)
    return -jnp.exp(log_rate) * jax.nn.softplus(step + step_bias), self.max_strength * jax.nn.sigmoid(strength)

  def _state_split_dims(self) -> Mapping[str, SplitDims]:
    """Returns the split dims of the state [B, H, K, V] and of the convolutions' tails [B, W - 1, H or G, V or K]."""
    keys, values = whole_rows(self.key_activation_split_dims), whole_rows(self.value_activation_split_dims)
    state = values and (values[0], values[2], None, None)
    return {'state': state, 'query_tail': keys, 'key_tail': keys, 'value_tail': values}


def whole_rows(split_dims: SplitDims) -> SplitDims:
  """Returns split dims [B, T, H, ...] that do not split rows: the axes of a row's tokens split its heads too."""
  if split_dims is None:
    return None
  rows, tokens, heads, *features = split_dims
  return rows, None, (*axes_of(heads), *axes_of(tokens)), *features


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that the backward pass computes again, whatever remat policy applies to the layer.

  The products within chunks take more memory than all other activations of a layer.
  """
  scope = current_sharding_scope()

  def in_scope(*arguments):  # JAX traces the passes of a gradient later
    with contextlib.nullcontext() if scope is None else scope_of(scope):
      return function(*arguments)

  def backward(arguments, cotangents):
    arguments = jax.lax.optimization_barrier(arguments)  # or XLA merges both computations, and keeps the results
    return jax.vjp(in_scope, *arguments)[1](cotangents)

  recomputed = jax.custom_vjp(in_scope)
  recomputed.defvjp(lambda *arguments: (in_scope(*arguments), arguments), backward)
  return recomputed


def _normalize(x: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPSILON)


def _log_rates(rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jnp.log(jax.random.uniform(rng, shape, dtype, *_INITIAL_RATES))


def _step_biases(rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  low, high = map(math.log, _INITIAL_STEPS)
  steps = jnp.exp(jax.random.uniform(rng, shape, dtype, low, high))
  return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
