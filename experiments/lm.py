"""Trains dense language models.

    scripts/quickstart
    spmd-tasks --exp lm.StdlibTiny --mode train --num_fake_devices 8 --job_log_dir runs/tiny

lm.StdlibTiny goes from 6.6 to 1.45 nats per byte on held-out text in 300 steps, in about two minutes on two CPU cores.
"""

from collections.abc import Mapping

import fiddle as fdl

from spmd_tasks import inputs, learning, register
from spmd_tasks.layers import GatedFeedForward, TokenEmbedding, TransformerBlock
from spmd_tasks.layers.attention import Rotary
from spmd_tasks.recipes import DenseLanguageModel, HybridLanguageModel, ladder
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, context_axis_rules


@register
class StdlibTiny(DenseLanguageModel):
  """The quickstart: 0.9M parameters on the standard library's source, mesh data 4 x mdl 2."""

  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 300
  eval_every_steps = 100
  checkpoint_every = 100


@register
class MixtureTiny(StdlibTiny):
  """lm.StdlibTiny with synthetic tokens in 20% of the rows, and in 5% after step 200."""

  def train_input(self) -> fdl.Config:
    return fdl.Config(
      inputs.Mixture,
      sources={'stdlib': super().train_input(), 'made_up': self._made_up()},
      weights={'stdlib': 0.8, 'made_up': 0.2},
      weight_changes=((200, {'stdlib': 0.95, 'made_up': 0.05}),),
      seed=self.seed,
    )

  def eval_inputs(self) -> dict[str, fdl.Config]:
    return {**super().eval_inputs(), 'made_up': self._made_up(stream=1, num_batches=self.eval_batches)}

  def _made_up(self, **settings) -> fdl.Config:
    return fdl.Config(
      inputs.SyntheticText,
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      vocab_size=self.vocab_size,
      seed=self.seed,
      **settings,
    )


@register
class MuonTiny(StdlibTiny):
  """lm.StdlibTiny with Muon: 1.32 nats per byte after 300 steps instead of 1.45."""

  learning_rate = 1e-2

  def optimizer(self) -> fdl.Config:
    adam = super().optimizer()
    return fdl.Config(learning.Muon, learning_rate=adam.learning_rate, weight_decay=adam.weight_decay, adam_scale=0.3)


@register
class HybridTiny(HybridLanguageModel, StdlibTiny):
  """lm.StdlibTiny with a GatedDeltaNet in three of four layers."""


@register
class Ladder(ladder.Ladder):
  """A dense model of any size by one dial, --set depth=12, on any number of devices; --print_config has its reasons."""


@register
class TinyLadder(ladder.Ladder):
  """Five small sizes of lm.Ladder for a CPU; scripts/ladder.py predicts the loss of a sixth."""

  depth = 2
  width_per_layer = 8
  head_dim = 8
  tokens_per_parameter = 4.0
  base_rate = 0.015
  base_width = 32
  seq_len = 64
  checkpoint_every = None

  def sweep(self):
    return [{'depth': depth} for depth in range(2, 7)]


@register
class StdlibSmall(DenseLanguageModel):
  """About 20M parameters on the standard library's source, mesh data 4 x mdl 2."""

  ici_mesh_shape = (1, 4, 2)
  model_dims = 384
  num_layers = 11
  num_heads = 6
  hidden_dims = 1024
  seq_len = 512
  batch_size = 32
  num_train_steps = 5000
  learning_rate = 1e-3
  eval_every_steps = 500
  checkpoint_every = 500
  eval_batches = 32


@register
class UnevenTiny(DenseLanguageModel):
  """Heads, hidden dims and vocabulary (3, 90, 259) that the mesh data 2 x mdl 4 does not divide."""

  ici_mesh_shape = (1, 2, 4)
  model_dims = 30
  num_layers = 3
  num_heads = 3
  hidden_dims = 90
  seq_len = 64
  batch_size = 8
  num_train_steps = 100
  checkpoint_every = 50


@register
class Dense1B(DenseLanguageModel):
  """1.2B parameters, bfloat16 compute, grouped-query attention; mesh data 32 (32 chips)."""

  ici_mesh_shape = (1, 32, 1)
  target: str = 'v5p:4x4x2'  # of --mode plan
  vocab_size = 32_000
  model_dims = 2048
  num_layers = 24
  num_heads = 16
  num_kv_heads = 8
  hidden_dims = 5632
  dtype = 'bfloat16'
  remat_policy = 'attention'
  seq_len = 2048
  batch_size = 512
  num_train_steps = 50_000
  learning_rate = 3e-4
  eval_every_steps = 1000
  checkpoint_every = 1000
  log_every_steps = 50


@register
class Dense70B(Dense1B):
  """70B parameters for 4 slices of 256 chips, mesh data 4 x 128 x mdl 2."""

  ici_mesh_shape = (1, 128, 2)
  dcn_mesh_shape = (4, 1, 1)
  target = '4x v5p:8x8x4'
  model_dims = 8192
  num_layers = 80
  num_heads = 64
  num_kv_heads = 8
  hidden_dims = 28_672
  seq_len = 4096
  batch_size = 1024
  learning_rate = 1.5e-4


