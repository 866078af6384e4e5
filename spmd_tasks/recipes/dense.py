"""Defines DenseLanguageModel, the base of the registered `lm` experiments, and a good one for yours."""

from typing import Literal

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ByteTokenizer
from spmd_tasks.layers import (
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LanguageModelLoss,
  NextnHead,
  NextnLanguageModel,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.recipes.text_training import TextTraining
from spmd_tasks.runtime import Task


class DenseLanguageModel(TextTraining):
  """A decoder-only transformer on packed text, by default the standard library's source."""

  vocab_size: int = 259  # ByteTokenizer: 256 bytes and 3 special tokens
  model_dims: int = 128
  num_layers: int = 4
  num_heads: int = 4
  num_kv_heads: int | None = None
  hidden_dims: int = 384
  dtype: str = 'float32'  # of the computation; weights are float32
  remat_policy: str = 'elementwise'  # see TransformerStack
  num_logit_chunks: int | Literal['auto'] = 'auto'  # see LanguageModel
  scatters_gradients: bool = False  # see LanguageModel
  num_nextn_predict_layers: int = 0  # heads that predict further tokens, as DeepSeek-V3 has one
  # muP, see mup.py: the width and (for CompleteP) the number of layers for which the learning rate is; None: off.
  mup_base_width: int | None = None
  mup_base_depth: int | None = None

  seq_len = 128
  learning_rate = 3e-3
  weight_decay = 0.1

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    """The token embedding, which also computes the logits."""
    return fdl.Config(TokenEmbedding, vocab_size=self.vocab_size, embed_dim=self.model_dims, dtype=self.dtype)

  def ffn(self) -> fdl.Config[FeedForward]:
    """The feed-forward sublayer of every block."""
    return fdl.Config(GatedFeedForward, hidden_dim=self.hidden_dims, activation='silu', dtype=self.dtype)

  def block(self, ffn: fdl.Config) -> fdl.Config[TransformerBlock]:
    """A transformer block around a feed-forward sublayer."""
    return fdl.Config(
      TransformerBlock,
      attention=fdl.Config(
        Attention, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, dtype=self.dtype, head_dim=None
      ),
      ffn=ffn,
      norm=fdl.Config(RmsNorm, dtype=self.dtype),
    )

  def stack(self) -> fdl.Config[TransformerStack]:
    """All blocks."""
    return fdl.Config(
      TransformerStack, block=self.block(self.ffn()), num_layers=self.num_layers, remat_policy=self.remat_policy
    )

  def language_model(self) -> fdl.Config[LanguageModel]:
    """The whole model."""
    model = fdl.Config(
      LanguageModel,
      embedding=self.embedding(),
      stack=self.stack(),
      final_norm=fdl.Config(RmsNorm, dtype=self.dtype),
      num_logit_chunks=self.num_logit_chunks,
      scatters_gradients=self.scatters_gradients,
    )
    num_heads = self.num_nextn_predict_layers
    if num_heads < 0:
      raise UserError(f'num_nextn_predict_layers = {num_heads} must be at least 0.')
    if num_heads == 0:
      return model

    stack = fdl.Config(TransformerStack, block=self.block(self.ffn()), num_layers=1, remat_policy=self.remat_policy)
    head = fdl.Config(NextnHead, stack=stack, norm=fdl.copy_with(model.final_norm))
    fdl.update_callable(model, NextnLanguageModel)
    model.num_nextn_predict_layers, model.nextn_head = num_heads, head
    return model

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    """The training loss."""
    return fdl.Config(LanguageModelLoss, z_loss_weight=1e-4)

  def task(self) -> fdl.Config[Task]:
    task = super().task()
    if self.mup_base_width is None:
      if self.mup_base_depth is not None:
        raise UserError(f'mup_base_depth = {self.mup_base_depth} needs mup_base_width: set it.')
      return task
    from spmd_tasks.recipes.mup import with_mup  # a first step without it imports no experts

    multiplier = 1.0 if self.mup_base_depth is None else self.mup_base_depth / self.num_layers
    return with_mup(task, base_width=self.mup_base_width, residual_multiplier=multiplier)

  def tokenizer(self) -> fdl.Config:
    """Returns the tokenizer of all text: inputs, prompts and generated tokens. Its ids must be below `vocab_size`."""
    return fdl.Config(ByteTokenizer)
