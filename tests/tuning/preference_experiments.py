"""The uneven models of the other comparisons on pairs of answers, with all weights or only adapters trained.

A row has one or two pairs and then padding, so that shards and microbatches have different numbers of pairs.
"""

from pathlib import Path

import fiddle as fdl

from spmd_tasks.inputs import ByteTokenizer
from spmd_tasks.recipes import DenseLanguageModel, PipelinedLanguageModel
from spmd_tasks.tuning import PreferenceInput, PreferenceLoss, Preferences
from tests.runtime import moe_experiments, uneven_experiments
from tests.runtime.pipeline_experiments import PipelinedExperts
from tests.tuning.low_rank_experiments import with_adapters

PAIRS = Path(__file__).with_name('pairs.jsonl')


class OnPairs(DenseLanguageModel):
  """DPO on short pairs, with a reference that gives all answers the same probability."""

  vocab_size = 259
  num_layers = 6
  batch_size = 16
  seq_len = 40

  def loss(self):
    return fdl.Config(PreferenceLoss, beta=0.2)

  def train_input(self):
    return fdl.Config(
      PreferenceInput,
      source=fdl.Config(Preferences, pattern=str(PAIRS)),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      seed=self.seed,
      reference_free=True,
    )

  def eval_inputs(self):
    return {}


class LowRankOnPairs(OnPairs):
  """OnPairs, of which only adapters are trained."""

  def task(self):
    return with_adapters(super().task(), trained=('lora_',))


class Dpo(OnPairs, uneven_experiments.AdamW):
  """All weights."""


class LowRankDpo(LowRankOnPairs, uneven_experiments.AdamW):
  """Adapters."""


class BaseDpo(LowRankDpo):
  """Adapters, with the model without them as the reference."""

  def loss(self):
    return fdl.Config(PreferenceLoss, beta=0.2, reference_from='base')


class LowRankExpertsDpo(LowRankOnPairs, moe_experiments.AlongData):
  """Adapters of a mixture of experts."""


class PipelinedDpo(PipelinedLanguageModel, Dpo):
  """The axes are (replica, stage, data, mdl)."""


class PipelinedBaseDpo(PipelinedLanguageModel, BaseDpo):
  """BaseDpo on a pipeline."""


class PipelinedLowRankExpertsDpo(LowRankOnPairs, PipelinedExperts):
  """The axes are (replica, stage, data, expert, mdl)."""
