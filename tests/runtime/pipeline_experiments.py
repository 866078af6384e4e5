"""The uneven models as pipelines with 6 layers, which are not divisible by 4 stages or 2 x 2 repeats."""

from spmd_tasks.recipes import PipelinedLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh, stage_axis_rules
from tests.runtime import moe_experiments, uneven_experiments

_EXPERT = DataExpertModelMesh(num_devices=4, num_expert_partitions=2).axes()


class PipelinedAdamW(PipelinedLanguageModel, uneven_experiments.AdamW):
  """The axes are (replica, stage, data, mdl)."""

  num_layers = 6
  batch_size = 16


class PipelinedAdafactor(PipelinedLanguageModel, uneven_experiments.Adafactor):
  """PipelinedAdamW with Adafactor's factored moments."""

  num_layers = 6
  batch_size = 16


class PipelinedExperts(PipelinedLanguageModel, moe_experiments.AlongData):
  """6 experts, top 2; the axes are (replica, stage, data, expert, mdl)."""

  mesh_axis_names = ('replica', 'stage', *_EXPERT.mesh_axis_names[1:])
  ici_mesh_shape = (1, 1, 1, 1, 1)
  axis_rules = stage_axis_rules(_EXPERT.axis_rules)
  num_layers = 6
  batch_size = 16
