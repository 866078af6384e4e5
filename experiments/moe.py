"""Trains mixture-of-experts language models.

    spmd-tasks --exp moe.StdlibTiny --mode train --num_fake_devices 8 --job_log_dir runs/moe

moe.StdlibTiny goes from a loss of 7.1 nats per byte to a cross entropy of 1.42 in 300 steps, in two minutes on two CPU
cores.
"""

import fiddle as fdl

from spmd_tasks import register
from spmd_tasks.layers import TokenEmbedding, TransformerBlock
from spmd_tasks.layers.attention import Attention, LatentAttention, Rotary
from spmd_tasks.layers.moe import CapacityGather, Dropless, TopKRouter
from spmd_tasks.recipes import MoeLanguageModel, ladder
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, DataExpertModelMesh, DataModelMesh


@register
class StdlibTiny(MoeLanguageModel):
  """8 experts, top 2, dropless, on the standard library's source; mesh data 2 x expert 4."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=4)
  hidden_dims = 192
  num_train_steps = 300
  eval_every_steps = 100
  checkpoint_every = 100


@register
class SwitchTiny(MoeLanguageModel):
  """Switch Transformer's layer: 4 experts, top 1, capacity factor 1.25; T5X's two data axes, 4 x 2."""

  mesh = DataModelMesh(num_devices=8, num_experts=4)
  num_experts = 4
  num_selected_experts = 1
  num_train_steps = 300
  checkpoint_every = 100

  def router(self) -> fdl.Config[TopKRouter]:
    return fdl.copy_with(super().router(), normalize_gates=None, jitter_eps=0.01)

  def computation(self) -> fdl.Config[CapacityGather]:
    return fdl.Config(CapacityGather, capacity_factor=1.25, eval_capacity_factor=2.0)


@register
class Ladder(ladder.MoeLadder):
  """Experts, 2 of 8 per token, with as many active parameters as lm.Ladder of the same depth: --set depth=12."""


@register
class UnevenExperts(MoeLanguageModel):
  """6 experts over an expert axis of 4; 3 heads, 91 hidden dims and 259 tokens over a mdl axis of 2."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=4, num_partitions=2)
  num_experts = 6
  model_dims = 30
  num_layers = 3
  num_heads = 3
  hidden_dims = 91
  seq_len = 64
  batch_size = 8
  num_train_steps = 100
  checkpoint_every = 50


@register
class Mixtral8x7B(MoeLanguageModel):
  """47B parameters, 13B active per token (Jiang et al., 2024); mesh replica 2 x data 128 (256 chips)."""

  # Each layer's experts, 2.8 GB in bfloat16, are gathered from 128 chips, and tokens are not sent. (To gather from all
  # chips of a slice, the TPU compiler uses an all-reduce, which takes twice as long.)
  mesh = DataExpertModelMesh(num_devices=256, num_expert_partitions=1, num_replicas=2)
  target: str = 'v5p:8x8x4'  # of --mode plan
  vocab_size = 32_000
  model_dims = 4096
  num_layers = 32
  num_heads = 32
  num_kv_heads = 8
  hidden_dims = 14_336
  dtype = 'bfloat16'
  remat_policy = 'attention_and_ffn'
  seq_len = 4096
  batch_size = 768
  num_train_steps = 100_000
  learning_rate = 3e-4
  eval_every_steps = 1000
  checkpoint_every = 1000
  log_every_steps = 50
  rotary_wavelength: float = 1e6

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    attention: fdl.Config[Attention] = block.attention
    attention.rotary = fdl.Config(Rotary, max_wavelength=self.rotary_wavelength)
    return block


@register
class FineGrained16B(Mixtral8x7B):
  """16.7B parameters, 64 small experts and a shared one (DeepSeekMoE), balanced by bias (DeepSeek-V3); 256 chips."""

  vocab_size = 102_400
  model_dims = 2048
  num_layers = 28
  num_heads = 16
  num_kv_heads = None
  hidden_dims = 1408
  shared_hidden_dims = 2816
  num_experts = 64
  num_selected_experts = 6
  batch_size = 1536
  load_balance_weight = 1e-4
  rotary_wavelength = 1e4

  def router(self) -> fdl.Config[TopKRouter]:
    return fdl.copy_with(super().router(), score_function='sigmoid', balance_bias=True)


