"""A ladder whose jobs take a second, for tests of scripts/ladder.py."""

import fiddle as fdl

from spmd_tasks.inputs import SyntheticText
from spmd_tasks.recipes.ladder import Ladder


class Small(Ladder):
  """Depths 1 and 2 of width 8 per layer on made-up tokens."""

  depth = 1
  width_per_layer = 8
  head_dim = 8
  vocab_size = 32
  seq_len = 8
  num_train_steps = 4
  checkpoint_every = None
  trackers = ()

  def sweep(self):
    return [{'depth': depth} for depth in (1, 2)]

  def train_input(self):
    sizes = {'batch_size': self.batch_size, 'seq_len': self.seq_len, 'vocab_size': self.vocab_size}
    return fdl.Config(SyntheticText, **sizes, seed=self.seed)

  def eval_inputs(self):
    return {'valid': fdl.copy_with(self.train_input(), stream=1, num_batches=2)}
