"""Language models whose layers are split over the stages of a pipeline."""

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.layers.pipeline.microbatches import check_microbatches_divide
from spmd_tasks.recipes.dense import DenseLanguageModel
from spmd_tasks.recipes.text_training import TextTraining
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, AxisRules, stage_axis_rules
from spmd_tasks.sharding.axis_rules import stage_axis


class Pipelined(TextTraining):
  """The fields of a pipeline: a mesh with stages, microbatches, a schedule.

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
    # A size of -1, the remaining devices, is known only when the mesh is built.
    shapes = (self.ici_mesh_shape, self.dcn_mesh_shape or (1,) * len(self.ici_mesh_shape))
    ici, dcn = (shape[self.mesh_axis_names.index(axis)] for shape in shapes)
    if ici * dcn > 1:
      Schedule(num_stages=ici * dcn, num_microbatches=self.num_microbatches, num_repeats=self.num_repeats)
      check_microbatches_divide(self.batch_size, self.num_microbatches)

  def pipelined(self, stack: fdl.Config) -> fdl.Config:
    """Returns a stack as a pipeline; of a StackSequence the longest stack, as the others have few layers."""
    stacks = getattr(stack, 'stacks', None) or (stack,)
    longest = max(stacks, key=lambda stack: stack.num_layers)
    pipeline = fdl.Config(
      PipelinedStack,
      block=longest.block,
      num_layers=longest.num_layers,
      num_microbatches=self.num_microbatches,
      schedule=self.schedule,
      num_repeats=self.num_repeats,
      remat_policy=longest.remat_policy,
    )
    if stack is longest:
      return pipeline
    return fdl.copy_with(stack, stacks=tuple(pipeline if part is longest else part for part in stacks))


class PipelinedLanguageModel(Pipelined, DenseLanguageModel):
  """A language model over the stages of a pipeline: name it before another base, whose layers it takes."""

  def stack(self) -> fdl.Config:
    return self.pipelined(super().stack())
