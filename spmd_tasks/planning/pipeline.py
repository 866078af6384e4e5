"""What a plan says of a pipeline: its stages, its schedule, and the ticks in which a stage has nothing to do."""

from typing import Any

from spmd_tasks.experiment import Job
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.sharding.axis_rules import stage_axis


def pipeline_report(job: Job, model: PartitionedModel) -> dict[str, Any] | None:
  """Returns `pipeline` of plan.json; None if the model has no pipeline on this mesh.

  `ticks` are what each stage processes in each tick: `F3` is the forward pass of microbatch 3, `B3` its backward pass,
  `F3.1` the forward pass in repeat 1 of a circular pipeline, None a bubble.
  """
  axis = stage_axis(model.mesh.axis_names, model.axis_rules)
  num_stages = 1 if axis is None else model.mesh.shape[axis]
  stack = getattr(job.task.model, 'stack', None)
  stacks = (stack, *(getattr(stack, 'stacks', None) or ()))
  pipelined = next((stack for stack in stacks if isinstance(stack, PipelinedStack)), None)
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


def bubble_fraction(job: Job, model: PartitionedModel) -> float:
  """Returns the fraction of ticks in which a stage computes nothing that counts; 0 without a pipeline."""
  report = pipeline_report(job, model)
  return 0.0 if report is None else report['bubble']


def _ticks(name: str, schedule: Schedule, stage: int) -> list[str | None]:
  """Returns the work of a stage in each tick of a training step: forward, then backward."""
  forward = [_forward(schedule, stage, tick) for tick in range(schedule.num_ticks)]
  if name != 'one_forward_one_backward':  # the backward pass is the forward pass in reverse
    return [*forward, *(work and f'B{work[1:]}' for work in reversed(forward))]
  # A stage runs a microbatch forward again and then backward, beginning with the last stage.
  backward = (_forward(schedule, schedule.num_stages - 1 - stage, tick) for tick in range(schedule.num_ticks))
  return [*forward, *(work and f'{work} B{work[1:]}' for work in backward)]


def _forward(schedule: Schedule, stage: int, tick: int) -> str | None:
  microbatch, repeat, is_work = schedule.work(stage, tick)
  if not is_work:
    return None
  return f'F{microbatch}.{repeat}' if schedule.num_repeats > 1 else f'F{microbatch}'
