"""A job with everything that a replay has to repeat: experts, a pipeline, a mixture, dropout; and one of own arrays."""

from pathlib import Path

import fiddle as fdl
import flax.linen as nn
import numpy as np
import optax

from spmd_tasks import Experiment, Task
from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, SyntheticText, TextInput
from spmd_tasks.learning import Learner
from spmd_tasks.recipes import MoeLanguageModel, PipelinedLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh

TEXTS = Path(__file__).parents[1] / 'programs' / 'ragged.jsonl'


class PipelinedExperts(PipelinedLanguageModel, MoeLanguageModel):
  """4 experts on 2 stages x data 2 x expert 2, with two microbatches and two sources."""

  mesh = DataExpertModelMesh(num_devices=8, num_stages=2, num_expert_partitions=2)
  num_microbatches = 2
  model_dims = 8
  num_layers = 2
  num_heads = 2
  hidden_dims = 8
  num_experts = 4
  seq_len = 8
  batch_size = 8
  num_train_steps = 12
  log_every_steps = 1
  checkpoint_every = 4
  trackers = ()

  def tokenizer(self):
    return fdl.Config(ByteTokenizer)

  def task(self):
    task = super().task()
    task.model.stack.block.dropout_rate = 0.1
    return task

  def train_input(self):
    sizes = {'batch_size': self.batch_size, 'seq_len': self.seq_len}
    made_up = fdl.Config(SyntheticText, vocab_size=self.vocab_size, **sizes)
    source = fdl.Config(JsonLines, pattern=str(TEXTS), block_bytes=64)
    texts = fdl.Config(TextInput, source=source, tokenizer=fdl.Config(ByteTokenizer), **sizes)
    return fdl.Config(Mixture, sources={'made_up': made_up, 'texts': texts}, weights={'made_up': 0.5, 'texts': 0.5})

  def eval_inputs(self):
    return {}


class OwnArrays(Experiment):
  """A linear regression of arrays in memory; the fourth batch has a NaN, and the fifth is a spike."""

  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 4
  log_every_steps = 1
  checkpoint_every = 2
  trackers = ()

  def task(self):
    learner = Learner(optimizer=optax.adam(0.01), ema_decay=0.9, spike_threshold=6.0, spike_window=4)
    return Task(model=nn.Dense(1), loss=lambda y, batch: ((y - batch['y']) ** 2).mean(), learner=learner)

  def train_input(self):
    inputs = np.arange(24.0).reshape(8, 3) % 5
    batches = [{'inputs': inputs.copy(), 'y': inputs[:, :1].copy()} for _ in range(6)]
    batches[3]['inputs'][2, 1] = np.nan
    batches[4]['y'] *= 1e4
    return batches
