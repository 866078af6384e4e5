"""A small job with everything that a replay has to repeat: experts, a pipeline, a mixture of inputs, dropout."""

from pathlib import Path

import fiddle as fdl

from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, SyntheticText, TextInput
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
