"""Attention: multi-head, grouped-query and multi-query attention over packed documents, or to an encoder's text.

Shapes: B batch, T sequence, S sequence of the encoder, D model, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import AttentionOptions, check_gradient_keys, split_into_chunks
from spmd_tasks.layers.attention._qk_clip import clip_logits
from spmd_tasks.layers.attention.implementations import Implementation, attend
from spmd_tasks.layers.attention.rotary import Rotary
from spmd_tasks.layers.attention.temperature import Temperature
from spmd_tasks.layers.base import SharedKv, WithSublayers, current_layer_scope, declare_weight, dropout
from spmd_tasks.layers.cache import KvCache
from spmd_tasks.layers.linear import kernels, project
from spmd_tasks.layers.norm import LayerNorm, RmsNorm
from spmd_tasks.sharding import SplitDims

if TYPE_CHECKING:
  from spmd_tasks.layers.attention.positions import PositionBias

ATTENTION_INPUTS_NAME = 'attention_inputs'  # the `checkpoint_name` of queries, keys and values, as they are compared


class Attention(WithSublayers, kw_only=True):
  """Attention; H == G is multi-head, G < H grouped-query (Ainslie et al., 2023), G == 1 multi-query attention.

  Weights: `query` [D, H, K], `key` and `value` [D, G, K], `out` [H, K, D] (each under `.../kernel`); with `qk_norm`
  also `query_norm` and `key_norm` (each under `.../scale`), with `sinks` also `sinks` [H], with `output_gate` also
  `gate/kernel` [D, H, K], with `position_bias` also `position_bias/table`. Query head h reads key/value head
  h // (H // G). The softmax is float32 whatever the dtype.
  During generation, keys and values are cached (layers/cache.py).

  Fields:
    num_heads: H.
    num_kv_heads: G, a divisor of H; None means H.
    head_dim: K; None means D / H, so H must divide D.
    causal: whether a token sees only itself and earlier tokens.
    cross: whether keys and values are computed from the encoder's result; `causal` and `rotary` then do not apply.
      During generation, they are computed once per request.
    window: how many tokens of its document a token sees, counting itself and those before it (Beltagy et al., 2020;
      Mistral 7B: Jiang et al., 2023). Needs `causal`, and bounds the length of the KV cache. None: all.
    chunk: splits a document into chunks of this many tokens; a token sees only tokens of its chunk (Llama 4). Needs
      `causal`, bounds the length of the KV cache, and excludes `window`. None: no chunks.
    rotary: rotary positions of queries and keys; None: none.
    temperature: factor of the queries that grows with the position; None: none.
    qk_norm: whether queries and keys each pass an RmsNorm over K before the rotation (Henry et al., 2020). A template
      in place of True configures the norm: `num_dims=2` normalizes over all heads, with scales [H, K] and [G, K]
      (OLMo 2), which are split as the kernels are. A LayerNorm over K is one too (Phi), also with scales of each head,
      `num_weight_dims=2` (Command R+).
    value_norm: template of a norm of the values, per head; None: none.
    values_from_keys: whether values are the projected keys, before their norm and rotation (Gemma 4's full layers);
      there is no `value` kernel then.
    stores_kv: a name under which later layers of the model find this layer's keys and values; None: they do not.
    reads_kv: the name of an earlier layer's keys and values, which this layer reads in place of its own: it then has
      only the weights of queries and outputs, and the fields of keys and values have no effect (Gemma 3n, Gemma 4 E2B).
      None: its own. Needs a LanguageModel; a pipeline cannot have such layers.
    norms_rotated: whether `qk_norm` is applied after the rotation instead (Hunyuan, Llama 4).
    clip_qkv: bound of the absolute values of queries, keys and values before the rotation (OLMoE, DBRX); None: none.
    position_bias: this layer's RelativePositionBias; None: the call's `position_bias`, which all layers share, if any.
    softmax_scale: factor of the attention logits; None means 1 / sqrt(K).
    logit_cap: caps the attention logits softly, see `soft_cap`; None: no cap.
    sinks: whether each head has a learned logit that takes part in the softmax and has no value, so that the head may
      attend to nothing (gpt-oss).
    output_gate: whether each head's output is multiplied by sigmoid(x . gate) (Qwen3-Next; Qiu et al., 2025).
    qk_clip: after a step in which a head's largest logit exceeded this bound, its query and key kernels are scaled so
      that the logit would equal the bound (Kimi K2; 100 there); see _qk_clip.py. Needs the optimizer MuonClip. None:
      off.
    even_padding: whether padding attends evenly to all tokens of its row, as in T5X, instead of to other padding. No
      token of a document attends to padding in either case.
    dropout_rate: of the attention probabilities in training: a key is dropped for all queries of a head (T5X).
    use_bias: whether the projections have a bias.
    out_bias: whether the output projection has a bias; None means `use_bias`. Qwen 2 has False.
    dtype: of the computation.
    init_scale, out_init_scale: FanInNormal's scale for the three input projections and for the output projection.
    query_init_scale: FanInNormal's scale for the query projection; None means `init_scale`. T5 has 1 / K, with
      `softmax_scale=1`.
    implementation: 'xla', 'blockwise', 'cudnn' (NVIDIA GPUs), 'splash' (TPUs) or 'ring' (sequences split over devices),
      see implementations.py; None for the best that the mesh's devices have.
    gradient_keys: 'splash' computes all gradients in one kernel, for this many keys at a time if they divide T: five
      products of scores instead of seven, but T / gradient_keys partial gradients of the queries in memory. Useful from
      about 64k tokens on; 2048 fits a TPU's usual 16 MiB of vector memory. None: two kernels.
    query_split_dims, kv_split_dims, out_split_dims: of the kernels; `gate` has those of `query`.
    query_activation_split_dims: of the queries [B, T, H, K].
    kv_activation_split_dims: of keys and values [B, T, G, K].
    activation_split_dims: of the output.
    adapters: adapters of `query`, `key`, `value`, `gate` and `out`.
  """

  num_heads: int
  num_kv_heads: int | None = None
  head_dim: int | None = None
  causal: bool = True
  cross: bool = False
  window: int | None = None
  chunk: int | None = None
  rotary: Rotary | None = Rotary()
  temperature: Temperature | None = None
  qk_norm: bool | RmsNorm | LayerNorm = False
  norms_rotated: bool = False
  value_norm: RmsNorm | None = None
  values_from_keys: bool = False
  stores_kv: str | None = None
  reads_kv: str | None = None
  clip_qkv: float | None = None
  position_bias: nn.Module | None = None
  softmax_scale: float | None = None
  logit_cap: float | None = None
  sinks: bool = False
  output_gate: bool = False
  qk_clip: float | None = None
  even_padding: bool = False
  dropout_rate: float = 0.0
  use_bias: bool = False
  out_bias: bool | None = None
  dtype: Any = 'float32'
  init_scale: float = 1.0
  out_init_scale: float = 1.0
  query_init_scale: float | None = None
  implementation: Implementation | None = None
  gradient_keys: int | None = None
  query_split_dims: SplitDims = ('embed', 'heads', 'head_dim')
  kv_split_dims: SplitDims = ('embed', 'kv_heads', 'head_dim')
  out_split_dims: SplitDims = ('heads', 'head_dim', 'embed')
  query_activation_split_dims: SplitDims = ('batch', 'seq', 'act_heads', None)
  kv_activation_split_dims: SplitDims = ('batch', 'seq', 'act_kv_heads', None)
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    has_keys = layer.reads_kv is None
    optional = {'key': has_keys, 'value': has_keys and not layer.values_from_keys, 'gate': layer.output_gate}
    return kernels('query', *(name for name, is_used in optional.items() if is_used), 'out')

  def __post_init__(self):
    if self.window is not None and (self.window < 1 or not self.causal):
      raise UserError(
        f'window={self.window} with causal={self.causal}: a window is at least 1 and needs causal=True. Set both, or '
        'window=None.'
      )
    if self.chunk is not None and (self.chunk < 1 or not self.causal or self.cross or self.window is not None):
      raise UserError(
        f'chunk={self.chunk} must be at least 1, and needs causal=True, cross=False and window=None: set them, or '
        'chunk=None.'
      )
    if self.cross and (self.rotary or self.window or self.position_bias or self.qk_clip):
      raise UserError(
        'cross=True does not support rotary, window, position_bias and qk_clip, because the keys belong to another '
        'text: set them to None.'
      )
    if self.norms_rotated and (not self.qk_norm or self.rotary is None):
      raise UserError('norms_rotated=True needs qk_norm and rotary: set them.')
    for name in ('logit_cap', 'clip_qkv', 'qk_clip'):
      if (bound := getattr(self, name)) is not None and not 0 < bound < float('inf'):
        raise UserError(f'{name}={bound} must be positive, or None for no bound.')
    check_gradient_keys(self.gradient_keys)
    if self.qk_clip is not None and (self.qk_norm or self.adapters or self.values_from_keys):
      raise UserError(
        'qk_clip scales whole query and key kernels, so it does not support adapters, values_from_keys, nor qk_norm, '
        'which bounds the logits itself: unset one of them.'
      )
    if (self.stores_kv or self.reads_kv) and (self.cross or self.clip_qkv or self.qk_clip or self.dropout_rate):
      raise UserError(
        'stores_kv and reads_kv do not support cross, clip_qkv, qk_clip and dropout_rate: unset one of them.'
      )
    super().__post_init__()

  def _dims(self, model_dim: int) -> tuple[int, int]:
    """Returns G and K."""
    if self.num_heads < 1 or (self.head_dim is None and model_dim % self.num_heads):
      raise UserError(
        f'the model dim {model_dim} is not divisible by num_heads={self.num_heads}: set head_dim, or choose a divisor.'
      )
    num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
    if num_kv_heads < 1 or self.num_heads % num_kv_heads:
      raise UserError(f'num_heads={self.num_heads} is not divisible by num_kv_heads={num_kv_heads}: choose a divisor.')
    return num_kv_heads, model_dim // self.num_heads if self.head_dim is None else self.head_dim

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    position_bias: 'PositionBias | None' = None,
    prefix_mask: jax.Array | None = None,
    encoded: jax.Array | None = None,
    encoder_segment_ids: jax.Array | None = None,
    train: bool = False,
  ) -> jax.Array:
    """Returns [B, T, D] for x [B, T, D].

    Args:
      x: float [B, T, D].
      segment_ids: int32 [B, T], the document of each token; None: one document per row.
      segment_pos: int32 [B, T], the position in the document; `rotary` and generation need it.
      position_bias: relative position biases, if the layer has none of its own.
      prefix_mask: int32 or bool [B, T], which tokens belong to the prefix of their document and see one another in both
        directions; None: none.
      encoded: float [B, S, D], the encoder's result, for `cross`; None if the KV cache has its keys and values.
      encoder_segment_ids: int32 [B, S]; a token attends to encoded tokens of its own document. None: to all.
      train: whether dropout is on, which needs the rng `dropout`, and whether `qk_clip` is.

    Raises:
      UserError: dims are not divisible by the numbers of heads, positions are missing, or attention that is not causal
        generates text.
    """
    num_kv_heads, head_dim = self._dims(x.shape[-1])
    if segment_pos is None and (self.rotary is not None or self.temperature is not None or self.chunk is not None):
      raise UserError('rotary attention, a temperature and chunks need segment_pos: pass it, or set them to None.')
    if self.chunk is not None and prefix_mask is not None:
      raise UserError(f'chunk={self.chunk} of an attention does not support prefixes: set it to None.')

    query_scale = self.init_scale if self.query_init_scale is None else self.query_init_scale
    heads = (self.num_heads, head_dim)
    query = project(self, 'query', x, heads, self.query_split_dims, self.query_activation_split_dims, scale=query_scale)
    if self.qk_norm and not self.norms_rotated:
      query = self._qk_norm('query_norm', self.query_split_dims)(query)
    scope = current_layer_scope()
    cache: KvCache | None = scope.cache
    stored = cache.read_encoded(self, len(x)) if cache is not None and self.cross else None
    shared = None if self.reads_kv is None else (scope.shared_kv or {}).get(self.reads_kv)
    if self.reads_kv is not None and shared is None:
      raise UserError(
        f'reads_kv={self.reads_kv!r}: no layer before has stores_kv={self.reads_kv!r}, or the layers are stages of a '
        'pipeline, which do not share keys and values: use a TransformerStack.'
      )
    if stored is not None:
      key, value, encoder_segment_ids = stored
      key, value = key.astype(query.dtype), value.astype(query.dtype)
    elif shared is not None:
      key, value = shared.key, shared.value
    else:
      source = encoded if self.cross else x
      if source is None:
        raise UserError("cross=True needs the encoder's result: use the layer in a block of an EncoderDecoderLm.")
      kv = (num_kv_heads, head_dim), self.kv_split_dims, self.kv_activation_split_dims
      names = ('key',) if self.values_from_keys else ('key', 'value')
      projected = [project(self, name, source, *kv, scale=self.init_scale) for name in names]
      key, value = projected[0], projected[-1]
      if self.value_norm is not None:
        value = self.value_norm.copy(name='norm_of_values')(value)
      if self.qk_norm and not self.norms_rotated:
        key = self._qk_norm('key_norm', self.kv_split_dims)(key)
    if self.clip_qkv is not None:
      query, key, value = (jnp.clip(x, -self.clip_qkv, self.clip_qkv) for x in (query, key, value))
    # A mask [B, S, G, 1] of the values is one [B, G, 1, S] of the probabilities.
    value = dropout(self.dropout_rate, broadcast_dims=(-1,), train=train)(value)
    if self.rotary is not None:
      assert segment_pos is not None
      query, key = self.rotary(query, segment_pos), key if shared else self.rotary(key, segment_pos)
    if self.qk_norm and self.norms_rotated:
      query = self._qk_norm('query_norm', self.query_split_dims)(query)
      key = key if shared else self._qk_norm('key_norm', self.kv_split_dims)(key)
    if self.temperature is not None:
      assert segment_pos is not None
      query = self.temperature(query, segment_pos)
    if self.chunk is not None:
      assert segment_pos is not None
      segment_ids = split_into_chunks(segment_ids, segment_pos, self.chunk)
    earlier = None
    if self.cross:
      if encoder_segment_ids is None or segment_ids is None:
        segment_ids, encoder_segment_ids = None, jnp.ones(key.shape[:2], jnp.int32)
      if cache is not None and stored is None:
        cache.write_encoded(self, key, value, encoder_segment_ids, self.kv_activation_split_dims)
    elif cache is not None:
      if not self.causal or segment_pos is None:
        raise UserError(
          f'causal={self.causal}, segment_pos {"missing" if segment_pos is None else "given"}: generation needs causal '
          'attention and positions, so set causal=True and pass segment_pos.'
        )
      new, kv_layout = {'key': key, 'value': value}, self.kv_activation_split_dims
      if shared is None:
        window = self.window or self.chunk
        earlier = cache.update(self, new, kv_layout, segment_ids=segment_ids, window=window)
      else:
        earlier = cache.read(shared.path, len(x), kv_layout)
    options = AttentionOptions(
      causal=self.causal and not self.cross,
      window=self.window,
      chunk=self.chunk,
      softmax_scale=self.softmax_scale,
      logit_cap=self.logit_cap,
      sinks=self._sink_weights() if self.sinks else None,
      bias=position_bias if self.position_bias is None else self.position_bias(),
      even_padding=self.even_padding,
      gradient_keys=self.gradient_keys,
    )
    if self.qk_clip is not None and options.bias is not None:
      raise UserError('qk_clip does not bound position biases: set it to None, or remove the position_bias.')
    if self.qk_clip is not None and earlier is None:
      clip_logits(self, query, key, segment_ids, options, train=train)
    inputs = {'query': query} if shared else {'query': query, 'key': key, 'value': value}
    named = {name: checkpoint_name(checkpoint_name(x, name), ATTENTION_INPUTS_NAME) for name, x in inputs.items()}
    query, key, value = named['query'], named.get('key', key), named.get('value', value)
    if self.stores_kv is not None and scope.shared_kv is not None:
      scope.shared_kv[self.stores_kv] = SharedKv(key=key, value=value, path=self.path)
    layout = self.query_activation_split_dims
    if earlier is not None:
      assert segment_pos is not None
      attended = earlier.attend(query, key, value, segment_ids, segment_pos, options, split_dims=layout)
    else:
      attended = attend(
        query,
        key,
        value,
        segment_ids,
        options,
        key_segments=encoder_segment_ids if self.cross else None,
        prefix_mask=prefix_mask,
        implementation=self.implementation,
        split_dims=layout,
      )
    if self.output_gate:
      gate = project(self, 'gate', x, heads, self.query_split_dims, layout, scale=self.init_scale)
      attended = attended * jax.nn.sigmoid(gate)
    splits, scale = (self.out_split_dims, self.activation_split_dims), self.out_init_scale
    return project(self, 'out', attended, x.shape[-1], *splits, scale=scale, use_bias=self.out_bias, num_input_dims=2)

  def _sink_weights(self) -> jax.Array:
    zeros, split_dims = jax.nn.initializers.zeros, self.query_split_dims and self.query_split_dims[1:2]
    return declare_weight(self, 'sinks', shape=(self.num_heads,), init=zeros, split_dims=split_dims, tags=('no_decay',))

  def _qk_norm(self, name: str, split_dims: SplitDims) -> RmsNorm | LayerNorm:
    if isinstance(self.qk_norm, bool):
      return RmsNorm(dtype=self.dtype, name=name)
    norm = self.qk_norm
    if (norm.num_weight_dims if isinstance(norm, LayerNorm) else norm.num_dims) == 1:
      return norm.copy(name=name)
    return norm.copy(name=name, split_dims=None if split_dims is None else tuple(split_dims)[-2:])
