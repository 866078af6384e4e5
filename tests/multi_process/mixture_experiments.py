"""synthetic.Uneven on a mixture: text, a few texts of a row each, and made-up tokens."""

from pathlib import Path

import fiddle as fdl

from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, StdlibText, SyntheticText, TextInput

RAGGED = Path(__file__).parents[1] / 'programs' / 'ragged.jsonl'


class Mixed(Uneven):
  """20 steps of which any prefix is the same: a constant learning rate."""

  vocab_size = 259
  step_timeout_s = 60.0
  heartbeat_timeout_s = 10
  shutdown_timeout_s = 5
  tensorboard = False
  num_train_steps = 20
  log_every_steps = 1

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer.learning_rate = 3e-3
    return cfg

  def train_input(self):
    sizes = {'batch_size': self.batch_size, 'seq_len': self.seq_len}
    text = {'tokenizer': fdl.Config(ByteTokenizer), **sizes}
    texts = fdl.Config(JsonLines, pattern=str(RAGGED))
    return fdl.Config(
      Mixture,
      sources={
        'stdlib': fdl.Config(TextInput, source=fdl.Config(StdlibText), seed=self.seed, **text),
        'texts': fdl.Config(TextInput, source=texts, packing=False, **text),
        'made_up': fdl.Config(SyntheticText, vocab_size=self.vocab_size, **sizes),
      },
      weights={'stdlib': 0.5, 'texts': 0.2, 'made_up': 0.3},
      weight_changes=((9, {'stdlib': 0.2, 'texts': 0.4, 'made_up': 0.4}),),
    )

  def eval_inputs(self):
    return {}
