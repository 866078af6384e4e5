"""Trains T5 models: encoder-decoders with relative position biases, and decoder-only models with the same layers.

    spmd-tasks --exp t5.V11Tiny --mode train --num_fake_devices 8 --job_log_dir runs/t5
    spmd-tasks --exp t5.V11Tiny --mode decode_once --num_fake_devices 8 --job_log_dir runs/t5 --decode_input in.jsonl

Combine a family (V10, V11, MT5, UMT5, ByT5) and a size: `class MT5Small(Small, MT5)`. Flan-T5, Flan-UL2 and the
LM-adapted T5 have the layers of V11; only their checkpoints differ. All train on synthetic pairs of texts here:
override `train_input` for your own.
"""

import fiddle as fdl

from spmd_tasks import register
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.layers.moe import ExpertChoiceRouter
from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import EncoderDecoderLanguageModel, MoeEncoderDecoderLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh


class V10(EncoderDecoderLanguageModel):
  """T5 1.0: ReLU, and tied embeddings (Raffel et al., 2020)."""

  vocab_size = 32_128
  activation = 'relu'
  is_gated = False
  ties_embedding = True


class V11(EncoderDecoderLanguageModel):
  """T5 1.1, LM-adapted T5 and Flan-T5: gated GELU, and untied embeddings."""

  vocab_size = 32_128


class MT5(V11):
  """mT5 (Xue et al., 2021): T5 1.1 for 101 languages."""

  vocab_size = 250_112


class UMT5(V11):
  """UMT5 (Chung et al., 2023): each layer has its own position biases."""

  vocab_size = 256_384
  has_bias_per_layer = True


class ByT5(V11):
  """ByT5 (Xue et al., 2022): bytes as tokens, and an encoder three times as deep as the decoder."""

  vocab_size = 384


class _Pretraining(EncoderDecoderLanguageModel):
  """512 input and 114 target tokens, as in T5X's pretraining on spans; mesh data 8."""

  ici_mesh_shape = (1, 8, 1)
  dtype = 'bfloat16'
  remat_policy = 'attention'
  encoder_len = 512
  seq_len = 114
  batch_size = 128
  num_train_steps = 100_000
  eval_every_steps = 1000
  checkpoint_every = 1000


class Small(_Pretraining):
  """T5 1.1's Small; T5 1.0's has 6 layers, 8 heads and 2,048 hidden dims."""

  model_dims, num_layers, num_encoder_layers, num_heads, hidden_dims = 512, 8, 8, 6, 1024


class Base(_Pretraining):
  """T5 1.1's Base; T5 1.0's has 3,072 hidden dims."""

  model_dims, num_layers, num_encoder_layers, num_heads, hidden_dims = 768, 12, 12, 12, 2048


class Large(_Pretraining):
  """T5 1.1's Large; T5 1.0's has 4,096 hidden dims."""

  model_dims, num_layers, num_encoder_layers, num_heads, hidden_dims = 1024, 24, 24, 16, 2816


class XL(_Pretraining):
  """T5 1.1's XL, 3B parameters."""

  model_dims, num_layers, num_encoder_layers, num_heads, hidden_dims = 2048, 24, 24, 32, 5120


class XXL(_Pretraining):
  """T5 1.1's XXL, 11B parameters."""

  model_dims, num_layers, num_encoder_layers, num_heads, hidden_dims = 4096, 24, 24, 64, 10_240


@register
class V10Base(Base, V10):
  """T5 1.0 Base, 223M parameters."""

  hidden_dims = 3072


@register
class V11Small(Small, V11):
  """T5 1.1, LM-adapted or Flan-T5 Small, 77M parameters."""


@register
class V11XXL(XXL, V11):
  """T5 1.1, LM-adapted or Flan-T5 XXL, 11B parameters."""


@register
class MT5Base(Base, MT5):
  """mT5 Base, 582M parameters."""


@register
class UMT5Base(Base, UMT5):
  """UMT5 Base."""


@register
class ByT5Base(Base, ByT5):
  """ByT5 Base, 582M parameters; other sizes have other dims as well."""

  model_dims, num_layers, num_encoder_layers, hidden_dims = 1536, 6, 18, 3968


class _Tiny(EncoderDecoderLanguageModel):
  """Trains in seconds; mesh data 4 x mdl 2, which does not divide heads, hidden dims and vocabulary."""

  ici_mesh_shape = (1, 4, 2)
  model_dims, num_layers, num_encoder_layers, num_heads, head_dim, hidden_dims = 32, 2, 2, 3, 8, 45
  vocab_size = 67
  encoder_len = 20
  seq_len = 12
  batch_size = 16
  num_train_steps = 200
  learning_rate = 1e-2
  checkpoint_every = 100

  def optimizer(self) -> fdl.Config:
    return fdl.Config(AdamW, learning_rate=self.learning_rate)


@register
class V10Tiny(_Tiny, V10):
  """A tiny T5 1.0 with T5X's defaults: label smoothing, and a loss summed over tokens."""

  label_smoothing = 0.1
  normalization = 'sum'


@register
class V11Tiny(_Tiny, V11):
  """A tiny T5 1.1, with dropout."""

  dropout_rate = 0.1


@register
class UMT5Tiny(_Tiny, UMT5):
  """A tiny UMT5."""


@register
class PrefixTiny(_Tiny):
  """A tiny prefix language model: one stack, with bidirectional attention in the first text."""

  num_encoder_layers = 0
  seq_len = 25


@register
class DecoderTiny(_Tiny):
  """A tiny decoder-only model with T5's layers."""

  num_encoder_layers = 0
  activation = 'relu'
  is_gated = False

  def train_input(self) -> fdl.Config:
    return fdl.Config(
      SyntheticText, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size, seed=self.seed
    )


class _TinyExperts(_Tiny, MoeEncoderDecoderLanguageModel):
  """4 experts in every second block; mesh data 2 x expert 2 x mdl 2."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2)
  num_experts = 4
  num_groups_multiple_of = 4
  max_group_size = 64


@register
class SwitchTiny(_TinyExperts):
  """A tiny Switch Transformer: top-1 (Fedus et al., 2022)."""

  activation = 'relu'
  is_gated = False


@register
class StMoeTiny(_TinyExperts):
  """A tiny ST-MoE: top-2, batch-prioritized in the encoder, a dense layer after each mixture (Zoph et al., 2022)."""

  num_selected_experts = 2
  has_extra_ffn = True
  prioritizes_batch = True


@register
class ExpertChoiceTiny(_TinyExperts):
  """Tiny: expert choice in the encoder (Zhou et al., 2022), token choice in the decoder, which must be causal."""

  def router(self, *, encodes: bool) -> fdl.Config:
    if not encodes:
      return super().router(encodes=False)
    return fdl.Config(ExpertChoiceRouter, num_experts=self.num_experts, **self.capacity())
