"""Models on Ironwood (tpu7x) with published step times, with the same chips, batch, length and remat.

    spmd-tasks --exp ironwood.Llama70B --mode plan

docs/benchmarks/plans_tpu.md has the published seconds. A chip is two devices.
"""

from collections.abc import Mapping

import fiddle as fdl

from spmd_tasks import register
from spmd_tasks.experiments import lm, moe
from spmd_tasks.layers import BlockGroup, LanguageModel, TokenEmbedding, TransformerBlock, TransformerStack
from spmd_tasks.layers.attention import Attention, YarnScaling
from spmd_tasks.layers.moe import Dropless, MixtureOfExperts, TopKRouter
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, DataExpertModelMesh, context_axis_rules


@register
class Llama70B(lm.Llama70B):
  """lm.Llama70B on 64 Ironwood chips of two devices each; mesh data 128."""

  target = 'tpu7x:4x4x4'
  ici_mesh_shape = (1, 128, 1)
  batch_size = 256
  remat_policy = 'attention'
  num_logit_chunks = 1

  def tpu_options(self) -> Mapping[str, str]:
    return {}


@register
class Llama405B(Llama70B):
  """Llama 3's 405B parameters on 256 Ironwood chips, layer inputs offloaded to the hosts; mesh data 512."""

  target = 'tpu7x:4x8x8'
  ici_mesh_shape = (1, 512, 1)
  model_dims = 16_384
  num_layers = 126
  num_heads = 128
  hidden_dims = 53_248
  batch_size = 1536
  remat_policy = 'full_offloaded'
  num_logit_chunks = 4
  learning_rate = 8e-5

  def tpu_options(self) -> Mapping[str, str]:
    return {'xla_tpu_enable_offloading_copy_to_sparsecore': 'false'}  # otherwise steps wait for the copies to the hosts


@register
class LongLlama70B(lm.Llama70B):
  """lm.Llama70B on sequences of 131,072, sharded over 8 devices; 256 Ironwood chips, mesh data 64 x context 8."""

  target = 'tpu7x:4x8x8'
  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 64, 8, 1)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)
  seq_len = 131_072
  batch_size = 64
  remat_policy = 'attention'

  def tpu_options(self) -> Mapping[str, str]:
    return {}

  def language_model(self) -> fdl.Config[LanguageModel]:
    model = fdl.copy_with(super().language_model(), balances_tokens=True)
    model.stack.block.attention.gradient_keys = 4096
    return model


@register
class Qwen3Moe235B(moe.Qwen3Moe30B):
  """Qwen3-235B-A22B on 256 Ironwood chips; mesh data 512."""

  mesh = DataExpertModelMesh(num_devices=512, num_expert_partitions=1)
  target = 'tpu7x:4x8x8'
  model_dims = 4096
  num_layers = 94
  num_heads = 64
  hidden_dims = 1536
  batch_size = 8192
  remat_policy = 'full_quarter_offloaded'
  num_logit_chunks = 8

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    block.attention.gradient_keys = 1024
    return block


@register
class GptOss120B(moe.Mixtral8x7B):
  """gpt-oss-120b (OpenAI, 2025): 117B parameters, 5.1B active, every other layer local; 64 Ironwood chips."""

  mesh = DataExpertModelMesh(
    num_devices=128, num_expert_partitions=64, num_replicas=2, base_rules=moe.EMBED_OVER_BOTH_AXES
  )
  target = 'tpu7x:4x4x4'
  vocab_size = 201_088
  model_dims = 2880
  num_layers = 36
  num_heads = 64
  hidden_dims = 2880
  num_experts = 128
  num_selected_experts = 4
  seq_len = 8192
  batch_size = 1280
  remat_policy = 'full_offloaded'
  num_logit_chunks = 16
  rotary_wavelength = 150_000.0

  def router(self) -> fdl.Config[TopKRouter]:
    return fdl.copy_with(super().router(), use_bias=True)

  def computation(self) -> fdl.Config[Dropless]:
    return fdl.Config(Dropless, dispatch='gather')

  def ffn(self) -> fdl.Config[MixtureOfExperts]:
    ffn = super().ffn()
    ffn.experts.use_bias, ffn.experts.activation = True, 'clamped_swiglu'
    return ffn

  def block(self, ffn: fdl.Config, window: int | None = None) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    attention: fdl.Config[Attention] = block.attention
    attention.head_dim, attention.sinks, attention.use_bias, attention.window = 64, True, True, window
    attention.rotary.scaling = fdl.Config(YarnScaling, factor=32.0, original_length=4096, truncate=False)
    return block

  def stack(self) -> fdl.Config[TransformerStack]:
    blocks = tuple(self.block(self.ffn(), window=window) for window in (128, None))
    return fdl.copy_with(super().stack(), block=fdl.Config(BlockGroup, blocks=blocks), num_layers=self.num_layers // 2)

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return fdl.copy_with(super().embedding(), tied=False, scale_sqrt_depth=False)


@register
class DeepSeekV3(moe.DeepSeekV3Like):
  """moe.DeepSeekV3Like on 256 Ironwood chips, gathering each layer's experts; mesh data 2 x expert 256."""

  # Each device has half of an expert. Sharded over all devices, D would be 14, less than a tile: gathers would copy.
  mesh = DataExpertModelMesh(num_devices=512, num_expert_partitions=256, base_rules=moe.EMBED_OVER_BOTH_AXES)
  target = 'tpu7x:4x8x8'
  batch_size = 4096
  remat_policy = 'full_half_offloaded'  # offloading everything would make a step 0.6 s longer
  num_logit_chunks = 4

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    block.attention.gradient_keys = 4096
    return block

  def computation(self) -> fdl.Config[Dropless]:
    return fdl.Config(Dropless, dispatch='gather')
