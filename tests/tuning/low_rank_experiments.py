"""The uneven models of the other comparisons with most weights frozen: adapters and the embedding are trained."""

import fiddle as fdl

from spmd_tasks.adapters import LowRankAdapter, add_adapters
from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import PipelinedLanguageModel
from tests.runtime import moe_experiments, uneven_experiments
from tests.runtime.pipeline_experiments import PipelinedExperts


def with_adapters(task: fdl.Config, trained=('lora_', 'embedding/'), **settings) -> fdl.Config:
  """The task of which adapters of every projection of its blocks are trained, and the embedding or other weights."""
  adapter = LowRankAdapter(**{'rank': 5, 'alpha': 20.0} | settings)
  add_adapters(task.model, ('attention/', 'ffn/'), adapter)
  task.trained = trained
  task.learner.optimizer = fdl.Config(AdamW, learning_rate=0.02, weight_decay=0.01)
  return task


class LowRank(uneven_experiments.AdamW):
  """Rank 5, which no axis divides; it is not split."""

  num_layers = 6
  batch_size = 16

  def task(self):
    return with_adapters(super().task())


class Dora(LowRank):
  """The same with DoRA."""

  def task(self):
    return with_adapters(super(LowRank, self).task(), use_dora=True)


class InFourBits(LowRank):
  """The frozen kernels in NF4 with scales in 8 bits, of which the mesh divides nothing."""

  def task(self):
    task = super().task()
    task.frozen_dtype = 'nf4_double'
    task.model.stack.remat_policy = 'dots'
    return task


class LowRankExperts(moe_experiments.AlongData):
  """Adapters of experts too, which are split over the data axis."""

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