@register
class Llama8B(Dense1B):
  """Llama 3's 8B parameters (Dubey et al., 2024) on sequences of 8,192; mesh data 64 (64 chips)."""

  target = 'v5p:4x4x4'
  ici_mesh_shape = (1, 64, 1)
  vocab_size = 128_256
  model_dims = 4096
  num_layers = 32
  num_heads = 32
  num_kv_heads = 8
  hidden_dims = 14_336
  seq_len = 8192
  batch_size = 256

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    block = super().block(ffn)
    block.attention.rotary = fdl.Config(Rotary, max_wavelength=5e5)
    return block

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return fdl.copy_with(super().embedding(), tied=False, scale_sqrt_depth=False)


@register
class LongLlama8B(Llama8B):
  """lm.Llama8B on sequences of 131,072, each over 16 chips; mesh data 4 x context 16 (64 chips)."""

  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 4, 16, 1)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)
  seq_len = 131_072
  batch_size = 4
  remat_policy = 'full'


@register
class Llama8BOnV6e(Llama8B):
  """lm.Llama8B on 64 v6e chips, which have a third of a v5p's memory; mesh replica 2 x data 32."""

  target = 'v6e:8x8'
  ici_mesh_shape = (2, 32, 1)
  batch_size = 128
  scatters_gradients = True

  def ffn(self) -> fdl.Config[GatedFeedForward]:
    return _shard_down_over_ffn_dim(super().ffn())


@register
class Llama70B(Llama8B):
  """Llama 3's 70B parameters on sequences of 8,192; mesh replica 2 x data 256 (512 chips)."""

  target = 'v5p:8x8x8'
  ici_mesh_shape = (2, 256, 1)
  model_dims = 8192
  num_layers = 80
  num_heads = 64
  num_kv_heads = 8
  hidden_dims = 28_672
  batch_size = 512
  remat_policy = 'attention_offloaded_and_ffn'
  num_logit_chunks = 4
  learning_rate = 1.5e-4

  def tpu_options(self) -> Mapping[str, str]:
    # Otherwise copies to the host overlap with only a part of a layer, and matmuls recompute activations per tile.
    return {'xla_tpu_pipeline_memory_host_transfers': 'false', 'xla_jf_conv_input_fusion': 'false'}


@register
class Llama70BOnV6e(Llama70B):
  """lm.Llama70B on 256 v6e chips; mesh replica 2 x data 128."""

  target = 'v6e:16x16'
  ici_mesh_shape = (2, 128, 1)
  batch_size = 256
  remat_policy = 'attention_offloaded'
  num_logit_chunks = 2
  scatters_gradients = True

  def tpu_options(self) -> Mapping[str, str]:
    return {}

  def ffn(self) -> fdl.Config[GatedFeedForward]:
    return _shard_down_over_ffn_dim(super().ffn())


def _shard_down_over_ffn_dim(ffn: fdl.Config[GatedFeedForward]) -> fdl.Config[GatedFeedForward]:
  """Shards the kernel `down` [F, D] on F, over the axes of 'embed': on TPUs its gradient is major in F."""
  return fdl.copy_with(ffn, down_split_dims=('embed', None))


@register
class Dense1BOnH200(Dense1B):
  """lm.Dense1B on 8 H200; mesh data 8."""

  target = 'h200:8'
  ici_mesh_shape = (1, 8, 1)
  batch_size = 128


@register
class Llama8BOnH200(Llama8B):
  """lm.Llama8B on 8 H200; mesh data 8."""

  target = 'h200:8'
  ici_mesh_shape = (1, 8, 1)
  batch_size = 32
  num_logit_chunks = 8


@register
class LongLlama8BOnH200(LongLlama8B):
  """lm.LongLlama8B on 8 H200, each sequence sharded over all of them; mesh context 8."""

  target = 'h200:8'
  ici_mesh_shape = (1, 1, 8, 1)
  batch_size = 1
  num_logit_chunks = 8


@register
class Dense70BOnH200(Dense70B):
  """lm.Dense70B with Adafactor on 8 H200, which cannot hold Adam's moments; mesh data 8."""

  target = 'h200:8'
  ici_mesh_shape = (1, 8, 1)
  dcn_mesh_shape = None
  batch_size = 16

  def optimizer(self) -> fdl.Config:
    return _adafactor_for(super().optimizer())


@register
class Llama70BOnH200(Llama70B):
  """lm.Llama70B with Adafactor on 8 H200, which cannot hold Adam's moments; mesh data 8."""

  target = 'h200:8'
  ici_mesh_shape = (1, 8, 1)
  batch_size = 8
  remat_policy = 'attention'
  num_logit_chunks = 8

  def optimizer(self) -> fdl.Config:
    return _adafactor_for(super().optimizer())


def _adafactor_for(adam: fdl.Config) -> fdl.Config:
  """Replaces Adam's two moments per weight by Adafactor's factored second moments, which need little memory."""
  return fdl.Config(
    learning.Adafactor,
    learning_rate=adam.learning_rate,
    weight_decay=adam.weight_decay,
    multiply_by_parameter_scale=False,  # Adam's learning rate is not relative to a weight's size
  )
