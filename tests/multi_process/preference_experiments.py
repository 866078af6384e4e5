"""finetune.FullDpo and finetune.LoraDpo over the stages of a pipeline."""

from spmd_tasks.bridges.huggingface import PipelinedPretrainedModel
from spmd_tasks.tuning import LowRankTuning, PreferenceTuning


class PipelinedFullDpo(PipelinedPretrainedModel, PreferenceTuning):
  """The axes are (replica, stage, data, mdl)."""

  num_microbatches = 4


class PipelinedLoraDpo(LowRankTuning, PipelinedFullDpo):
  """The same with adapters."""
