"""The claims about how the layers of a model are run: in a pipeline, with remat, unrolled, in microbatches."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers import TransformerStack
from spmd_tasks.layers.pipeline import SCHEDULES, PipelinedStack
from spmd_tasks.sharding import stage_axis, stage_axis_rules
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Agree, Case, NotApplicable
from spmd_tasks.verification._layouts import Mesh
from spmd_tasks.verification._promises import for_a_pipeline, for_accumulation, paths_ending, paths_of, set_all
from spmd_tasks.verification._settings import Setting

_STAGE = 'stage'  # the axis that a mesh gets whose model is made a pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsPipeline:
  """Makes the model's stack of layers a pipeline, over an axis that the mesh gets for it; a change of a Setting."""

  schedule: str
  num_microbatches: int
  num_repeats: int

  def __call__(self, job: Job, sizes: Mapping[str, int]) -> Job:
    field, stack = _plain_stack(job.task.model)
    pipeline = PipelinedStack(
      block=stack.block,
      num_layers=stack.num_layers,
      remat_policy=stack.remat_policy,
      schedule=self.schedule,  # type: ignore[arg-type]
      num_microbatches=self.num_microbatches,
      num_repeats=self.num_repeats,
    )
    first, *others = job.experiment.mesh_axis_names
    first_size, *other_sizes = job.experiment.ici_mesh_shape
    experiment = dataclasses.replace(
      job.experiment,
      mesh_axis_names=(first, _STAGE, *others),
      ici_mesh_shape=(first_size, sizes.get(_STAGE, 1), *other_sizes),
      axis_rules=stage_axis_rules(job.experiment.axis_rules, _STAGE),
    )
    new: dict[str, Any] = {field: pipeline}
    task = dataclasses.replace(job.task, model=job.task.model.clone(**new))
    return dataclasses.replace(job, experiment=experiment, task=task)


def pipeline_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields a case for each schedule, of a model with a pipeline or of a plain stack that is made one."""
  del num_more
  job, values = bench.source.base, bench.source.values
  paths = paths_of(values, PipelinedStack)
  if not paths:
    try:
      _, stack = _plain_stack(job.task.model)
    except UserError as error:
      yield NotApplicable(claim='pipeline', subject='any schedule', reason=str(error))
      return
    num_layers = stack.num_layers
  else:
    num_layers = int(values[f'{paths[0]}.num_layers'])
  turned_off = for_a_pipeline(values)
  reference = Setting(overrides=turned_off.overrides)
  for schedule in SCHEDULES:
    mesh = _pipeline_mesh(bench, schedule, int(values[f'{paths[0]}.num_microbatches']) if paths else None)
    if mesh is None:
      reason = f'no number of microbatches fits the batch of {_batch_size(job)} rows on {bench.num_devices} devices'
      yield NotApplicable(claim='pipeline', subject=schedule, reason=reason)
      continue
    num_repeats = 1
    if schedule == 'circular':
      num_repeats = next((repeats for repeats in (2, 3, num_layers) if num_layers % repeats == 0), 1)
    if paths:
      own = [f'{path}.{name}' for path in paths for name in (f'schedule={schedule}', f'num_repeats={num_repeats}')]
      setting = Setting(mesh=mesh, overrides=(*turned_off.overrides, *own))
    else:
      stages = dict(mesh)[_STAGE]
      num_microbatches = stages * max(m for m in (1, 2) if _batch_size(job) % (stages * m) == 0)
      change = AsPipeline(schedule=schedule, num_microbatches=num_microbatches, num_repeats=num_repeats)
      setting = Setting(mesh=mesh, overrides=turned_off.overrides, change=change)
    yield Agree(
      claim='pipeline',
      setting=setting,
      reference=reference,
      case=f'{schedule}, {setting}',
      remark=turned_off.remark,
    )


def _pipeline_mesh(bench: Bench, schedule: str, num_microbatches: int | None) -> Mesh | None:
  """Returns the experiment's mesh if it has stages; else one that is drawn, or None if nothing fits."""
  names = bench.source.base.experiment.mesh_axis_names
  axis = stage_axis(names, bench.source.base.experiment.axis_rules)
  own = bench.own_mesh
  if num_microbatches is not None and axis is not None and dict(own)[axis] > 1:
    return own
  axis, names = (axis, names) if num_microbatches is not None and axis else (_STAGE, (names[0], _STAGE, *names[1:]))
  batch_size = _batch_size(bench.source.base)
  counts = [
    stages
    for stages in (2, 4)
    if stages <= bench.num_devices
    and (batch_size % stages == 0 if num_microbatches is None else num_microbatches % stages == 0)
  ]
  if not counts:
    return None
  rng = np.random.default_rng((bench.seed, 20, list(SCHEDULES).index(schedule)))
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
    yield NotApplicable(claim='microbatches', subject=subject, reason=reason)
    return
  if values.get('task.learner.accumulation') == 'sum':
    yield NotApplicable(claim='microbatches', subject=subject, reason="accumulation 'sum' adds means, as it should")
    return
  turned_off = for_accumulation(values)
  mesh, count = found
  setting = Setting(mesh=mesh, overrides=(*turned_off.overrides, f'{path}={count}'))
  yield Agree(
    claim='microbatches',
    setting=setting,
    reference=Setting(overrides=turned_off.overrides),
    case=f'{count} instead of {now}, {setting}',
    metrics=turned_off.metrics,
    remark=turned_off.remark,
    has_no_statistics=True,
  )


def _accumulation(bench: Bench, batch_size: int) -> tuple[Mesh, int] | None:
  """Returns a mesh and a number of microbatches that fit the batch, also if a pipeline cuts each of them again."""
  values, experiment = bench.source.values, bench.source.base.experiment
  paths = paths_of(values, PipelinedStack)
  stage = stage_axis(experiment.mesh_axis_names, experiment.axis_rules) if paths else None
  without = tuple((name, 1 if name == stage else size) for name, size in bench.own_mesh)
  for mesh in (bench.own_mesh, without):
    parts = int(values[f'{paths[0]}.num_microbatches']) if stage and dict(mesh)[stage] > 1 else 1
    for count in (4, 2):
      if batch_size % (count * parts) == 0:
        return mesh, count
  return None


def field_cases(bench: Bench, num_more: int, *, claim: str, field: str, new: Sequence[Any]) -> Iterator[Case]:
  """Yields the case that a field of the model's stacks changes no number.

  Args:
    bench: the experiment.
    num_more: not used.
    claim: the name of the claim.
    field: the field's name.
    new: the first value that the field does not have is set, wherever the model has the field.
  """
  del num_more
  values = bench.source.values
  paths = paths_ending(values, field)
  if not paths:
    yield NotApplicable(claim=claim, subject=field, reason=f'no part of the model has a field {field}')
    return
  value = next(value for value in new if any(str(values[path]) != str(value) for path in paths))
  setting = Setting(mesh=bench.own_mesh, overrides=set_all(paths, value))
  yield Agree(claim=claim, setting=setting, reference=Setting(), case=f'{field} {value}, {setting}')


remat_cases = functools.partial(field_cases, claim='remat', field='remat_policy', new=('full', 'none'))
scan_cases = functools.partial(field_cases, claim='scan', field='scan', new=(False, True))


def _plain_stack(model: Any) -> tuple[str, TransformerStack]:
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
