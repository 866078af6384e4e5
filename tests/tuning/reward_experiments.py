"""Experiments that learn from rewards: the uneven models of the other comparisons, and a small job."""

import json
from pathlib import Path

import fiddle as fdl

from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import DenseLanguageModel, PipelinedLanguageModel
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.tuning import RewardTuning
from tests.runtime import moe_experiments, uneven_experiments
from tests.tuning.low_rank_experiments import with_adapters
from tests.tuning.preference_experiments import PAIRS


def with_few_programs(task: fdl.Config, length: int) -> fdl.Config:
  """Makes the sampler prefill all prompts by one program."""
  task.decode = fdl.Config(DecodeSettings, min_bucket=length, prefill_rows=4)
  return task


class OnRewards(RewardTuning):
  """Policy gradients with a reference, whose log-probabilities are 0 in random batches, so that the loss decreases."""

  data = str(PAIRS)
  reward = 'tests.tuning.rewards:share_of_a'
  group_size = 4
  batch_size = 16
  seq_len = 40
  max_tokens = 24
  kl_weight = 0.1
  learning_rate = 3e-3

  def task(self):
    return with_few_programs(super().task(), self.seq_len)


class Policy(OnRewards, uneven_experiments.AdamW):
  """All weights."""


class ValuePolicy(Policy):
  """PPO, with its value head trained."""

  method = 'ppo'
  learning_rate = 1e-2
  seed = 3


class PipelinedValuePolicy(PipelinedLanguageModel, ValuePolicy):
  """The axes are (replica, stage, data, mdl)."""


class LowRankPolicy(OnRewards, uneven_experiments.AdamW):
  """Adapters, with the model without them as the reference, and the mean over tokens, which differ between shards."""

  method = 'dapo'
  reference = 'base'

  def task(self):
    return with_adapters(super().task(), trained=('lora_',))


class LowRankValuePolicy(LowRankPolicy):
  """LowRankPolicy by PPO, whose value head is trained with the adapters."""

  method = 'ppo'
  kl_in_reward = False
  seed = 3

  def task(self):
    task = super().task()
    task.trained = (*task.trained, 'value_head/')
    return task


class ExpertsPolicy(OnRewards, moe_experiments.AlongData):
  """A mixture of experts; ratios of whole completions."""

  method = 'gspo'


class Job(RewardTuning, DenseLanguageModel):
  """A small job on data 4 x mdl 2: eight prompts with four completions each."""

  ici_mesh_shape = (1, 4, 2)
  model_dims = 32
  num_layers = 2
  hidden_dims = 64
  data = 'HERE/prompts.jsonl'
  reward = 'tests.tuning.rewards:share_of_a'
  group_size = 4
  batch_size = 32
  seq_len = 24
  max_tokens = 12
  num_train_steps = 4
  log_every_steps = 1
  trackers = ()

  def optimizer(self):
    return fdl.Config(AdamW, learning_rate=0.02)

  def task(self):
    return with_few_programs(super().task(), self.seq_len)


def write_prompts(directory: Path) -> Path:
  path = directory / 'prompts.jsonl'
  path.write_text(
    ''.join(json.dumps({'prompt': text}) + '\n' for text in ('abc', 'xyz', 'hello', '1', '2', 'a a', 'Q'))
  )
  return path
