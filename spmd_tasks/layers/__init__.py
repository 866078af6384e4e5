"""Layers of language models, decoder-only and encoder-decoder, as Flax Linen modules.

    model = LanguageModel(embedding=TokenEmbedding(vocab_size=32_000, embed_dim=512), stack=..., final_norm=RmsNorm())
    model.apply({'params': weights}, {'ids': ids})['logits']  # float32 [B, T, V]

A layer names the split dims of its weights and activations ('embed', 'mlp', 'batch', ...); the axis rules of the
experiment map these names to mesh axes. A layer never sees the mesh or padding. Sublayers are fields.

Subpackages, imported by their own names: `layers.attention`, `layers.moe`, `layers.pipeline`. Read base.py (how a layer
declares weights), linear.py, transformer.py, language_model.py and losses.py; products.py has what a Linear multiplies
with: plain, quantized and adapted products.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.layers.adapter import AdaptedKernel, WeightAdapter
  from spmd_tasks.layers.altup import AltUp, AltUpBlock, LearnedResidual, ResidualStreams
  from spmd_tasks.layers.base import FanInNormal, Statistics, WithSublayers, declare_weight
  from spmd_tasks.layers.embedding import TokenEmbedding
  from spmd_tasks.layers.encoder_decoder import EncoderDecoderLm
  from spmd_tasks.layers.feed_forward import FeedForward, GatedFeedForward
  from spmd_tasks.layers.language_model import LanguageModel
  from spmd_tasks.layers.layer_embedding import LayerEmbedding, LayerInput
  from spmd_tasks.layers.layer_patterns import BlockGroup, StackSequence
  from spmd_tasks.layers.linear import Linear
  from spmd_tasks.layers.losses import LanguageModelLoss, Loss, LossOutput, losses_by_source
  from spmd_tasks.layers.nextn import NextnHead, NextnLanguageModel
  from spmd_tasks.layers.norm import LayerNorm, RmsNorm
  from spmd_tasks.layers.products import DeclaredKernel, Product, plain_product
  from spmd_tasks.layers.quantized_products import QuantizedProduct
  from spmd_tasks.layers.score_embedding import ScoreEmbedding
  from spmd_tasks.layers.transformer import TransformerBlock, TransformerStack, remat_policy
