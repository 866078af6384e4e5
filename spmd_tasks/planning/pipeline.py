"""Reports which microbatch each stage of a pipeline processes in each tick, and the fraction of bubbles.

    report = pipeline_report(job, model)
    report['bubble'], report['ticks'][0]        # stage 0: ['F0', 'F1', ..., None, ..., 'B1', 'B0']

`F3` is the forward pass of microbatch 3, `B3` its backward pass, `F3.1` the forward pass in repeat 1 of a circular
pipeline. A None is a bubble.
"""

from typing import Any

from spmd_tasks.experiment import Job
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.sharding import stage_axis

Tick = str | None


def pipeline_report(job: Job, model: PartitionedModel) -> dict[str, Any] | None:
  """Returns `pipeline` of plan.json; None if the model has no pipeline on this mesh."""
  axis = stage_axis(model.mesh.axis_names, model.axis_rules)
  num_stages = 1 if axis is None else model.mesh.shape[axis]
  stack = getattr(job.task.model, 'stack', None)
  stacks = (stack, *(getattr(stack, 'stacks', None) or ()))
  pipelined = next((each for each in stacks if isinstance(each, PipelinedStack)), None)
  if num_stages == 1 or pipelined is None:
    return None
  schedule = Schedule(
    num_stages=num_stages, num_microbatches=pipelined.num_microbatches, num_repeats=pipelined.num_repeats
  )
  ticks = [_ticks(pipelined.schedule, schedule, stage) for stage in range(num_stages)]
  return {
    'axis': axis,
    'stages': num_stages,
    'microbatches': pipelined.num_microbatches,
    'repeats': pipelined.num_repeats,
    'schedule': pipelined.schedule,
    'num_ticks': len(ticks[0]),
    'bubble': schedule.bubble_fraction,
    'ticks': ticks,
  }


def _ticks(name: str, schedule: Schedule, stage: int) -> list[Tick]:
  """Returns the work of a stage in each tick of a training step: forward, then backward."""
  forward = [_forward(schedule, stage, tick) for tick in range(schedule.num_ticks)]
  if name != 'one_forward_one_backward':  # the backward pass is the forward pass in reverse
    return [*forward, *(work and f'B{work[1:]}' for work in reversed(forward))]
  # A stage runs a microbatch forward again and then backward, beginning with the last stage.
  backward = (_forward(schedule, schedule.num_stages - 1 - stage, tick) for tick in range(schedule.num_ticks))
  return [*forward, *(work and f'{work} B{work[1:]}' for work in backward)]


def _forward(schedule: Schedule, stage: int, tick: int) -> Tick:
  microbatch, repeat, is_work = schedule.work(stage, tick)
  if not is_work:
    return None
  return f'F{microbatch}.{repeat}' if schedule.num_repeats > 1 else f'F{microbatch}'