@register
class Mixtral8x7BOnH200(Mixtral8x7B):
  """moe.Mixtral8x7B on 8 H200; mesh data 8."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=1)
  target = 'h200:8'
  batch_size = 16
  remat_policy = 'attention'  # the experts' pre-activations would be 30 GB a GPU


@register
class Mixtral8x7BOnV6e(Mixtral8x7B):
  """moe.Mixtral8x7B with capacities on 256 v6e chips, attention offloaded to the hosts; mesh replica 2 x data 128."""

  target = 'v6e:16x16'
  batch_size = 3072
  remat_policy = 'attention_offloaded'
  num_logit_chunks = 4
  scatters_gradients = True

  def computation(self) -> fdl.Config[CapacityGather]:
    return fdl.Config(CapacityGather, capacity_factor=1.25, capacity_counts_choices=True)


@register
class FineGrained16BOnH200(FineGrained16B):
  """moe.FineGrained16B on 8 H200; mesh data 8."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=1)
  target = 'h200:8'
  batch_size = 32
  num_logit_chunks = 8


@register
class Qwen3Moe30B(Mixtral8x7B):
  """Qwen3-30B-A3B: 30.5B parameters, 128 experts, 8 per token (Qwen, 2025); mesh replica 2 x data 32 (64 chips)."""

  mesh = DataExpertModelMesh(num_devices=64, num_expert_partitions=1, num_replicas=2)
  target = 'v5p:4x4x4'
  vocab_size = 151_936
  model_dims = 2048
  num_layers = 48
  num_heads = 32
  num_kv_heads = 4
  hidden_dims = 768
  num_experts = 128
  num_selected_experts = 8
  batch_size = 256
  load_balance_weight = 1e-3

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    block.attention.head_dim = 128
    block.attention.qk_norm = True
    return block

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return _untied(super().embedding())


@register
class Qwen3Moe30BOnH200(Qwen3Moe30B):
  """moe.Qwen3Moe30B on 8 H200; mesh data 8."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=1)
  target = 'h200:8'
  batch_size = 16


# Weights other than experts are sharded over both axes.
EMBED_OVER_BOTH_AXES = (('embed', ('data', 'expert')), *(rule for rule in DEFAULT_AXIS_RULES if rule[0] != 'embed'))


@register
class DeepSeekV3Like(Mixtral8x7B):
  """671B parameters, 37B active (DeepSeek-V3, 2024); mesh data 16 x expert 32, tokens sent to experts (512 chips)."""

  mesh = DataExpertModelMesh(num_devices=512, num_expert_partitions=32, base_rules=EMBED_OVER_BOTH_AXES)
  target = 'v5p:8x8x8'
  vocab_size = 129_280
  model_dims = 7168
  num_layers = 61
  num_dense_layers = 3
  dense_hidden_dims = 18_432
  num_heads = 128
  num_kv_heads = None
  hidden_dims = 2048
  shared_hidden_dims = 2048
  num_experts = 256
  num_selected_experts = 8
  batch_size = 512
  remat_policy = 'full'
  load_balance_weight = 1e-4
  router_z_weight = 0.0
  rotary_wavelength = 1e4

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    attention = fdl.Config(
      LatentAttention,
      num_heads=self.num_heads,
      query_rank=1536,
      kv_rank=512,
      nope_head_dim=128,
      rope_head_dim=64,
      value_head_dim=128,
      rotary=fdl.Config(Rotary, max_wavelength=self.rotary_wavelength),
      dtype=self.dtype,
    )
    return fdl.copy_with(super().block(ffn), attention=attention)

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return _untied(super().embedding())

  def router(self) -> fdl.Config[TopKRouter]:
    return fdl.copy_with(
      super().router(),
      score_function='sigmoid',
      balance_bias=True,
      gate_scale=2.5,
      num_groups=8,
      num_selected_groups=4,
      group_score='top2_sum',
    )

  def computation(self) -> fdl.Config[Dropless]:
    return fdl.Config(Dropless, dispatch='padded_all_to_all', capacity_factor=1.25, overflow='passes')


@register
class DeepSeekV3LikeOnH200(DeepSeekV3Like):
  """Seven layers of moe.DeepSeekV3Like, 50B parameters, on 8 H200, which cannot hold all 61; mesh expert 8."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=8, base_rules=EMBED_OVER_BOTH_AXES)
  target = 'h200:8'
  num_layers = 7
  batch_size = 16
  num_logit_chunks = 8


def _untied(embedding: fdl.Config[TokenEmbedding]) -> fdl.Config[TokenEmbedding]:
  """Gives the logits their own kernel."""
  return fdl.copy_with(embedding, tied=False, scale_sqrt_depth=False)
