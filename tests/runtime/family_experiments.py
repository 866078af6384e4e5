"""An uneven model with the building blocks of published families, for tests that compare meshes."""

import fiddle as fdl

from spmd_tasks.layers import RmsNorm, StackSequence, TransformerStack
from spmd_tasks.layers.attention import LatentAttention, Rotary, YarnScaling
from spmd_tasks.layers.moe import TopKRouter
from spmd_tasks.recipes import DenseLanguageModel, PipelinedLanguageModel
from tests.runtime import moe_experiments


class Families(PipelinedLanguageModel, moe_experiments.AlongData):
  """A dense layer with latent attention and post-norms (DeepSeek, OLMo 2), then two pipelined mixture layers.

  Mixture layers have grouped sigmoid routing (DeepSeek-V3), biases, sinks, a window and a clamped activation (gpt-oss),
  norms of 1 + scale around sublayers (Gemma), norms over all heads and clipping (OLMoE), and YaRN on a part of each
  head (GLM). The axes are (replica, stage, data, mdl).
  """

  num_layers = 2  # in the pipeline
  batch_size = 16
  num_microbatches = 4

  def router(self):
    return fdl.Config(
      TopKRouter,
      num_experts=self.num_experts,
      num_selected=2,
      score_function='sigmoid',
      normalize_gates=1.0,
      gate_scale=1.5,
      use_bias=True,
      num_groups=3,
      num_selected_groups=2,
      group_score='top2_sum',
    )

  def ffn(self):
    cfg = super().ffn()
    cfg.experts.use_bias = True
    cfg.experts.activation = 'clamped_swiglu'
    return cfg

  def block(self, ffn):
    cfg = super().block(ffn)
    cfg.post_norm = True
    cfg.norm.scale_plus_one = True
    attention = cfg.attention
    attention.window, attention.sinks, attention.clip_qkv = 5, True, 3.0
    attention.use_bias, attention.out_bias = True, False
    attention.qk_norm = fdl.Config(RmsNorm, num_dims=2, epsilon=1e-5)
    scaling = fdl.Config(YarnScaling, factor=4.0, original_length=8)
    attention.rotary = fdl.Config(Rotary, num_features=4, scaling=scaling)
    return cfg

  def stack(self):
    dense = self.block(DenseLanguageModel.ffn(self))
    dense.pre_norm = False
    dense.attention = fdl.Config(
      LatentAttention,
      num_heads=self.num_heads,
      query_rank=7,
      kv_rank=9,
      nope_head_dim=5,
      rope_head_dim=4,
      value_head_dim=6,
    )
    return fdl.Config(StackSequence, stacks=(fdl.Config(TransformerStack, block=dense, num_layers=1), super().stack()))
