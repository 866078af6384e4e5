"""Pipeline parallelism: splits the layers of a stack over the stages of a mesh axis.

    stack = PipelinedStack(block=block, num_layers=12, num_microbatches=8, schedule='circular', num_repeats=2)

replaces a TransformerStack. The axis rules decide which mesh axis holds the stages (`stage_axis_rules` in
spmd_tasks.sharding). The batch is cut into microbatches; in every tick each stage runs its layers on one of them and
sends the result to the next stage. Results equal those of the TransformerStack.

`Schedule` computes ticks and the bubble: Schedule(num_stages=4, num_microbatches=8).bubble_fraction.

Read stack.py (the layer), schedule.py (which stage processes which microbatch in which tick), microbatches.py (how
microbatches are cut and moved), then loop.py (one stage, and the schedules).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.layers.pipeline.schedule import Schedule, ScheduleName
  from spmd_tasks.layers.pipeline.stack import PipelinedStack
