"""The claims about how the layers of a model are run: in a pipeline, with remat, unrolled, in microbatches."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers import TransformerStack
from spmd_tasks.layers.pipeline import SCHEDULES, PipelinedStack, ScheduleName
from spmd_tasks.sharding import stage_axis, stage_axis_rules
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case, Verdict, agreement, not_applicable
from spmd_tasks.verification._layouts import Mesh
from spmd_tasks.verification._promises import for_a_pipeline, for_accumulation
from spmd_tasks.verification._settings import Setting

STAGE = 'stage'  # the axis that a mesh gets whose model is made a pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsPipeline:
  """Makes the model's stack of layers a pipeline, over an axis that the mesh gets for it; a change of a Setting."""

  schedule: ScheduleName
  num_microbatches: int
  num_repeats: int

  def __call__(self, job: Job, sizes: Mapping[str, int]) -> Job:
    field, stack = plain_stack(job.task.model)
    pipeline = PipelinedStack(
      block=stack.block,
      num_layers=stack.num_layers,
      remat_policy=stack.remat_policy,
      schedule=self.schedule,
      num_microbatches=self.num_microbatches,
      num_repeats=self.num_repeats,
    )
    first, *others = job.experiment.mesh_axis_names
    first_size, *other_sizes = job.experiment.ici_mesh_shape
    experiment = dataclasses.replace(
      job.experiment,
      mesh_axis_names=(first, STAGE, *others),
      ici_mesh_shape=(first_size, sizes.get(STAGE, 1), *other_sizes),
      axis_rules=stage_axis_rules(job.experiment.axis_rules, STAGE),
    )
    new: dict[str, Any] = {field: pipeline}
    task = dataclasses.replace(job.task, model=job.task.model.clone(**new))
    return dataclasses.replace(job, experiment=experiment, task=task)


def pipeline_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields a case for each schedule, of a model with a pipeline or of a plain stack that is made one."""
  del num_more
  job, values = bench.source.base, bench.source.values
  paths = bench.source.paths_of(PipelinedStack)
  try:
    num_layers = int(values[f'{paths[0]}.num_layers']) if paths else plain_stack(job.task.model)[1].num_layers
  except UserError as error:
    yield not_applicable('pipeline', 'any schedule', str(error))
    return
  own_microbatches = int(values[f'{paths[0]}.num_microbatches']) if paths else None
  turned_off = for_a_pipeline(bench.source)
  reference = Setting(overrides=turned_off.overrides)
  for schedule in SCHEDULES:
    mesh = _pipeline_mesh(bench, schedule, own_microbatches)
    if mesh is None:
      reason = f'no number of microbatches fits the batch of {_batch_size(job)} rows on {bench.num_devices} devices'
      yield not_applicable('pipeline', schedule, reason)
      continue
    num_repeats = next(n for n in (2, 3, num_layers) if num_layers % n == 0) if schedule == 'circular' else 1
    if paths:
      own = [f'{path}.{name}' for path in paths for name in (f'schedule={schedule}', f'num_repeats={num_repeats}')]
      setting = Setting(mesh=mesh, overrides=(*reference.overrides, *own))
    else:
      stages = dict(mesh)[STAGE]
      num_microbatches = stages * max(m for m in (1, 2) if _batch_size(job) % (stages * m) == 0)
      change = AsPipeline(schedule=schedule, num_microbatches=num_microbatches, num_repeats=num_repeats)
      setting = Setting(mesh=mesh, overrides=reference.overrides, change=change)
    yield agreement('pipeline', setting, reference, subject=f'{schedule}, {setting}', remark=turned_off.remark)


def _pipeline_mesh(bench: Bench, schedule: ScheduleName, own_microbatches: int | None) -> Mesh | None:
  """Returns the experiment's mesh if it has stages; else one that is drawn, or None if nothing fits.

  Args:
    bench: the experiment.
    schedule: each has a mesh of its own.
    own_microbatches: of a model with a pipeline; None for a plain stack, whose mesh gets an axis for the stages.
  """
  experiment = bench.source.base.experiment
  names = experiment.mesh_axis_names
  axis = None if own_microbatches is None else stage_axis(names, experiment.axis_rules)
  if axis is None:
    axis, names = STAGE, (names[0], STAGE, *names[1:])
  elif dict(bench.own_mesh)[axis] > 1:
    return bench.own_mesh
  divided = own_microbatches or _batch_size(bench.source.base)
  counts = [stages for stages in (2, 4) if stages <= bench.num_devices and divided % stages == 0]
  if not counts:
    return None
  rng = np.random.default_rng((bench.seed, 20, SCHEDULES.index(schedule)))
  sizes = dict.fromkeys(names, 1)
  sizes[axis] = int(rng.choice(counts))
  others = [name for name in names[1:] if name != axis]
  rest = bench.num_devices // sizes[axis]
  while rest > 1 and others:
    sizes[str(rng.choice(others))] *= 2
    rest //= 2
  return tuple(sizes.items())


def microbatch_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the case that the learner's microbatches give the gradient of the full batch."""
  del num_more
  job, values = bench.source.base, bench.source.values
  path, subject = 'task.learner.num_microbatches', 'microbatches of the learner'
  batch_size, now = _batch_size(job), values.get(path)
  found = _accumulation(bench, batch_size) if now == 1 else (bench.own_mesh, 1)
  if now is None or found is None:
    reason = f'{path} cannot be set' if now is None else f'neither 4 nor 2 fit the batch of {batch_size} rows'
    yield not_applicable('microbatches', subject, reason)
    return
  if values.get('task.learner.accumulation') == 'sum':
    yield not_applicable('microbatches', subject, "accumulation 'sum' adds means, as it should")
    return
  turned_off = for_accumulation(bench.source)
  mesh, count = found
  setting = Setting(mesh=mesh, overrides=(*turned_off.overrides, f'{path}={count}'))
  reference = Setting(overrides=turned_off.overrides)
  case = agreement(
    'microbatches',
    setting,
    reference,
    subject=f'{count} instead of {now}, {setting}',
    metrics=turned_off.metrics,
    remark=turned_off.remark,
  )

  def decide(bench: Bench) -> Verdict:
    # Variables beside the weights are statistics of a batch, so microbatches make others.
    if kept := bench.runner(reference).model.abstract_state.non_trainable:
      return Verdict(status='not applicable', detail=f'{", ".join(kept)} are statistics of a batch')
    return case.decide(bench)

  yield dataclasses.replace(case, decide=decide)


