"""EagleTuning: the base of experiments that train an EAGLE-3 head (eagle.py) beside the frozen model of a folder.

`add_head` does so for any experiment with a LanguageModel; `init_from` is then the job that trained the model:

    class Head(StdlibTiny):
      def task(self):
        task = super().task()
        add_head(task, (1, 2, 3), hidden_dim=344, num_heads=4, head_dim=32)
        return task
"""

from typing import Any

import fiddle as fdl

from spmd_tasks.bridges.huggingface import PretrainedLanguageModel
from spmd_tasks.bridges.huggingface.experiments import stacks_of
from spmd_tasks.errors import UserError
from spmd_tasks.layers import GatedFeedForward, LanguageModel, TransformerBlock, TransformerStack
from spmd_tasks.layers.attention import Rotary
from spmd_tasks.runtime import Task
from spmd_tasks.tuning.eagle import (
  EagleAttention,
  EagleHead,
  EagleLanguageModel,
  EagleLoss,
  EagleTask,
  RecordingBlock,
  default_layers,
)


class EagleTuning(PretrainedLanguageModel):
  """Trains a head that guesses the next tokens of the model of a folder, whose own weights are frozen.

  Checkpoints hold the head alone, with the folder's name and digest. Generation of the job drafts with it
  (`task.decode.num_drafts`).
  """

  num_guesses: int = 4  # how many tokens ahead the head is trained to guess
  guess_decay: float = 0.8  # each further guess counts so much less in the loss
  # The layers, counted from 1, behind which the head reads the residual stream; (): three of `default_layers`.
  feature_layers: tuple[int, ...] = ()
  # Of the head's feed-forward network; None: that of the folder's dense layers, or three times the width without any.
  head_hidden_dim: int | None = None
  base_dtype: str | None = None  # of the frozen kernels, as for LowRankTuning

  learning_rate: float = 1e-4

  def task(self) -> fdl.Config[Task]:
    task, decoder = super().task(), self.folder.decoder
    if decoder.num_encoder_layers or self.adapters:
      raise UserError(
        f'a head guesses for a decoder without adapters to choose from: {self.model} is none, or has some.'
      )
    layers = tuple(self.feature_layers or default_layers(decoder.num_layers))
    if not 1 <= self.num_guesses < self.seq_len:
      raise UserError(f'num_guesses={self.num_guesses} must be at least 1 and less than seq_len={self.seq_len}.')
    hidden_dim, latent = self.head_hidden_dim, decoder.latent
    if hidden_dim is None:
      hidden_dim = 3 * decoder.embed_dim if all(decoder.mixed) else decoder.hidden_dim
    add_head(
      task,
      layers,
      num_guesses=self.num_guesses,
      decay=self.guess_decay,
      hidden_dim=hidden_dim,
      num_heads=decoder.num_heads,
      num_kv_heads=decoder.num_kv_heads,
      head_dim=decoder.head_dim if latent is None else latent.value_head_dim,
      rotary=decoder.rotary if latent is None and decoder.rotary else Rotary(),
    )
    if self.seq_len % 256 == 0:  # logits of N + 1 predictions of each token, and their gradients, are much
      task.model.num_logit_chunks = self.seq_len // 256
    held = self.base_dtype or ('bfloat16' if self.folder.dtype == 'bfloat16' else 'float32')
    task.frozen_dtype = None if held == 'float32' else held
    return task


def add_head(
  task: fdl.Config,
  layers: tuple[int, ...],
  *,
  hidden_dim: int,
  num_guesses: int = 4,
  decay: float = 0.8,
  **of_attention: Any,
) -> None:
  """Makes the config of a Task with a LanguageModel one that trains a head beside the model, which is frozen.

  Args:
    task: the config, which is changed.
    layers: those behind which the head reads the residual stream, counted from 1; three for EAGLE-3.
    hidden_dim: of the head's feed-forward network.
    num_guesses, decay: see EagleLanguageModel and EagleLoss.
    of_attention: fields of the head's EagleAttention.

  Raises a UserError: the model has other blocks, an encoder or pipeline stages, or no such layers.
  """
  model, num_layers = task.model, 0
  is_decoder = issubclass(fdl.get_callable(model), LanguageModel) and not hasattr(model, 'encoder_stack')
  for stack in stacks_of(model):
    blocks = getattr(stack.block, 'blocks', (stack.block,))
    kinds = fdl.get_callable(stack), *map(fdl.get_callable, blocks)
    if not is_decoder or kinds != (TransformerStack, *[TransformerBlock] * len(blocks)):
      names = ', '.join(dict.fromkeys(kind.__name__ for kind in (fdl.get_callable(model), *kinds)))
      raise UserError(
        f'a head needs a LanguageModel with a TransformerStack of TransformerBlocks, not {names}: leave pipeline '
        'stages, an encoder and other blocks out.'
      )
    num_layers += stack.num_layers * len(blocks)
    for block in blocks:
      fdl.update_callable(block, RecordingBlock)
      block.feature_layers = layers
  if not layers or not all(1 <= layer <= num_layers for layer in layers):
    raise UserError(f'feature_layers={layers} must be from 1 to {num_layers}, the number of layers of the model.')
  dtype = model.embedding.dtype
  attention = fdl.Config(EagleAttention, dtype=dtype, **of_attention)
  ffn = fdl.Config(GatedFeedForward, hidden_dim=hidden_dim, activation='silu', dtype=dtype)
  head = fdl.Config(EagleHead, attention=attention, ffn=ffn, norm=fdl.copy_with(model.final_norm))
  fdl.update_callable(model, EagleLanguageModel)
  model.eagle_head, model.feature_layers, model.num_guesses = head, layers, num_guesses
  fdl.update_callable(task, EagleTask)
  task.loss, task.trained = fdl.Config(EagleLoss, decay=decay), ('^eagle/',)
