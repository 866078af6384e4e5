"""Language models most of whose layers are recurrent, as in Qwen3-Next, Qwen 3.5 and OLMo Hybrid."""

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.layers import BlockGroup, TransformerStack
from spmd_tasks.layers.recurrent import GatedDeltaNet
from spmd_tasks.recipes.dense import DenseLanguageModel


class HybridLanguageModel(DenseLanguageModel):
  """A language model with gated attention in each `attention_interval`-th layer, and a GatedDeltaNet in the others.

  A block, as a stack or a pipeline repeats it, is a BlockGroup of `attention_interval` layers. The bases beside it give
  the feed-forward sublayers: `class Mine(HybridLanguageModel, MoeLanguageModel)`.
  """

  attention_interval: int = 4
  num_value_heads: int = 4  # of a GatedDeltaNet
  num_key_heads: int = 2
  key_head_dim: int = 32
  value_head_dim: int = 32

  def block(self, ffn: fdl.Config) -> fdl.Config:
    full = super().block(ffn)
    full.attention.output_gate = True
    recurrent = fdl.copy_with(
      full,
      attention=fdl.Config(
        GatedDeltaNet,
        num_heads=self.num_value_heads,
        num_key_heads=self.num_key_heads,
        key_head_dim=self.key_head_dim,
        value_head_dim=self.value_head_dim,
        dtype=self.dtype,
      ),
    )
    return fdl.Config(BlockGroup, blocks=(recurrent,) * (self.attention_interval - 1) + (full,))

  def stack(self) -> fdl.Config[TransformerStack]:
    if self.attention_interval < 2 or self.num_layers % self.attention_interval:
      raise UserError(
        f'num_layers={self.num_layers} is not divisible by attention_interval={self.attention_interval}, which is at '
        'least 2: change one of them.'
      )
    stack = super().stack()
    stack.num_layers = self.num_layers // self.attention_interval
    return stack
