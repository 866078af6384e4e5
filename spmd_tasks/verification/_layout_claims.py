"""The claims about layouts: meshes, pipelines, microbatches and uneven rows do not change numbers.

Some numbers depend on the split into microbatches, as the guides say: dropout has a mask for each microbatch of a
pipeline; the learner's microbatches balance experts separately, form other groups for an expert's capacity, and weight
routers' metrics by tokens. A claim that compares different splits turns these off on both sides (`CommonOverrides`),
and reports it.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.layers.pipeline import PipelinedStack, ScheduleName
from spmd_tasks.layers.pipeline.schedule import SCHEDULES
from spmd_tasks.sharding.axis_rules import stage_axis
from spmd_tasks.sharding.specs import num_parts, row_axes
from spmd_tasks.verification._cases import Bench, Case, Verdict, agreement_case, skipped_case
from spmd_tasks.verification._formula_runner import no_formula_reason
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Mesh, ResizeBatches, Setting, Source, build_job, draw_meshes

# Fields of the model, with the values that do not depend on microbatches.
_RANDOM = {'dropout_rate': 0.0, 'jitter_eps': 0.0}
_GROUPS = {'group_size': None, 'load_balance_shards': 1}
_AUX_WEIGHTS, _MICROBATCHES = 'task.loss.aux_loss_weights', 'task.learner.num_microbatches'
# Metrics of a language model's loss; all other metrics are reported by layers.
_LOSS_METRICS = (
  'loss',
  'loss_weight',
  'loss_by_source',
  'loss_weight_by_source',
  'cross_entropy',
  'accuracy',
  'z_loss',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonOverrides:
  """Overrides for both sides of a comparison, under which different splits into microbatches agree.

  `metrics` are the metrics that then agree; None for all.
  """

  overrides: tuple[str, ...]
  metrics: tuple[str, ...] | None = None

  @property
  def remark(self) -> str | None:
    """A phrase for the report; None if nothing is turned off."""
    phrases = [f'with {" ".join(self.overrides)} on both sides'] if self.overrides else []
    phrases += ['without the metrics that layers report'] if self.metrics is not None else []
    return ', '.join(phrases) + ': they depend on microbatches' if phrases else None


def overrides_for_pipeline(source: Source) -> CommonOverrides:
  """Returns the overrides to compare a pipeline with layers in sequence."""
  return CommonOverrides(overrides=_turn_off(source, _RANDOM))


def overrides_for_few_rows(source: Source, *, is_pipeline: bool) -> CommonOverrides:
  """Returns the overrides for batches with fewer rows, which may not be divisible by groups and shards."""
  return CommonOverrides(overrides=_turn_off(source, _GROUPS | (_RANDOM if is_pipeline else {})))


def overrides_for_accumulation(source: Source) -> CommonOverrides:
  """Returns the overrides to compare the learner's microbatches with the full batch."""
  overrides = _turn_off(source, _RANDOM | _GROUPS)
  weights = source.values.get(_AUX_WEIGHTS)
  aux = weights.get('dict', {}) if isinstance(weights, Mapping) else {}
  overrides += tuple(f'{_AUX_WEIGHTS}.{name}=0' for name, weight in aux.items() if weight)
  has_routers = bool(source.paths_ending('load_balance_shards'))
  return CommonOverrides(overrides=overrides, metrics=_LOSS_METRICS if aux or has_routers else None)


