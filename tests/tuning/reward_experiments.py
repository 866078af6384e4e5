"""Experiments that learn from rewards: the uneven models of the other comparisons, and a small job."""

import json
from pathlib import Path
import time

import fiddle as fdl

from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import DenseLanguageModel, PipelinedLanguageModel
from spmd_tasks.tuning import LowRankAdapter, RewardTuning, add_adapters
from tests.runtime import moe_experiments, uneven_experiments
from tests.tuning.preference_experiments import PAIRS


class OnRewards(RewardTuning):
  """Policy gradients with a reference, whose log-probabilities are 0 in made-up batches, so that the loss falls."""

  data = str(PAIRS)
  reward = 'tests.tuning.reward_experiments:share_of_a'
  group_size = 4
  batch_size = 16
  seq_len = 40
  max_tokens = 24
  kl_weight = 0.1
  learning_rate = 3e-3


class Policy(OnRewards, uneven_experiments.AdamW):
  """All weights."""


class ValuePolicy(Policy):
  """PPO, whose value head is trained with the rest."""

  method = 'ppo'


class PipelinedPolicy(PipelinedLanguageModel, Policy):
  """The axes are (replica, stage, data, mdl)."""


class LowRankPolicy(OnRewards, uneven_experiments.AdamW):
  """Adapters, held to the model without them; the mean over tokens, whose weight differs from shard to shard."""

  method = 'dapo'
  reference = 'base'

  def task(self):
    task = super().task()
    add_adapters(task.model, ('attention/', 'ffn/'), LowRankAdapter(rank=5, alpha=20.0))
    task.trained = ('lora_',)
    task.learner.optimizer = fdl.Config(AdamW, learning_rate=0.02)
    return task


class ExpertsPolicy(OnRewards, moe_experiments.AlongData):
  """A mixture of experts; ratios of whole completions."""

  method = 'gspo'


def share_of_a(prompt, completion, record):
  """How much of the text is the letter a."""
  return completion.count('a') / max(len(completion), 1)


class Job(RewardTuning, DenseLanguageModel):
  """A small job on mesh data 4 x mdl 2: eight prompts of four completions each."""

  ici_mesh_shape = (1, 4, 2)
  model_dims = 32
  num_layers = 2
  hidden_dims = 64
  data = 'HERE/prompts.jsonl'
  reward = 'tests.tuning.reward_experiments:share_of_a'
  group_size = 4
  batch_size = 32
  seq_len = 24
  max_tokens = 12
  num_train_steps = 4
  log_every_steps = 1
  tensorboard = False

  def optimizer(self):
    return fdl.Config(AdamW, learning_rate=0.02)


def write_prompts(directory: Path) -> Path:
  path = directory / 'prompts.jsonl'
  path.write_text(
    ''.join(json.dumps({'prompt': text}) + '\n' for text in ('abc', 'xyz', 'hello', '1', '2', 'a a', 'Q'))
  )
  return path


class Echo:
  """Answers texts that end at a vowel with their length, and ends after the third; 1 for each that has an a."""

  stop = tuple('aeiou')

  def reset(self, record):
    self.num_turns = 0
    return record['prompt']

  def step(self, completion):
    self.num_turns += 1
    if completion == 'hang':
      time.sleep(60)
    return f'[{len(completion)}]', float('a' in completion), self.num_turns == 3


class Remembering(Echo):
  """Declares its state."""

  def state(self):
    return {'num_turns': self.num_turns}

  def restore(self, state):
    self.num_turns = state['num_turns']


class Calculator:
  """A conversation with a tool: the model writes `calc: 2+3` to have it computed, and else ends with its answer."""

  tools = ({'type': 'function', 'function': {'name': 'calc', 'parameters': {}}},)

  def reset(self, record):
    self.record = record
    return [{'role': 'user', 'content': record['prompt']}]

  def step(self, completion):
    kind, _, terms = completion.partition(': ')
    if kind == 'calc':
      return [{'role': 'tool', 'content': str(sum(map(int, terms.split('+'))))}], 0.0, False
    return None, float(completion == self.record['answer']), True