def _accumulation(bench: Bench, batch_size: int) -> tuple[Mesh, int] | None:
  """Returns a mesh and a number of microbatches that fit the batch, also if a pipeline cuts each of them again."""
  values, experiment = bench.source.values, bench.source.base.experiment
  paths = bench.source.paths_of(PipelinedStack)
  stage = stage_axis(experiment.mesh_axis_names, experiment.axis_rules) if paths else None
  without = tuple((name, 1 if name == stage else size) for name, size in bench.own_mesh)
  for mesh in (bench.own_mesh, without):
    parts = int(values[f'{paths[0]}.num_microbatches']) if stage and dict(mesh)[stage] > 1 else 1
    for count in (4, 2):
      if batch_size % (count * parts) == 0:
        return mesh, count
  return None


def _field_cases(bench: Bench, num_more: int, *, claim: str, field: str, new: tuple[Any, Any]) -> Iterator[Case]:
  """Yields the case that a field of the model's stacks changes no number.

  Args:
    bench: the experiment.
    num_more: not used.
    claim: the name of the claim.
    field: the field's name.
    new: the first of these values that is new to the field anywhere is set, wherever the model has the field.
  """
  del num_more
  values, paths = bench.source.values, bench.source.paths_ending(field)
  if not paths:
    yield not_applicable(claim, field, f'no part of the model has a field {field}')
    return
  value = next(value for value in new if any(str(values[path]) != str(value) for path in paths))
  setting = Setting(mesh=bench.own_mesh, overrides=tuple(f'{path}={value}' for path in paths))
  yield agreement(claim, setting, Setting(), subject=f'{field} {value}, {setting}')


remat_cases = functools.partial(_field_cases, claim='remat', field='remat_policy', new=('full', 'none'))
scan_cases = functools.partial(_field_cases, claim='scan', field='scan', new=(False, True))


def plain_stack(model: Any) -> tuple[str, TransformerStack]:
  """Returns the name and the value of the model's field that holds its stack of layers.

  Raises:
    UserError: the model has no such field, or several.
  """
  fields = [
    field.name for field in dataclasses.fields(model) if isinstance(getattr(model, field.name), TransformerStack)
  ]
  if len(fields) != 1:
    raise UserError(f'{type(model).__name__} has {len(fields)} fields with a TransformerStack, not one')
  return fields[0], getattr(model, fields[0])


def _batch_size(job: Job) -> int:
  return next(iter(job.train_input.element_spec().values())).shape[0]
