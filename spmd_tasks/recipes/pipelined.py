"""Language models whose layers are split over the stages of a pipeline."""

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.layers import TransformerStack
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule, check_microbatches_divide
from spmd_tasks.recipes.dense import DenseLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, AxisRules, stage_axis, stage_axis_rules


class PipelinedLanguageModel(DenseLanguageModel):
  """A language model over the stages of a pipeline: name it before another base, whose `block` and `ffn` it takes.

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
      raise UserError(
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
