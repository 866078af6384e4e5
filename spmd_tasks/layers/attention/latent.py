"""LatentAttention: attention whose keys and values are projections of one small vector per token, which is cached.

    attention = LatentAttention(
      num_heads=128, query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
    )

Multi-head latent attention (MLA) of DeepSeek-V2 (2024, arXiv 2405.04434) and DeepSeek-V3. Training computes
the keys and values of all heads. Generation multiplies `kv_up` with queries and results, which are few, instead of with
the latent vectors of all cached tokens:

    query . (latent . key_up) = (query . key_up^T) . latent

All heads then read the cache itself, as in multi-query attention, with latent vectors as keys and as values.

Shapes: B batch, T sequence, D model, H heads, Q and C ranks of the latent vectors of queries and of keys and values,
N and R features of a head without and with rotary position, V features of a head's value.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import AttentionOptions, check_gradient_keys
from spmd_tasks.layers.attention._qk_clip import shrinkage, write_factors
from spmd_tasks.layers.attention.implementations import attend
from spmd_tasks.layers.attention.rotary import Rotary
from spmd_tasks.layers.base import FanInNormal, current_layer_scope, declare_weight
from spmd_tasks.layers.linear import adapted, adapter_of, kernels, project
from spmd_tasks.layers.norm import RmsNorm
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import gather_for_tokens


class LatentAttention(nn.Module, kw_only=True):
  """Causal self-attention through latent vectors; has the call signature of `Attention`.

  Weights: `query_down` [D, Q], `query_norm` [Q] and `query_up` [Q, H, N + R], or with `query_rank=None` only `query`
  [D, H, N + R]; `kv_down` [D, C + R], `kv_norm` [C], `out` [H, V, D] (under `.../kernel`, norms under `.../scale`), and
  `kv_up` [C, H, N + V] itself. The first N features of a head have no position. All heads share the R rotary features
  of a key, the last ones of `kv_down`. The KV cache has one array, `latent` [B, 1, S, C + R]: normalized latent vectors
  and rotated keys.

  Fields:
    num_heads: H.
    query_rank, kv_rank: Q and C; `query_rank=None` projects queries directly.
    nope_head_dim, rope_head_dim, value_head_dim: N, R and V.
    rotary: rotary positions of the R features; None: none (Kimi Linear).
    softmax_scale: factor of the attention logits; None means 1 / sqrt(N + R), which DeepSeek multiplies by the square
      of `yarn_magnitude(factor, mscale_all_dim)`.
    epsilon: of the norms of the latent vectors.
    qk_clip: as in Attention. Heads share the R features of keys, so only the queries' R features are scaled.
    gradient_keys: as in Attention.
    use_bias: whether `query_down`, `kv_down` and `out` have a bias.
    dtype: of the computation.
    init_scale, out_init_scale: FanInNormal's scale for the input projections and for the output projection.
    query_split_dims, down_split_dims, up_split_dims, out_split_dims: of `query`; of `query_down` and `kv_down`; of
      `query_up` and `kv_up`; of `out`.
    heads_activation_split_dims: of queries, keys and values [B, T, H, ...].
    latent_split_dims: of latent vectors [B, T, C + R]; devices that split heads replicate them, as they are small.
    activation_split_dims: of the output.
    adapters: of the projections. Generation applies `kv_up` in two parts, so its adapter is merged into the kernel.
  """

  num_heads: int
  query_rank: int | None = None
  kv_rank: int
  nope_head_dim: int
  rope_head_dim: int
  value_head_dim: int
  rotary: Rotary | None = Rotary()
  softmax_scale: float | None = None
  epsilon: float = 1e-6
  qk_clip: float | None = None
  gradient_keys: int | None = None
  use_bias: bool = False
  dtype: Any = 'float32'
  init_scale: float = 1.0
  out_init_scale: float = 1.0
  query_split_dims: SplitDims = ('embed', 'heads', 'head_dim')
  down_split_dims: SplitDims = ('embed', None)
  up_split_dims: SplitDims = ('embed', 'heads', 'head_dim')
  out_split_dims: SplitDims = ('heads', 'head_dim', 'embed')
  heads_activation_split_dims: SplitDims = ('batch', 'seq', 'act_heads', None)
  latent_split_dims: SplitDims = ('batch', 'seq', None)
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  def __post_init__(self):
    check_gradient_keys(self.gradient_keys)
    if self.qk_clip is not None and (not self.qk_clip > 0 or self.adapters):
      raise UserError(f'qk_clip={self.qk_clip} must be positive and does not support adapters: unset one of them.')
    super().__post_init__()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    queries = ('query',) if layer.query_rank is None else ('query_down', 'query_up')
    return {**kernels(*queries, 'kv_down', 'out'), 'kv_up': 'kv_up'}

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Returns [B, T, D] for x [B, T, D]; segment_ids (or None) and segment_pos, which it needs, are int32 [B, T]."""
    if segment_pos is None:
      raise UserError('latent attention needs segment_pos: pass it.')
    query, query_rope = jnp.split(self._query(x), [self.nope_head_dim], axis=-1)
    latent, key_rope = jnp.split(self._down('kv_down', self.kv_rank + self.rope_head_dim, x), [self.kv_rank], axis=-1)
    latent = RmsNorm(epsilon=self.epsilon, dtype=self.dtype, name='kv_norm')(latent)
    key_rope = key_rope[:, :, None, :]
    if self.rotary is not None:
      query_rope, key_rope = self.rotary(query_rope, segment_pos), self.rotary(key_rope, segment_pos)
    init, split_dims = FanInNormal(scale=self.init_scale), self.up_split_dims
    shape = (self.kv_rank, self.num_heads, self.nope_head_dim + self.value_head_dim)
    kernel = declare_weight(self, 'kv_up', shape=shape, init=init, split_dims=split_dims, num_input_dims=1)
    adapted_kernel = adapted(
      adapter_of(self.adapters, 'kv_up'),
      module=self,
      value=kernel,
      prefix='kv_up_',
      split_dims=split_dims,
      dtype=self.dtype,
      token_split_dims=self.latent_split_dims and self.latent_split_dims[:2],
    )
    kv_up = kernel.astype(self.dtype)
    scale = self.softmax_scale or (self.nope_head_dim + self.rope_head_dim) ** -0.5
    options = AttentionOptions(softmax_scale=scale, gradient_keys=self.gradient_keys)

    earlier = None
    joint = jnp.concatenate([latent[:, :, None, :], key_rope], axis=-1)  # [B, T, 1, C + R]
    if (cache := current_layer_scope().cache) is not None:
      rows, columns, features = self.latent_split_dims or (None,) * 3
      earlier = cache.update(self, {'latent': joint}, (rows, columns, None, features), segment_ids=segment_ids)
    if earlier is None:
      if self.heads_activation_split_dims is not None:
        kv_up = gather_for_tokens(kv_up, self.up_split_dims, self.heads_activation_split_dims[:2])
      keys_and_values = jnp.einsum('BTC,CHM->BTHM', latent, kv_up)
      if adapted_kernel is not None:
        keys_and_values = adapted_kernel.outputs(latent, keys_and_values)
      keys_and_values = constrain(keys_and_values, self.heads_activation_split_dims)
      key, value = jnp.split(keys_and_values, [self.nope_head_dim], axis=-1)
      key = jnp.concatenate([key, jnp.broadcast_to(key_rope, query_rope.shape)], axis=-1)
      query = jnp.concatenate([query, query_rope], axis=-1)
      if self.qk_clip is not None:
        gamma = shrinkage(query, key, segment_ids, options, self.qk_clip)
        sizes = (self.nope_head_dim, self.rope_head_dim, self.value_head_dim)
        powers = (jnp.sqrt(gamma), gamma, jnp.ones_like(gamma))
        nope, rope, ones = (jnp.broadcast_to(x, (self.num_heads, size)) for x, size in zip(powers, sizes))
        factors = {
          f'{"query" if self.query_rank is None else "query_up"}/kernel': jnp.concatenate([nope, rope], axis=-1),
          'kv_up': jnp.concatenate([nope, ones], axis=-1),
        }
        write_factors(self, factors, self.up_split_dims, train=train)
      attended = attend(query, key, value, segment_ids, options, split_dims=self.heads_activation_split_dims)
    else:
      if adapted_kernel is not None:
        kv_up = adapted_kernel.kernel()
      key_up, value_up = jnp.split(kv_up, [self.nope_head_dim], axis=-1)
      query = constrain(jnp.einsum('BTHN,CHN->BTHC', query, key_up), self.heads_activation_split_dims)
      query = jnp.concatenate([query, query_rope], axis=-1)
      # The values include the rotated keys: to slice the cache would copy it.
      layout = self.heads_activation_split_dims
      attended = earlier.attend(query, joint, joint, segment_ids, segment_pos, options, split_dims=layout)
      attended = jnp.einsum('BTHC,CHV->BTHV', attended[..., : self.kv_rank], value_up)
    splits, scale = (self.out_split_dims, self.activation_split_dims), self.out_init_scale
    return project(self, 'out', attended, x.shape[-1], *splits, scale=scale, num_input_dims=2)

  def _query(self, x: jax.Array) -> jax.Array:
    """Returns the queries of all heads, [B, T, H, N + R], not rotated."""
    name, split_dims = 'query', self.query_split_dims
    if self.query_rank is not None:
      x = self._down('query_down', self.query_rank, x)
      x = RmsNorm(epsilon=self.epsilon, dtype=self.dtype, name='query_norm')(x)
      name, split_dims = 'query_up', self.up_split_dims
    heads, layout = (self.num_heads, self.nope_head_dim + self.rope_head_dim), self.heads_activation_split_dims
    return project(self, name, x, heads, split_dims, layout, scale=self.init_scale, use_bias=False)

  def _down(self, name: str, rank: int, x: jax.Array) -> jax.Array:
    layout = self.down_split_dims, self.latent_split_dims
    return project(self, name, x, rank, *layout, scale=self.init_scale)
