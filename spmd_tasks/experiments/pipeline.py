"""Language models whose layers are split over the stages of a pipeline.

    spmd-tasks --exp pipeline.StdlibTiny --mode train --num_fake_devices 8 --job_log_dir runs/pipeline

pipeline.StdlibTiny is lm.StdlibTiny on other devices, with the same losses: from 5.6 nats per byte to below 2.4 in 300
steps.
"""

import fiddle as fdl

from spmd_tasks.config.registry import register
from spmd_tasks.experiment import DEFAULT_AXIS_RULES
from spmd_tasks.experiments import lm, moe
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.layers.pipeline_microbatches import check_microbatches_divide
from spmd_tasks.layers.pipeline_schedule import Schedule
from spmd_tasks.layers.transformer import TransformerStack
from spmd_tasks.sharding.expert_axes import data_expert_model_axes
from spmd_tasks.sharding.specs import AxisRules
from spmd_tasks.sharding.stage_axis import stage_axis, stage_axis_rules

# Of a stage's 4 devices: 2 data x 2 expert.
_EXPERT_2 = data_expert_model_axes(
  num_devices=4, num_expert_partitions=2, num_partitions=1, base_rules=DEFAULT_AXIS_RULES
)


class PipelinedLanguageModel(lm.DenseLanguageModel):
  """A language model with a stage axis; a first base of any other one, whose `block` and `ffn` it keeps.

  `num_microbatches` is a multiple of the stages. `num_repeats` is for the schedule 'circular'.
  """

  mesh_axis_names: tuple[str, ...] = ('replica', 'stage', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 1, 1, 1)
  axis_rules: AxisRules = stage_axis_rules(DEFAULT_AXIS_RULES)
  num_microbatches: int = 8
  schedule: str = 'gpipe'
  num_repeats: int = 1

  def __post_init__(self):
    super().__post_init__()
    axis = stage_axis(self.mesh_axis_names, self.axis_rules)
    if axis is None:
      raise ValueError(
        f"a pipeline needs a mesh axis for its stages, but axis_rules split 'layers' over none of mesh_axis_names "
        f"{self.mesh_axis_names}: add the axis 'stage' and the rules of stage_axis_rules."
      )
    # As many as a built mesh has, except where a size is -1, the devices left over.
    shapes = (self.ici_mesh_shape, self.dcn_mesh_shape or (1,) * len(self.ici_mesh_shape))
    ici, dcn = (shape[self.mesh_axis_names.index(axis)] for shape in shapes)
    if ici * dcn > 1:
      Schedule(num_stages=ici * dcn, num_microbatches=self.num_microbatches, num_repeats=self.num_repeats)
      check_microbatches_divide(self.batch_size, self.num_microbatches)

  def stack(self) -> fdl.Config[TransformerStack | PipelinedStack]:
    return fdl.Config(
      PipelinedStack,
      block=self.block(self.ffn()),
      num_layers=self.num_layers,
      num_microbatches=self.num_microbatches,
      schedule=self.schedule,
      num_repeats=self.num_repeats,
      remat_policy=self.remat_policy,
    )


@register
class StdlibTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny over 4 stages x data 2, in 8 microbatches (GPipe)."""

  ici_mesh_shape = (1, 4, 2, 1)


@register
class CircularTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny over 2 stages of 2 groups of layers each, data 2 x mdl 2."""

  ici_mesh_shape = (1, 2, 2, 2)
  schedule = 'circular'
  num_repeats = 2


@register
class OneForwardOneBackwardTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny with 10 layers on 4 stages x data 2, one forward, one backward: uneven stages, bounded memory."""

  ici_mesh_shape = (1, 4, 2, 1)
  num_layers = 10
  schedule = 'one_forward_one_backward'


@register
class MoeTiny(PipelinedLanguageModel, moe.StdlibTiny):
  """moe.StdlibTiny, dropless, over 2 stages x data 2 x expert 2."""

  mesh_axis_names = ('replica', 'stage', 'data', 'expert', 'mdl')
  ici_mesh_shape = (1, 2, 2, 2, 1)
  axis_rules = stage_axis_rules(_EXPERT_2.axis_rules)
  num_microbatches = 4


@register
class Dense70B(PipelinedLanguageModel, lm.Dense70B):
  """lm.Dense70B over 8 stages, two in each of 4 slices of 256 chips, circular; stage 8 x data 32 x mdl 4."""

  ici_mesh_shape = (1, 2, 32, 4)
  dcn_mesh_shape = (1, 4, 1, 1)
  num_microbatches = 32
  schedule = 'circular'
  num_repeats = 2
