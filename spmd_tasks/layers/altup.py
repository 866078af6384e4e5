"""Blocks over several residual streams, of which each sublayer reads and writes one (Gemma 3n).

    LanguageModel(
      streams=ResidualStreams(num_streams=4),
      stack=TransformerStack(block=AltUpBlock(altup=AltUp(num_streams=4), laurel=LearnedResidual(rank=64), ...)),
      layer_embedding=LayerEmbedding(...),
      ...,
    )

AltUp (Baykal et al., 2023, arXiv 2301.13310) predicts all streams from one another before a block and corrects them by
what the block computed for the first. The stack's activations are the streams side by side, [B, T, N D].

Shapes: B batch, T sequence, D model, N streams, R rank.
"""

from collections.abc import Mapping
import math
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import FanInNormal, WithSublayers, declare_weight, run_layer
from spmd_tasks.layers.linear import Linear, kernels, project
from spmd_tasks.layers.norm import RmsNorm, declare_vector
from spmd_tasks.layers.transformer import Aux, TransformerBlock
from spmd_tasks.sharding import SplitDims, constrain

_LEAST_SQUARE = 1e-5  # of a projected stream that is scaled


class ResidualStreams(nn.Module, kw_only=True):
  """Makes the streams from embeddings, and an activation from the streams.

  Weights: `expand` and `merge` [N - 1, D, D]. Both scale what they project to the first stream's root mean square.

  Fields:
    num_streams: N, at least 2.
    embed_dim: D.
    dtype: of the products.
    split_dims: of the weights.
    activation_split_dims: of activations [B, T, D].
  """

  num_streams: int
  embed_dim: int
  dtype: Any = 'float32'
  split_dims: SplitDims = (None, 'embed', 'mlp')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    if self.num_streams < 2:
      raise UserError(f'num_streams={self.num_streams} must be at least 2: otherwise, leave streams out.')
    super().__post_init__()

  def setup(self):
    shape, init = (self.num_streams - 1, self.embed_dim, self.embed_dim), FanInNormal(num_stacked_dims=1)
    settings: dict[str, Any] = {'shape': shape, 'init': init, 'split_dims': self.split_dims, 'num_input_dims': 1}
    self.expand_kernels = declare_weight(self, 'expand', **settings)
    self.merge_kernels = declare_weight(self, 'merge', **settings)

  def expand(self, x: jax.Array) -> jax.Array:
    """Returns [B, T, N D] for embeddings [B, T, D]."""
    streams = [x, *(self._scaled(x, x, kernel) for kernel in self.expand_kernels)]
    return constrain(jnp.concatenate(streams, axis=-1), self.activation_split_dims)

  def merge(self, x: jax.Array) -> jax.Array:
    """Returns [B, T, D], the mean of the projected streams, for [B, T, N D]."""
    streams = jnp.split(x, self.num_streams, axis=-1)
    first, others = streams[0], streams[1:]
    for other, kernel in zip(others, self.merge_kernels, strict=True):
      first = first + self._scaled(streams[0], other, kernel)
    return constrain(first / self.num_streams, self.activation_split_dims)

  def _scaled(self, first: jax.Array, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns x . kernel with the root mean square of `first`, in its dtype."""
    y = jnp.einsum('BTD,DE->BTE', x.astype(self.dtype), kernel.astype(self.dtype)).astype(first.dtype)
    square = lambda x: jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    scale = jnp.sqrt(square(first)) * jax.lax.rsqrt(jnp.maximum(square(y), _LEAST_SQUARE))
    return (y * scale).astype(first.dtype)


class AltUp(WithSublayers, kw_only=True):
  """Predicts streams before a block, and corrects them after it.

      c(x) = tanh(norm(x) / D . router)
      predict(h)_j = h_j + sum over i of (c(h_0) . prediction)_ji h_i
      correct(p, y)_j = p_j + (1 + c(y) . correction)_j (y - p_0)

  Weights: `norm_of_input/scale` [D], `router/kernel` [D, N], `prediction/kernel` [N, N, N], `correction/kernel` [N, N].

  Fields:
    num_streams: N.
    norm: template of the norm.
    dtype: of the products with D features.
    split_dims: of the router's kernel.
  """

  num_streams: int
  norm: nn.Module = RmsNorm()
  dtype: Any = 'float32'
  split_dims: SplitDims = ('embed', None)

  def setup(self):
    num = self.num_streams
    self.norm_of_input = self.norm.clone(parent=None)
    self.router = Linear(output_dims=num, dtype=self.dtype, split_dims=self.split_dims)
    self.prediction = Linear(output_dims=(num, num), split_dims=(None, None, None))
    self.correction = Linear(output_dims=num, split_dims=(None, None))

  def predict(self, streams: jax.Array) -> jax.Array:
    """Returns [B, T, N, D] for [B, T, N, D]."""
    coefficients = self.prediction(self._context(streams[:, :, 0]))
    return streams + jnp.einsum('BTJI,BTID->BTJD', coefficients, streams).astype(streams.dtype)

  def correct(self, predicted: jax.Array, activated: jax.Array) -> jax.Array:
    """Returns [B, T, N, D] for predicted streams [B, T, N, D] and what the block computed for the first, [B, T, D]."""
    coefficients = 1.0 + self.correction(self._context(activated))
    change = activated - predicted[:, :, 0]
    return predicted + (coefficients[..., None] * change[:, :, None]).astype(predicted.dtype)

  def _context(self, x: jax.Array) -> jax.Array:
    return jnp.tanh(self.router(self.norm_of_input(x) / x.shape[-1]).astype(jnp.float32))


class LearnedResidual(WithSublayers, kw_only=True):
  """Computes x + norm(x . left . right), a residual of low rank (LAuReL: Menghani et al., 2024, arXiv 2411.07501).

  Weights: `left/kernel` [D, R], `right/kernel` [R, D], `out_norm/scale` [D].

  Fields:
    rank: R.
    norm: template of the norm.
    dtype: of the computation.
    left_split_dims, right_split_dims: of the kernels.
    rank_split_dims, activation_split_dims: of the product with `left` and of the output.
    adapters: adapters of `left` and `right`.
  """

  rank: int
  norm: nn.Module = RmsNorm()
  dtype: Any = 'float32'
  left_split_dims: SplitDims = ('embed', None)
  right_split_dims: SplitDims = (None, 'embed')
  rank_split_dims: SplitDims = ('batch', 'seq', None)
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    del layer
    return kernels('left', 'right')

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [B, T, D] for x [B, T, D]."""
    settings: dict[str, Any] = {'scale': 1.0, 'use_bias': False}
    y = project(self, 'left', x, self.rank, self.left_split_dims, self.rank_split_dims, **settings)
    y = project(self, 'right', y, x.shape[-1], self.right_split_dims, self.activation_split_dims, **settings)
    return x + self.norm.copy(name='out_norm')(y)


class AltUpBlock(TransformerBlock, kw_only=True):
  """A TransformerBlock over streams: its sublayers read the first, and its `layer_input` changes the others.

  With h = predict(streams)_0 and n = attention_norm(h), the block computes

      g = (h + attention_post_norm(attention(n)) + laurel(n)) / sqrt(2)
      y = g + ffn_post_norm(ffn(ffn_norm(g)))
      streams = correct(predict(streams), y)
      streams[1:] += layer_input_post_norm(layer_input(streams_0 * first_scale))

  Weights: TransformerBlock's, under `altup` and `laurel`, and `first_scale` [D].

  Fields:
    altup: predicts and corrects the streams.
    laurel: a residual beside attention.
  """

  altup: AltUp
  laurel: nn.Module

  def __post_init__(self):
    if self.parallel or self.cross_attention or self.output_scale or not (self.pre_norm and self.post_norm):
      raise UserError(
        'an AltUpBlock has pre_norm=True and post_norm=True, and neither parallel, output_scale nor cross_attention: '
        'set them so.'
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    layer_inputs: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    train: bool = False,
    **context: Any,
  ) -> tuple[jax.Array, Aux]:
    """As TransformerBlock, for streams x [B, T, N D]; `layer_inputs` [1, B, T, P] are for `layer_input`."""
    if self.layer_input is None or layer_inputs is None:
      raise UserError('an AltUpBlock needs a layer_input, and its model a layer_embedding: set them.')
    predicted = self.altup.predict(x.reshape(*x.shape[:2], self.altup.num_streams, -1))
    first = predicted[:, :, 0]
    normed = self._norm('attention_norm', first, True)
    text = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **context}
    y, attention_aux = self._add('attention', self.attention, first, train, text, token_mask, normed)
    y = (y + self.laurel(normed).astype(y.dtype)) / math.sqrt(2)
    y, aux = self._add('ffn', self.ffn, y, train, {'segment_ids': segment_ids}, token_mask)
    streams = self.altup.correct(predicted, y)
    ones = jax.nn.initializers.ones
    scale = declare_vector(self, 'first_scale', first, ones, ('norm',))
    first = streams[:, :, 0] * scale.astype(x.dtype)
    y, _ = run_layer('layer_input', self.layer_input, first, layer_input=layer_inputs[0], train=train)
    y = self._norm('layer_input_post_norm', checkpoint_name(y, 'layer_input_output'), True).astype(x.dtype)
    streams = streams.at[:, :, 1:].add(y[:, :, None])
    return constrain(streams.reshape(x.shape), self.activation_split_dims), {**attention_aux, **aux}
