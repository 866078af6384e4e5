"""Defines DenseLanguageModel, the base of the registered `lm` experiments, and a good one for yours."""

import fiddle as fdl

from spmd_tasks.experiment import Experiment
from spmd_tasks.inputs import ByteTokenizer, StdlibText, TextInput
from spmd_tasks.layers import (
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LanguageModelLoss,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.learning import AdamW, Learner, LinearWarmupCosine
from spmd_tasks.runtime import Task


class DenseLanguageModel(Experiment):
  """A decoder-only transformer on packed text, the standard library's source where `source` is not overridden."""

  vocab_size: int = 259  # ByteTokenizer: 256 bytes and 3 special tokens
  model_dims: int = 128
  num_layers: int = 4
  num_heads: int = 4
  num_kv_heads: int | None = None
  hidden_dims: int = 384
  dtype: str = 'float32'  # of the computation; weights are float32
  remat_policy: str = 'none'
  num_logit_chunks: int = 1  # of LanguageModel

  seq_len: int = 128
  batch_size: int = 16
  eval_batches: int | None = 8

  learning_rate: float = 3e-3
  warmup_fraction: float = 0.05  # of num_train_steps
  weight_decay: float = 0.1

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

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    """The training loss."""
    return fdl.Config(LanguageModelLoss, z_loss_weight=1e-4)

  def task(self) -> fdl.Config[Task]:
    model = fdl.Config(
      LanguageModel,
      embedding=fdl.Config(TokenEmbedding, vocab_size=self.vocab_size, embed_dim=self.model_dims, dtype=self.dtype),
      stack=self.stack(),
      final_norm=fdl.Config(RmsNorm, dtype=self.dtype),
      num_logit_chunks=self.num_logit_chunks,
    )
    schedule = fdl.Config(
      LinearWarmupCosine,
      peak=self.learning_rate,
      warmup_steps=round(self.warmup_fraction * self.num_train_steps),
      total_steps=self.num_train_steps,
      final_fraction=0.1,
    )
    optimizer = fdl.Config(AdamW, learning_rate=schedule, beta2=0.95, weight_decay=self.weight_decay)
    learner = fdl.Config(Learner, optimizer=optimizer, clip_global_norm=1.0)
    return fdl.Config(Task, model=model, loss=self.loss(), learner=learner)

  def tokenizer(self) -> fdl.Config:
    """The tokenizer of all text: of inputs, prompts and generated tokens; its vocabulary must fit in `vocab_size`."""
    return fdl.Config(ByteTokenizer)

  def source(self, split: str) -> fdl.Config:
    """The text of a split, 'train' or 'valid': the config of any TextSource, such as TextFiles or StdlibText."""
    return fdl.Config(StdlibText, split=split)

  def train_input(self) -> fdl.Config[TextInput]:
    return self._packed_text('train', seed=self.seed)

  def eval_inputs(self) -> dict[str, fdl.Config[TextInput]]:
    return {'valid': self._packed_text('valid', num_epochs=1, shuffle=False, max_batches=self.eval_batches)}

  def _packed_text(self, split: str, **settings) -> fdl.Config[TextInput]:
    return fdl.Config(
      TextInput,
      source=self.source(split),
      tokenizer=self.tokenizer(),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      **settings,
    )
