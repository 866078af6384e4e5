"""A job that trains low-rank adapters of a small folder on synthetic tokens."""

import fiddle as fdl

from spmd_tasks.bridges.huggingface import PretrainedLanguageModel
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.tuning import LowRankTuning


class SmallOfAll(PretrainedLanguageModel):
  """Trains all weights on data 2 x mdl 4, which pads most of the folder's weights."""

  ici_mesh_shape = (1, 2, 4)
  seq_len = 16
  batch_size = 8
  num_train_steps = 4
  log_every_steps = 1
  checkpoint_every = 2
  trackers = ()

  def train_input(self):
    return fdl.Config(SyntheticText, vocab_size=259, batch_size=self.batch_size, seq_len=self.seq_len)

  def eval_inputs(self):
    return {'valid': fdl.copy_with(self.train_input(), stream=1, num_batches=1)}


class Small(LowRankTuning, SmallOfAll):
  """Rank 4."""

  lora_rank = 4
  lora_alpha = 16.0
  lora_dropout = 0.1  # so that the random state matters too
  learning_rate = 0.02
