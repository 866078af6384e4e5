"""Encoder-decoders with T5's layers, and decoder-only models: the base of the registered `t5` experiments."""

import dataclasses
from typing import Any, Literal

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import SyntheticPairs
from spmd_tasks.layers import (
  BlockGroup,
  EncoderDecoderLm,
  FanInNormal,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LanguageModelLoss,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention, RelativePositionBias
from spmd_tasks.layers.moe import CapacityGather, DerivedGroupSize, Experts, ExtraFfnBlock, MixtureOfExperts, TopKRouter
from spmd_tasks.learning import Adafactor, Learner, LinearWarmupRsqrt
from spmd_tasks.recipes.dense import DenseLanguageModel
from spmd_tasks.runtime import DecodeSettings, Task


class EncoderDecoderLanguageModel(DenseLanguageModel):
  """T5: RMS norms, relative position biases, attention without 1 / sqrt(K); on made-up pairs of texts by default.

  `num_layers` counts the decoder's layers. With `num_encoder_layers=0` the model is decoder-only, and a prefix language
  model if batches have `prefix_mask`. Any `mixture()` replaces the feed-forward sublayer of every
  `mixture_every`-th block of both stacks.
  """

  num_encoder_layers: int = 2
  head_dim: int = 64
  activation: str = 'gelu'
  is_gated: bool = True  # T5 1.0 is not
  ties_embedding: bool = False  # T5 1.0 does
  has_bias_per_layer: bool = False  # UMT5 has
  num_buckets: int = 32
  max_distance: int = 128
  dropout_rate: float = 0.0
  mixture_every: int | tuple[int, int] = 2  # or in the encoder and in the decoder

  encoder_len: int = 128
  start_id: int = 0  # what the decoder reads before its first token
  end_id: int = 1  # the end of a text
  z_loss: float = 1e-4
  label_smoothing: float = 0.0
  normalization: Literal['tokens', 'sum', 'all_tokens', 'sequences'] | float = 'tokens'

  learning_rate = 1e-2  # at the end of the warmup; then it falls with the square root of the step
  warmup_steps: int = 10_000

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return fdl.Config(
      TokenEmbedding,
      vocab_size=self.vocab_size,
      embed_dim=self.model_dims,
      tied=self.ties_embedding,
      scale_sqrt_depth=False,
      scale_logits=self.ties_embedding,
      table_init=fdl.Config(FanInNormal, num_input_dims=0),
      dtype=self.dtype,
    )

  def ffn(self) -> fdl.Config[FeedForward]:
    return fdl.Config(
      GatedFeedForward if self.is_gated else FeedForward,
      hidden_dim=self.hidden_dims,
      activation=self.activation,
      dtype=self.dtype,
      **self._dropout(),
    )

  def mixture(self, *, encodes: bool) -> fdl.Config | None:
    """The feed-forward sublayer of every `mixture_every`-th block of a stack, such as a MixtureOfExperts, or None."""
    del encodes
    return None

  def attention(self, **settings: Any) -> fdl.Config[Attention]:
    """The attention of encoder blocks (causal=False), of decoder blocks, and to the encoder's text (cross=True)."""
    return fdl.Config(
      Attention,
      num_heads=self.num_heads,
      head_dim=self.head_dim,
      rotary=None,
      softmax_scale=1.0,
      query_init_scale=1.0 / max(self.head_dim, 1),  # the layer refuses 0
      even_padding=True,
      dropout_rate=self.dropout_rate,
      dtype=self.dtype,
      **settings,
    )

  def position_bias(self, *, bidirectional: bool) -> fdl.Config[RelativePositionBias]:
    """The biases of the encoder (bidirectional) or of the decoder."""
    return fdl.Config(
      RelativePositionBias,
      num_heads=self.num_heads,
      num_buckets=self.num_buckets,
      max_distance=self.max_distance,
      bidirectional=bidirectional,
    )

  def block(self, ffn: fdl.Config, *, encodes: bool = False) -> fdl.Config[TransformerBlock]:
    """A block of the decoder, or of the encoder, around a feed-forward sublayer."""
    own = self.position_bias(bidirectional=encodes) if self.has_bias_per_layer else None
    return fdl.Config(
      TransformerBlock,
      attention=self.attention(causal=not encodes, position_bias=own),
      cross_attention=None if encodes or not self.num_encoder_layers else self.attention(cross=True),
      ffn=ffn,
      norm=self._norm(),
      **self._dropout(),
    )

  def mixture_block(self, mixture: fdl.Config, *, encodes: bool) -> fdl.Config[TransformerBlock]:
    """A block around a mixture."""
    return self.block(mixture, encodes=encodes)

  def stack(self, *, encodes: bool = False) -> fdl.Config[TransformerStack]:
    """All blocks of the decoder, or of the encoder."""
    num_layers, every = self.num_encoder_layers if encodes else self.num_layers, self.mixture_every
    every = every if isinstance(every, int) else every[0 if encodes else 1]
    mixture, block = self.mixture(encodes=encodes), self.block(self.ffn(), encodes=encodes)
    if mixture is not None:
      if every < 1 or num_layers % every:
        raise UserError(f'{num_layers} layers are not divisible by mixture_every={every}: change one of them.')
      blocks = [self.block(self.ffn(), encodes=encodes) for _ in range(every - 1)]
      blocks.append(self.mixture_block(mixture, encodes=encodes))
      block, num_layers = fdl.Config(BlockGroup, blocks=tuple(blocks)), num_layers // every
    return fdl.Config(TransformerStack, block=block, num_layers=num_layers, remat_policy=self.remat_policy)

  def language_model(self) -> fdl.Config[LanguageModel]:
    if num := self.num_nextn_predict_layers:
      raise UserError(
        f'num_nextn_predict_layers={num}: recipes of T5 have no heads that predict further tokens: set 0.'
      )
    shared = not self.has_bias_per_layer
    decoder = {
      'embedding': self.embedding(),
      'stack': self.stack(),
      'final_norm': self._norm(),
      'position_bias': self.position_bias(bidirectional=False) if shared else None,
      'num_logit_chunks': self.num_logit_chunks,
      'scatters_gradients': self.scatters_gradients,
      **self._dropout(),
    }
    if not self.num_encoder_layers:
      return fdl.Config(LanguageModel, **decoder)
    return fdl.Config(
      EncoderDecoderLm,
      **decoder,
      encoder_stack=self.stack(encodes=True),
      encoder_norm=self._norm(),
      encoder_position_bias=self.position_bias(bidirectional=True) if shared else None,
    )

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    return fdl.Config(
      LanguageModelLoss,
      z_loss_weight=self.z_loss,
      label_smoothing=self.label_smoothing,
      smoothing='others',
      normalization=self.normalization,
    )

  def optimizer(self) -> fdl.Config:
    schedule = fdl.Config(LinearWarmupRsqrt, peak=self.learning_rate, warmup_steps=self.warmup_steps)  # type: ignore[operator]
    return self.t5x_adafactor(schedule, scanned=self.has_bias_per_layer)

  def t5x_adafactor(self, rate: fdl.Config, **settings: Any) -> fdl.Config[Adafactor]:
    """Returns Adafactor.as_t5x: T5X's choice of factored dims, and T5X's order of momentum and weight decay."""
    t5x, default = Adafactor.as_t5x(learning_rate=1.0, **settings), Adafactor(learning_rate=1.0)
    fields = {field.name: getattr(t5x, field.name) for field in dataclasses.fields(t5x)}
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    return fdl.Config(Adafactor, **changed, learning_rate=rate)

  def decode_settings(self) -> fdl.Config[DecodeSettings]:
    """How texts are generated: greedily, up to `seq_len` tokens; T5X's beam search has num_beams=4."""
    return fdl.Config(
      DecodeSettings,
      max_len=self.seq_len + 1,
      eos_ids=(self.end_id,),
      start_id=self.start_id,
      beam_rule='t5x',
      length_penalty=0.6,
    )

  def task(self) -> fdl.Config[Task]:
    if self.mup_base_width is not None:
      raise UserError(f'mup_base_width = {self.mup_base_width}: recipes of T5 have no muP: set None.')
    learner = fdl.Config(Learner, optimizer=self.optimizer())
    return fdl.Config(
      Task, model=self.language_model(), loss=self.loss(), learner=learner, decode=self.decode_settings()
    )

  def train_input(self) -> fdl.Config:
    return fdl.Config(
      SyntheticPairs,
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      encoder_len=self.encoder_len if self.num_encoder_layers else None,
      vocab_size=self.vocab_size,
      seed=self.seed,
    )

  def eval_inputs(self) -> dict[str, fdl.Config]:
    return {'valid': fdl.copy_with(self.train_input(), stream=1, num_batches=self.eval_batches)}

  def _norm(self) -> fdl.Config[RmsNorm]:
    return fdl.Config(RmsNorm, dtype=self.dtype)

  def _dropout(self) -> dict[str, Any]:
    return {'dropout_rate': self.dropout_rate, 'dropout_broadcast_dims': (-2,)}


class MoeEncoderDecoderLanguageModel(EncoderDecoderLanguageModel):
  """T5 with experts in every `mixture_every`-th block, as Flaxformer has them: capacities, groups, padding, masks.

  The number of groups is a multiple of `num_groups_multiple_of`, on any mesh. In Flaxformer it is the number of experts
  times their replicas.
  """

  num_experts: int = 8
  num_selected_experts: int = 1
  capacity_factor: float = 1.25
  eval_capacity_factor: float = 2.0
  min_capacity: int = 4
  max_group_size: int = 4096
  expert_dropout_rate: float = 0.0
  jitter_eps: float = 0.0  # of the routers' inputs
  has_extra_ffn: bool = False  # a dense feed-forward sublayer behind each mixture, as ST-MoE has
  num_groups_multiple_of: int = 8
  prioritizes_batch: bool = False  # in the encoder alone: a decoder would look ahead
  ignores_padding: bool = False
  load_balance_weight: float = 0.01
  router_z_weight: float = 1e-4

  def router(self, *, encodes: bool) -> fdl.Config:
    """The router of the encoder's or of the decoder's mixtures."""
    del encodes
    chosen = {'num_experts': self.num_experts, 'num_selected': self.num_selected_experts}
    return fdl.Config(TopKRouter, **chosen, jitter_eps=self.jitter_eps)

  def capacity(self) -> dict[str, Any]:
    """The fields of the capacity and of the groups."""
    groups = fdl.Config(
      DerivedGroupSize, max_size=self.max_group_size, num_groups_multiple_of=self.num_groups_multiple_of
    )
    factors = {'capacity_factor': self.capacity_factor, 'eval_capacity_factor': self.eval_capacity_factor}
    return {**factors, 'min_capacity': self.min_capacity, 'group_size': groups}

  def mixture(self, *, encodes: bool) -> fdl.Config[MixtureOfExperts]:
    ffn = self.ffn()
    return fdl.Config(
      MixtureOfExperts,
      router=self.router(encodes=encodes),
      experts=fdl.Config(
        Experts,
        num_experts=self.num_experts,
        hidden_dim=ffn.hidden_dim,
        gated=self.is_gated,
        activation=self.activation,
        dropout_rate=self.expert_dropout_rate,
        dtype=self.dtype,
      ),
      computation=fdl.Config(
        CapacityGather, **self.capacity(), priority='score' if encodes and self.prioritizes_batch else 'position'
      ),
      padding='counted' if self.ignores_padding else 'routed',
      load_balance_shards='groups',
    )

  def mixture_block(self, mixture: fdl.Config, *, encodes: bool) -> fdl.Config[TransformerBlock]:
    block = super().mixture_block(mixture, encodes=encodes)
    return fdl.Config(ExtraFfnBlock, **block.__arguments__, extra_ffn=self.ffn()) if self.has_extra_ffn else block

  def language_model(self) -> fdl.Config[LanguageModel]:
    return fdl.copy_with(super().language_model(), masks_zeros=True)

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    weights = {'load_balance_loss': self.load_balance_weight, 'router_z_loss': self.router_z_weight}
    return fdl.copy_with(super().loss(), aux_loss_weights=weights)
