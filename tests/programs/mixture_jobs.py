"""A small job on a mixture: made-up tokens, and a few texts that are repeated; weights change at step 6."""

from pathlib import Path

import fiddle as fdl

from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, SyntheticText, TextInput
from tests.programs.small_jobs import Small

NAME = 'tests.programs.mixture_jobs.Mixed'  # for --exp


class Mixed(Small):
  """Small on two sources, in two microbatches."""

  num_train_steps = 16
  eval_every_steps = None

  def task(self):
    task = super().task()
    task.learner.num_microbatches = 2
    return task

  def train_input(self):
    return fdl.Config(
      Mixture,
      sources={'made_up': self._made_up(), 'texts': self._texts()},
      weights={'made_up': 0.7, 'texts': 0.3},
      weight_changes=((6, {'made_up': 0.2, 'texts': 0.8}),),
      seed=self.seed,
    )

  def eval_inputs(self):
    mixture = fdl.Config(
      Mixture,
      sources={'made_up': self._made_up(stream=1), 'texts': self._texts(num_epochs=3)},
      weights={'made_up': 1, 'texts': 1},
    )
    return {'both': mixture}

  def _made_up(self, **settings):
    return fdl.Config(
      SyntheticText, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size, **settings
    )

  def _texts(self, **settings):
    return fdl.Config(
      TextInput,
      source=fdl.Config(JsonLines, pattern=str(Path(__file__).parent / 'ragged.jsonl'), block_bytes=64),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      **settings,
    )
