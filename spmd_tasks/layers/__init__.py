"""Layers of a decoder-only language model, as Flax Linen modules.

    model = LanguageModel(
      embedding=TokenEmbedding(vocab_size=32_000, embed_dim=512),
      stack=TransformerStack(
        block=TransformerBlock(attention=Attention(num_heads=8), ffn=GatedFeedForward(hidden_dim=2048), norm=RmsNorm()),
        num_layers=12,
      ),
      final_norm=RmsNorm(),
    )
    model.apply({'params': weights}, {'ids': ids})['logits']  # float32 [B, T, V]

A layer names the split dims of its weights and activations ('embed', 'mlp', 'batch', ...); the axis rules of the
experiment map these names to mesh axes. A layer never sees the mesh or padding. Sublayers are fields: replace a field
to replace a sublayer.

Subpackages, imported by their own names: `layers.attention` (Attention, LatentAttention, positions, KV cache),
`layers.moe` (mixtures of experts), `layers.pipeline` (PipelinedStack, which replaces TransformerStack).

Read base.py (how a layer declares weights), gathered_weights.py and linear.py, then transformer.py, language_model.py
and losses.py. adapter.py is the seam for low-rank adapters (tuning/adapters.py), which layers with projections take as
a field.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.layers.adapter import (
    ADAPTER_TAG,
    AdaptedKernel,
    DeclaredKernel,
    WeightAdapter,
    adapter_choices,
    adapter_of,
    map_adapters,
  )
  from spmd_tasks.layers.base import (
    FanInNormal,
    Statistics,
    WithSublayers,
    declare_weight,
    layer_scope,
    named_arguments,
    signature_of,
    soft_cap,
    values_per_layer,
  )
  from spmd_tasks.layers.chunked_logits import LabelScores, label_scores
  from spmd_tasks.layers.embedding import TokenEmbedding
  from spmd_tasks.layers.feed_forward import (
    ACTIVATIONS,
    FeedForward,
    GatedFeedForward,
    activation_function,
  )
  from spmd_tasks.layers.language_model import LanguageModel
  from spmd_tasks.layers.linear import Linear
  from spmd_tasks.layers.losses import (
    RESERVED_METRICS,
    LanguageModelLoss,
    LossOutput,
    RunsModel,
    as_loss_output,
    losses_by_source,
  )
  from spmd_tasks.layers.norm import LayerNorm, RmsNorm
  from spmd_tasks.layers.transformer import (
    REMAT_POLICIES,
    ROUTING_NAME,
    Aux,
    BlockGroup,
    StackSequence,
    TransformerBlock,
    TransformerStack,
    remat_policy,
  )

__all__ = [
  'ACTIVATIONS',
  'ADAPTER_TAG',
  'REMAT_POLICIES',
  'RESERVED_METRICS',
  'ROUTING_NAME',
  'AdaptedKernel',
  'Aux',
  'BlockGroup',
  'DeclaredKernel',
  'FanInNormal',
  'FeedForward',
  'GatedFeedForward',
  'LabelScores',
  'LanguageModel',
  'LanguageModelLoss',
  'LayerNorm',
  'Linear',
  'LossOutput',
  'RmsNorm',
  'RunsModel',
  'StackSequence',
  'Statistics',
  'TokenEmbedding',
  'TransformerBlock',
  'TransformerStack',
  'WeightAdapter',
  'WithSublayers',
  'activation_function',
  'adapter_choices',
  'adapter_of',
  'as_loss_output',
  'declare_weight',
  'label_scores',
  'layer_scope',
  'losses_by_source',
  'map_adapters',
  'named_arguments',
  'remat_policy',
  'signature_of',
  'soft_cap',
  'values_per_layer',
]
