"""The uneven models of the other comparisons, of which only adapters and the embedding are trained."""

import fiddle as fdl

from spmd_tasks.adapters import LowRankAdapter, add_adapters
from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import PipelinedLanguageModel
from tests.runtime import moe_experiments, uneven_experiments
from tests.runtime.pipeline_experiments import PipelinedExperts


def with_adapters(task: fdl.Config, trained=('lora_', 'embedding/'), **settings) -> fdl.Config:
  """Adds adapters of all projections, and trains only them and the embedding, or the weights `trained`."""
  adapter = LowRankAdapter(**{'rank': 5, 'alpha': 20.0} | settings)
  add_adapters(task.model, ('attention/', 'ffn/'), adapter)
  task.trained = trained
  task.learner.optimizer = fdl.Config(AdamW, learning_rate=0.02, weight_decay=0.01)
  return task


class LowRank(uneven_experiments.AdamW):
  """Rank 5, which is not divisible by any mesh axis; it is not sharded."""

  num_layers = 6
  batch_size = 16

  def task(self):
    return with_adapters(super().task())


class Dora(LowRank):
  """LowRank with DoRA."""

  def task(self):
    return with_adapters(super(LowRank, self).task(), use_dora=True)


class InFourBits(LowRank):
  """LowRank with frozen kernels in NF4 and 8-bit scales, whose dims are not divisible by the mesh."""

  def task(self):
    task = super().task()
    task.frozen_dtype = 'nf4_double'
    task.model.stack.remat_policy = 'dots'
    return task


class LowRankExperts(moe_experiments.AlongData):
  """LowRank with a mixture of experts, sharded over the data axis, whose kernels get adapters, too."""

  num_layers = 6
  batch_size = 16

  def task(self):
    return with_adapters(super().task())


class PipelinedLowRank(PipelinedLanguageModel, LowRank):
  """The axes are (replica, stage, data, mdl)."""


class PipelinedDora(PipelinedLanguageModel, Dora):
  """The same with DoRA."""


class PipelinedInFourBits(PipelinedLanguageModel, InFourBits):
  """The same in 4 bits."""


class PipelinedLowRankExperts(PipelinedExperts, LowRankExperts):
  """The axes are (replica, stage, data, expert, mdl)."""
