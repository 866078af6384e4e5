"""Jobs for the faults: 20 steps with a checkpoint every 5 and an eval every 10, for each kind of input and mesh.

A step takes at least `seconds_per_batch`, so that a signal meets the job between any two steps.
"""

import dataclasses
import json
from pathlib import Path
import time
from typing import Any

import fiddle as fdl

from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, SyntheticText, TextFiles, TextInput
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.recipes import MoeLanguageModel, PipelinedLanguageModel
from spmd_tasks.tuning import RewardTuning
from tests.programs.small_jobs import Small

NUM_STEPS = 20
SAVE_INTERVAL = 5
MAX_TO_KEEP = 2
EVAL_INTERVAL = 10
EVALS = {'valid': 'eval/valid/metrics.jsonl'}  # the files of eval sets, by name
REWARD_EVALS = {'rewards': 'eval_rewards/metrics.jsonl'}  # the same of jobs that learn from rewards


class Plain(Small):
  """One device, synthetic tokens."""

  ici_mesh_shape = (1, 1, 1)
  num_train_steps = NUM_STEPS
  checkpoint_every = SAVE_INTERVAL
  checkpoint_max_to_keep = MAX_TO_KEEP
  eval_every_steps = EVAL_INTERVAL
  step_timeout_s = 60.0
  input_timeout_s = 20.0
  seconds_per_batch: float = 0.02

  def train_input(self):
    return fdl.copy_with(super().train_input(), seconds_per_batch=self.seconds_per_batch)

  def eval_inputs(self):
    return {'valid': super().eval_inputs()['valid']}


class Padded(Plain):
  """Every matrix padded, on data 2 x mdl 4."""

  ici_mesh_shape = (1, 2, 4)


class Experts(Plain, MoeLanguageModel):
  """Four experts, on data 2 x mdl 2."""

  ici_mesh_shape = (1, 2, 2)
  num_experts = 4
  num_selected_experts = 2


class Pipelined(Plain, PipelinedLanguageModel):
  """Two stages x data 2."""

  mesh_axis_names = PipelinedLanguageModel.mesh_axis_names
  axis_rules = PipelinedLanguageModel.axis_rules
  ici_mesh_shape = (1, 2, 2, 1)
  num_layers = 2
  num_microbatches = 2

  def stack(self) -> fdl.Config[PipelinedStack]:
    return PipelinedLanguageModel.stack(self)


class Read(Plain):
  """Text from files below `data`."""

  data: str = ''
  read_timeout_s: float = 10.0

  def train_input(self):
    text = fdl.Config(
      TextInput,
      source=self.source('train'),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      read_timeout_s=self.read_timeout_s,
    )
    return fdl.Config(SlowInput, input=text, seconds_per_batch=self.seconds_per_batch)


class Text(Read):
  """TextFiles."""

  def source(self, split):
    return fdl.Config(TextFiles, pattern=f'{self.data}/*.txt', block_bytes=64)


class Json(Read):
  """JsonLines."""

  def source(self, split):
    return fdl.Config(JsonLines, pattern=f'{self.data}/*.jsonl', block_bytes=64)


class Mixed(Read):
  """A mixture of two JsonLines and synthetic tokens."""

  def train_input(self):
    sizes = {'batch_size': self.batch_size, 'seq_len': self.seq_len}
    made_up = fdl.Config(SyntheticText, vocab_size=self.vocab_size, **sizes)
    mixture = fdl.Config(
      Mixture,
      sources={'long': self._lines('[012]'), 'short': self._lines('3', packing=False), 'made_up': made_up},
      weights={'long': 0.3, 'short': 0.4, 'made_up': 0.3},
      weight_changes=((8, {'long': 0.6, 'short': 0.2, 'made_up': 0.2}),),
    )
    return fdl.Config(SlowInput, input=mixture, seconds_per_batch=self.seconds_per_batch)

  def _lines(self, parts, **settings):
    return fdl.Config(
      TextInput,
      source=fdl.Config(JsonLines, pattern=f'{self.data}/part_{parts}.jsonl', block_bytes=64),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      read_timeout_s=self.read_timeout_s,
      **settings,
    )


class Rewarded(RewardTuning, Plain):
  """Trains on a reward that sometimes fails: two updates per rollout, with a reference."""

  data = eval_data = str(Path(__file__).with_name('prompts.jsonl'))
  reward = 'tests.fault_campaign.reward_functions:raises'
  group_size = 4
  batch_size = 8
  num_minibatches = 2
  kl_weight = 0.1
  seq_len = 16
  max_tokens = 8
  num_reward_workers = 1


class RewardedAhead(Rewarded):
  """One step off-policy."""

  num_minibatches = 1
  staleness = 1


class Pair(Plain):
  """Two processes with short timeouts."""

  ici_mesh_shape = (1, 2, 2)
  step_timeout_s = 20.0


class PairText(Pair, Text):
  """Two processes on text, so that the model can be served."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowInput:
  """Delays another input's batches by `seconds_per_batch`."""

  input: Any
  seconds_per_batch: float = 0.0

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__') or name == 'input':
      raise AttributeError(name)
    return getattr(self.input, name)

  @property
  def batch_size(self) -> int:
    return self.input.batch_size

  def element_spec(self):
    return self.input.element_spec()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SlowIterator':
    return SlowIterator(self.input.make_iterator(shard_index, shard_count), self.seconds_per_batch)

  def reshard_states(self, states, shard_count: int):
    return self.input.reshard_states(states, shard_count)


class SlowIterator:
  """The iterator of a SlowInput."""

  def __init__(self, iterator: Any, seconds_per_batch: float):
    self._iterator = iterator
    self._seconds_per_batch = seconds_per_batch

  def __iter__(self):
    return self

  def __next__(self):
    time.sleep(self._seconds_per_batch)
    return next(self._iterator)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._iterator, name)


# How many devices each job has in all, and which files it reads.
NUM_DEVICES = {'Padded': 8, 'Experts': 4, 'Pipelined': 4, 'Pair': 4, 'PairText': 4}
PAIRS = ('Pair', 'PairText')  # of two processes
SUFFIXES = {'Text': 'txt', 'PairText': 'txt', 'Json': 'jsonl', 'Mixed': 'jsonl'}


def flags_of(job: str, mode: str) -> list[str]:
  """Returns the flags that start a job, without its directories."""
  num_devices = NUM_DEVICES.get(job, 1) // (2 if job in PAIRS else 1)  # of each process
  return ['--exp', f'{__name__}.{job}', '--mode', mode, '--num_fake_devices', str(num_devices)]


def write_data(job: str, directory: Path) -> None:
  """Writes the files that a job reads, with equal contents in every directory."""
  directory.mkdir()
  suffix = SUFFIXES[job]
  for number in range(4):
    lines = [f'{number}: the {line}th line says {line * line} and ä{"." * (line % 7)}' for line in range(40)]
    path = directory / f'part_{number}.{suffix}'
    if suffix == 'txt':
      path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    else:
      path.write_text(''.join(json.dumps({'text': line}) + '\n' for line in lines))
