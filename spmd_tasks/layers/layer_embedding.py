"""Embeddings per layer: a small vector of each token for each layer, beside the residual stream (Gemma 3n).

    LanguageModel(
      layer_embedding=LayerEmbedding(vocab_size=262_144, num_layers=30, dim=256, norm=RmsNorm()),
      stack=...,                   # of blocks with layer_input=LayerInput()
    )

LayerEmbedding computes the vectors of all layers at once; the stack passes each block its own, and the block's
LayerInput adds it to the residual stream.

Shapes: B batch, T sequence, V vocab, D model, L layers, P features of a layer's vector.
"""

from collections.abc import Mapping
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import WithSublayers
from spmd_tasks.layers.embedding import TokenEmbedding
from spmd_tasks.layers.feed_forward import hidden_layer
from spmd_tasks.layers.linear import kernels, project
from spmd_tasks.sharding import SplitDims


class LayerEmbedding(WithSublayers, kw_only=True):
  """Computes (sqrt(P) table[id] + norm(x . projection / sqrt(D))) / sqrt(2) for each layer.

  Weights: `tokens/table` [V, L P], `projection/kernel` [D, L, P], `norm_of_projection/scale` [P].

  Fields:
    vocab_size, num_layers, dim: V, L and P.
    norm: template of the norm.
    dtype: of the computation.
    split_dims: of the projection's kernel.
    activation_split_dims: of the result.
    adapters: the adapter of `projection`.
  """

  vocab_size: int
  num_layers: int
  dim: int
  norm: nn.Module
  dtype: Any = 'float32'
  split_dims: SplitDims = ('embed', None, 'mlp')
  activation_split_dims: SplitDims = ('batch', 'seq', None, None)
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    del layer
    return kernels('projection')

  @nn.compact
  def __call__(self, ids: jax.Array, x: jax.Array) -> jax.Array:
    """Returns [B, T, L, P] for ids [B, T] and their embeddings x [B, T, D], which enter the stack.

    An id outside [0, V) has the vectors of id 0: Gemma 3n's vocabulary has more tokens, of images and audio.
    """
    ids = jnp.where((ids >= 0) & (ids < self.vocab_size), ids, 0)
    split_dims = self.activation_split_dims
    tokens = TokenEmbedding(
      vocab_size=self.vocab_size,
      embed_dim=self.num_layers * self.dim,
      scale_sqrt_depth=False,
      embedding_multiplier=math.sqrt(self.dim),
      dtype=self.dtype,
      lookup_split_dims=('vocab', None),
      activation_split_dims=split_dims and split_dims[:3],
      name='tokens',
    )(ids)
    dims = (self.num_layers, self.dim), self.split_dims, split_dims
    projected = project(self, 'projection', x, *dims, scale=1.0, use_bias=False)
    projected = self.norm.copy(name='norm_of_projection')(projected / math.sqrt(x.shape[-1]))
    return (tokens.reshape(projected.shape) + projected) / math.sqrt(2)


class LayerInput(nn.Module, kw_only=True):
  """A sublayer: (act(x . gate) * layer_input) . out. Weights: `gate` [D, P], `out` [P, D] (each under `.../kernel`).

  Fields:
    activation: a name in feed_forward.ACTIVATIONS.
    dtype: of the computation.
    gate_split_dims, out_split_dims: of the kernels.
    hidden_split_dims, activation_split_dims: of the hidden layer and of the output.
    adapters: adapters of `gate` and `out`.
  """

  activation: str = 'gelu'
  dtype: Any = 'float32'
  gate_split_dims: SplitDims = ('embed', 'mlp')
  out_split_dims: SplitDims = ('mlp', 'embed')
  hidden_split_dims: SplitDims = ('batch', 'seq', 'act_mlp')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see layers/adapter.py."""
    del layer
    return kernels('gate', 'out')

  @nn.compact
  def __call__(self, x: jax.Array, *, layer_input: jax.Array, train: bool = False) -> jax.Array:
    """Returns [B, T, D] for x [B, T, D] and the layer's vectors [B, T, P]."""
    del train
    settings: dict[str, Any] = {'scale': 1.0, 'use_bias': False}
    dims = layer_input.shape[-1], self.gate_split_dims, self.hidden_split_dims
    hidden = hidden_layer(self.activation, layer_input, project(self, 'gate', x, *dims, **settings))
    return project(self, 'out', hidden, x.shape[-1], self.out_split_dims, self.activation_split_dims, **settings)
