"""Language models on made-up tokens, for tests and benchmarks."""

import fiddle as fdl

from spmd_tasks.inputs import SyntheticText
from spmd_tasks.recipes.dense import DenseLanguageModel


class SyntheticLanguageModel(DenseLanguageModel):
  """Any dense language model on synthetic tokens."""

  def train_input(self):
    return fdl.Config(
      SyntheticText,
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      vocab_size=self.vocab_size,
      seed=self.seed,
    )

  def eval_inputs(self):
    held_out = fdl.copy_with(self.train_input(), stream=1, num_batches=self.eval_batches)
    return {'valid': held_out}