def _turn_off(source: Source, fields: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(
    f'{path}={value}'
    for field, value in fields.items()
    for path in source.paths_ending(field)
    if source.values[path] != value
  )


_MAX_TRIES = 40


def mesh_cases(bench: Bench) -> Iterator[Case]:
  """Yields cases for the experiment's mesh, two others of all devices, an uneven one, and --cases random ones."""
  if Setting(mesh=bench.own_mesh).num_devices == 1:
    yield skipped_case('mesh', "the experiment's mesh", 'it is one device')
  else:
    yield _mesh_case(bench, bench.own_mesh)
  uneven = [n for n in (3, 6, 5, 7) if n <= bench.num_devices] or [bench.num_devices]
  any_size = np.random.default_rng((bench.seed, 12)).permutation(range(2, max(bench.num_devices, 2) + 1)).tolist()
  seen = {bench.own_mesh}
  for sizes, num_meshes in (([bench.num_devices], 2), (uneven, 1), (any_size, bench.num_random_meshes)):
    meshes = itertools.islice(random_meshes(bench, sizes), num_meshes + len(seen))
    for mesh in itertools.islice((mesh for mesh in meshes if mesh not in seen), num_meshes):
      seen.add(mesh)
      yield _mesh_case(bench, mesh)


def _mesh_case(bench: Bench, mesh: Mesh) -> Case:
  """Returns the case that a mesh gives the numbers of one device, or of the pipeline alone if masks depend on it."""
  experiment = bench.source.base.experiment
  axis = stage_axis(experiment.mesh_axis_names, experiment.axis_rules)
  setting = Setting(mesh=mesh)
  if axis is not None and dict(mesh)[axis] > 1 and overrides_for_pipeline(bench.source).overrides:
    pipeline = Setting(mesh=((axis, dict(mesh)[axis]),))
    return agreement_case('mesh', setting, pipeline, subject=f'{setting} against {pipeline}')
  return agreement_case('mesh', setting, Setting())


def other_mesh(bench: Bench) -> Mesh:
  """Returns a mesh of `mesh_cases` that is not the experiment's; one device if there is none."""
  meshes = itertools.islice(random_meshes(bench, [bench.num_devices]), 2)
  return next((mesh for mesh in meshes if mesh != bench.own_mesh), ())


def random_meshes(bench: Bench, sizes: list[int]) -> Iterator[Mesh]:
  """Yields random meshes that the experiment accepts, in a fixed order; their numbers of devices cycle over `sizes`."""
  rng = np.random.default_rng((bench.seed, 10, *sizes))
  tries = 0
  for mesh in draw_meshes(bench.source.base.experiment.mesh_axis_names, sizes, rng):
    try:
      build_job(bench.source, Setting(mesh=mesh))
    except UserError:
      tries += 1
      if tries > _MAX_TRIES:
        return
      continue
    tries = 0
    yield mesh


def pipeline_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case for each schedule if the model has a pipeline."""
  settings = list(pipeline_settings(bench))
  if not settings:
    yield skipped_case('pipeline', 'any schedule', 'the model has no pipeline, or the mesh no axis for its stages')
  common = overrides_for_pipeline(bench.source)
  reference = Setting(overrides=common.overrides)
  for schedule, setting in settings:
    if isinstance(setting, str):
      yield skipped_case('pipeline', schedule, setting)
    else:
      yield agreement_case('pipeline', setting, reference, subject=f'{schedule}, {setting}', remark=common.remark)


def pipeline_settings(bench: Bench) -> Iterator[tuple[ScheduleName, Setting | str]]:
  """Yields (schedule, its setting, or why there is none) if the model has a pipeline, and the mesh an axis for it."""
  job, values = bench.source.base, bench.source.values
  paths = bench.source.paths_of(PipelinedStack)
  axis = stage_axis(job.experiment.mesh_axis_names, job.experiment.axis_rules)
  if not paths or axis is None:
    return
  num_layers, num_microbatches = (int(values[f'{paths[0]}.{name}']) for name in ('num_layers', 'num_microbatches'))
  common = overrides_for_pipeline(bench.source)
  for schedule in SCHEDULES:
    mesh = _pipeline_mesh(bench, schedule, axis, num_microbatches)
    if mesh is None:
      yield schedule, f'{num_microbatches} microbatches are not divisible by 2 stages, or there is one device'
      continue
    num_repeats = next(n for n in (2, 3, num_layers) if num_layers % n == 0) if schedule == 'circular' else 1
    fields = (f'schedule={schedule}', f'num_repeats={num_repeats}')
    overrides = [f'{path}.{field}' for path in paths for field in fields]
    yield schedule, Setting(mesh=mesh, overrides=(*common.overrides, *overrides))


def _pipeline_mesh(bench: Bench, schedule: ScheduleName, axis: str, num_microbatches: int) -> Mesh | None:
  """Returns the experiment's mesh if it has stages, else a random mesh for the schedule; None if none fits."""
  if dict(bench.own_mesh)[axis] > 1:
    return bench.own_mesh
  counts = [stages for stages in (2, 4) if stages <= bench.num_devices and num_microbatches % stages == 0]
  if not counts:
    return None
  names = bench.source.base.experiment.mesh_axis_names
  rng = np.random.default_rng((bench.seed, 20, SCHEDULES.index(schedule)))
  sizes = dict.fromkeys(names, 1)
  sizes[axis] = int(rng.choice(counts))
  others = [name for name in names[1:] if name != axis]
  rest = bench.num_devices // sizes[axis]
  while rest > 1 and others:
    sizes[str(rng.choice(others))] *= 2
    rest //= 2
  return tuple(sizes.items())


def microbatch_cases(bench: Bench) -> Iterator[Case]:
  """Yields the cases that the learner's microbatches agree with the formulas and with the full batch.

  The formulas include everything that depends on microbatches: aux losses count once per step, and dropout has a mask
  for each microbatch.
  """
  job, values = bench.source.base, bench.source.values
  subject = 'microbatches of the learner'
  batch_size, own_count = job.train_input.batch_size, values.get(_MICROBATCHES)
  mesh_and_count = _mesh_and_count(bench, batch_size) if own_count == 1 else (bench.own_mesh, 1)
  if own_count is None:
    yield skipped_case('microbatches', subject, f'{_MICROBATCHES} cannot be set')
    return
  if mesh_and_count is None:
    yield skipped_case('microbatches', subject, f'neither 4 nor 2 divide the batch of {batch_size} rows')
    return
  mesh, count = mesh_and_count
  yield _formula_case(bench, mesh, count)
  if values.get('task.learner.accumulation') == 'sum':
    yield skipped_case('microbatches', subject, "accumulation 'sum' adds means")
    return
  common = overrides_for_accumulation(bench.source)
  setting = Setting(mesh=mesh, overrides=(*common.overrides, f'{_MICROBATCHES}={count}'))
  reference = Setting(overrides=common.overrides)
  case = agreement_case(
    'microbatches',
    setting,
    reference,
    subject=f'{count} instead of {own_count}, {setting}',
    metrics=common.metrics,
    remark=common.remark,
  )

  def decide(bench: Bench) -> Verdict:
    # Non-trainable variables are statistics of a batch, so they depend on microbatches.
    if collections := bench.runner(reference).model.abstract_state.non_trainable:
      return Verdict(status='skipped', detail=f'{", ".join(collections)} are statistics of a batch')
    return case.decide(bench)

  yield dataclasses.replace(case, decide=decide)


def _formula_case(bench: Bench, mesh: Mesh, count: int) -> Case:
  """Returns the case that microbatches on a mesh agree with the formulas."""
  if reason := no_formula_reason(bench.source.base.task):
    return skipped_case('microbatches', 'the formulas', reason)
  axis = stage_axis(bench.source.base.experiment.mesh_axis_names, bench.source.base.experiment.axis_rules)
  if overrides_for_pipeline(bench.source).overrides:  # masks depend on the microbatches of a pipeline too
    mesh = tuple((name, 1 if name == axis else size) for name, size in mesh)
  overrides = (f'{_MICROBATCHES}={count}',)
  setting, reference = Setting(mesh=mesh, overrides=overrides), Setting(overrides=overrides, by_formulas=True)
  return agreement_case('microbatches', setting, reference, subject=f'{count} against the formulas, {setting}')


def _mesh_and_count(bench: Bench, batch_size: int) -> tuple[Mesh, int] | None:
  """Returns a mesh and a number of microbatches that fit the batch, even if a pipeline splits each of them again."""
  values, experiment = bench.source.values, bench.source.base.experiment
  paths = bench.source.paths_of(PipelinedStack)
  stage = stage_axis(experiment.mesh_axis_names, experiment.axis_rules) if paths else None
  without_stages = tuple((name, 1 if name == stage else size) for name, size in bench.own_mesh)
  for mesh in (bench.own_mesh, without_stages):
    num_pipelined = int(values[f'{paths[0]}.num_microbatches']) if stage and dict(mesh)[stage] > 1 else 1
    for count in (4, 2):
      if batch_size % (count * num_pipelined) == 0:
        return mesh, count
  return None


def row_cases(bench: Bench) -> Iterator[Case]:
  """Yields cases for the experiment's mesh, also with microbatches, a mesh per other axis, and --cases random ones."""
  experiment, values = bench.source.base.experiment, bench.source.values
  names, rules = experiment.mesh_axis_names, experiment.axis_rules
  axes = [axis for axis in names if axis in row_axes(names, rules, experiment.inputs_split_mapping)]
  if not axes or bench.num_devices == 1:
    yield skipped_case('rows', 'uneven rows', 'nothing splits rows')
    return
  without_segments = _why_refused(bench, without_segments=True) is None
  if not without_segments and (reason := _why_refused(bench, without_segments=False)):
    yield skipped_case('rows', 'uneven rows', f'the model or the loss does not accept a batch of 3 rows: {reason}')
    return
  stage = stage_axis(names, rules)
  data = next((axis for axis in reversed(axes) if axis not in (stage, 'context')), axes[-1])
  half = max(bench.num_devices // 2, 1)
  two_axes: list[Mesh] = [_in_order(names, {axis: 2, data: half}) for axis in names if axis != data]
  counts = (1, 3) if _MICROBATCHES in values else (1,)
  rng = np.random.default_rng((bench.seed, 40))
  random = itertools.islice(random_meshes(bench, [bench.num_devices]), bench.num_random_meshes)
  own = _in_order(names, dict(bench.own_mesh))
  meshes = [(own, count) for count in counts] + [(mesh, 1) for mesh in two_axes]
  meshes += [(_in_order(names, dict(mesh)), int(rng.choice(counts))) for mesh in random]
  for mesh, num_microbatches in dict.fromkeys(meshes):
    case = _row_case(bench, mesh, num_microbatches, without_segments)
    with contextlib.suppress(UserError):  # the experiment refuses this mesh
      build_job(bench.source, case.settings[1])
      yield case


def _row_case(bench: Bench, mesh: Mesh, num_microbatches: int, without_segments: bool) -> Case:
  """Returns the case of a mesh: several microbatches of one row each, or one batch of a few rows."""
  source, experiment = bench.source, bench.source.base.experiment
  names, rules = experiment.mesh_axis_names, experiment.axis_rules
  sizes, stage = dict(mesh), stage_axis(names, rules)
  num_stages = sizes.get(stage, 1) if stage else 1
  batch_axes = row_axes(names, [rule for rule in rules if rule[0] != 'seq'], experiment.inputs_split_mapping) - {stage}
  token_axes = row_axes(names, [rule for rule in rules if rule[0] == 'seq'])
  num_shards = num_parts([axis for axis in batch_axes if axis in sizes], sizes)
  num_rows = num_microbatches if num_microbatches > 1 else 3 if num_shards != 3 else 4
  common = overrides_for_few_rows(source, is_pipeline=num_stages > 1)
  if num_stages > 1:
    paths = source.paths_of(PipelinedStack)
    num_rows *= int(source.values[f'{paths[0]}.num_microbatches']) if paths else num_stages
  overrides = common.overrides
  if _MICROBATCHES in source.values:
    overrides += (f'{_MICROBATCHES}={num_microbatches}',)
  spec = source.base.train_input.element_spec()
  length = max((leaf.shape[1] for leaf in spec.values() if len(leaf.shape) > 1), default=0)
  num_columns = length - 1 if any(sizes.get(axis, 1) > 1 for axis in token_axes) else None
  resize = ResizeBatches(num_rows=num_rows, num_columns=num_columns, without_segments=without_segments)
  setting = Setting(mesh=mesh, overrides=overrides, change=resize)
  subject = f'{num_rows} rows' + (f' in {num_microbatches} microbatches' if num_microbatches > 1 else '')
  subject += f' of {num_columns} tokens' if num_columns else ''
  reference = dataclasses.replace(setting, mesh=())
  return agreement_case('rows', setting, reference, subject=f'{subject}, {setting}', remark=common.remark)


def _in_order(names: Sequence[str], sizes: Mapping[str, int]) -> Mesh:
  return tuple((name, sizes[name]) for name in names if sizes.get(name, 1) > 1)


def _why_refused(bench: Bench, *, without_segments: bool) -> str | None:
  """Returns the error of the model or the loss for a batch of 3 rows; None if there is none."""
  overrides = overrides_for_few_rows(bench.source, is_pipeline=False).overrides
  resize = ResizeBatches(num_rows=3, without_segments=without_segments)
  try:
    Runner(bench.source, Setting(overrides=overrides, change=resize)).model.train_step.lower()
  except Exception as error:  # a user's model may raise anything
    return f'{type(error).__name__}: {(str(error).splitlines() or ["no message"])[0]}'
  return None
