"""The claims about layouts: meshes, pipelines, microbatches and uneven rows change no number.

Some numbers depend on how a batch is cut into microbatches, and the guides say so: dropout draws a mask for each
microbatch of a pipeline; the learner's microbatches are balanced each by itself, cut groups of an expert's capacity
anew, and weigh what routers report by their tokens. A claim that compares with another cut turns these off on both
sides (`TurnedOff`) and says so.
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
from spmd_tasks.verification._by_hand import why_not_by_hand
from spmd_tasks.verification._cases import Bench, Case, Verdict, agreement, skipped
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Cut, Mesh, Setting, Source, build_job, draw_meshes

# Fields of the model, and the value that makes each independent of microbatches.
_RANDOM = {'dropout_rate': 0.0, 'jitter_eps': 0.0}
_OF_GROUPS = {'group_size': None, 'load_balance_shards': 1}
_AUX_WEIGHTS = 'task.loss.aux_loss_weights'
# What the loss of a language model reports of tokens; all else is reported by layers.
_OF_TOKENS = ('loss', 'loss_weight', 'loss_by_source', 'loss_weight_by_source', 'cross_entropy', 'accuracy', 'z_loss')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnedOff:
  """Overrides by which two cuts into microbatches agree, and the metrics that then do, None for all."""

  overrides: tuple[str, ...]
  metrics: tuple[str, ...] | None = None

  @property
  def remark(self) -> str | None:
    """A phrase for the report; None if nothing is turned off."""
    parts = [f'with {" ".join(self.overrides)} on both sides'] if self.overrides else []
    parts += ['without the metrics that layers report'] if self.metrics is not None else []
    return ', '.join(parts) + ': they depend on microbatches' if parts else None


def for_a_pipeline(source: Source) -> TurnedOff:
  """Returns what to turn off to compare a pipeline with layers in sequence."""
  return TurnedOff(overrides=_turn_off(source, _RANDOM))


def for_few_rows(source: Source, *, is_pipeline: bool) -> TurnedOff:
  """Returns what to turn off where a batch gets other rows, which groups and shards of it may not divide."""
  return TurnedOff(overrides=_turn_off(source, _OF_GROUPS | (_RANDOM if is_pipeline else {})))


def for_accumulation(source: Source) -> TurnedOff:
  """Returns what to turn off to compare the learner's microbatches with the full batch."""
  overrides = _turn_off(source, _RANDOM | _OF_GROUPS)
  weights = source.values.get(_AUX_WEIGHTS)
  aux = weights.get('dict', {}) if isinstance(weights, Mapping) else {}
  overrides += tuple(f'{_AUX_WEIGHTS}.{name}=0' for name, weight in aux.items() if weight)
  has_routers = bool(source.paths_ending('load_balance_shards'))
  return TurnedOff(overrides=overrides, metrics=_OF_TOKENS if aux or has_routers else None)


def _turn_off(source: Source, off: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(
    f'{path}={value}'
    for field, value in off.items()
    for path in source.paths_ending(field)
    if source.values[path] != value
  )


_MAX_TRIES = 40


def mesh_cases(bench: Bench) -> Iterator[Case]:
  """Yields the experiment's own mesh, two others of all devices, an uneven one, and those of --cases."""
  if Setting(mesh=bench.own_mesh).num_devices == 1:
    yield skipped('mesh', "the experiment's mesh", 'it is one device')
  else:
    yield _mesh_case(bench, bench.own_mesh)
  uneven = [n for n in (3, 6, 5, 7) if n <= bench.num_devices] or [bench.num_devices]
  any_size = np.random.default_rng((bench.seed, 12)).permutation(range(2, max(bench.num_devices, 2) + 1)).tolist()
  seen = {bench.own_mesh}
  for sizes, wanted in (([bench.num_devices], 2), (uneven, 1), (any_size, bench.num_drawn)):
    for mesh in itertools.islice(drawn_meshes(bench, sizes), wanted + len(seen)):
      if wanted and mesh not in seen:
        seen.add(mesh)
        wanted -= 1
        yield _mesh_case(bench, mesh)


def _mesh_case(bench: Bench, mesh: Mesh) -> Case:
  """Returns the case that a mesh gives the numbers of one device; of the same pipeline, where masks depend on it."""
  experiment = bench.source.base.experiment
  axis = stage_axis(experiment.mesh_axis_names, experiment.axis_rules)
  setting = Setting(mesh=mesh)
  if axis is not None and dict(mesh)[axis] > 1 and for_a_pipeline(bench.source).overrides:
    pipeline = Setting(mesh=((axis, dict(mesh)[axis]),))
    return agreement('mesh', setting, pipeline, subject=f'{setting} against {pipeline}')
  return agreement('mesh', setting, Setting())


def other_mesh(bench: Bench) -> Mesh:
  """Returns a mesh that is not the experiment's, one of `mesh_cases`; one device if there is no other."""
  meshes = itertools.islice(drawn_meshes(bench, [bench.num_devices]), 2)
  return next((mesh for mesh in meshes if mesh != bench.own_mesh), ())


def drawn_meshes(bench: Bench, sizes: list[int]) -> Iterator[Mesh]:
  """Yields random meshes that the experiment takes, always the same ones, of the next of `sizes` devices each."""
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
  """Yields a case for each schedule, of a model with a pipeline."""
  job, values = bench.source.base, bench.source.values
  paths = bench.source.paths_of(PipelinedStack)
  axis = stage_axis(job.experiment.mesh_axis_names, job.experiment.axis_rules)
  if not paths or axis is None:
    yield skipped('pipeline', 'any schedule', 'the model has no pipeline, or the mesh no axis for its stages')
    return
  num_layers, num_microbatches = (int(values[f'{paths[0]}.{name}']) for name in ('num_layers', 'num_microbatches'))
  turned_off = for_a_pipeline(bench.source)
  reference = Setting(overrides=turned_off.overrides)
  for schedule in SCHEDULES:
    mesh = _pipeline_mesh(bench, schedule, axis, num_microbatches)
    if mesh is None:
      reason = f'{num_microbatches} microbatches are no multiple of 2 stages, or there is one device'
      yield skipped('pipeline', schedule, reason)
      continue
    num_repeats = next(n for n in (2, 3, num_layers) if num_layers % n == 0) if schedule == 'circular' else 1
    own = [f'{path}.{name}' for path in paths for name in (f'schedule={schedule}', f'num_repeats={num_repeats}')]
    setting = Setting(mesh=mesh, overrides=(*reference.overrides, *own))
    yield agreement('pipeline', setting, reference, subject=f'{schedule}, {setting}', remark=turned_off.remark)


def _pipeline_mesh(bench: Bench, schedule: ScheduleName, axis: str, num_microbatches: int) -> Mesh | None:
  """Returns the experiment's mesh if it has stages; else one that is drawn for the schedule, or None if none fits."""
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
  """Yields the case that the learner's microbatches give the gradient of the full batch, and that of each by hand.

  By hand, with all that depends on microbatches: aux losses count once a step, dropout has a mask for each.
  """
  job, values = bench.source.base, bench.source.values
  path, subject = 'task.learner.num_microbatches', 'microbatches of the learner'
  batch_size, now = job.train_input.batch_size, values.get(path)
  found = _accumulation(bench, batch_size) if now == 1 else (bench.own_mesh, 1)
  if now is None or found is None:
    reason = f'{path} cannot be set' if now is None else f'neither 4 nor 2 fit the batch of {batch_size} rows'
    yield skipped('microbatches', subject, reason)
    return
  mesh, count = found
  yield _microbatches_by_hand(bench, mesh, count)
  if values.get('task.learner.accumulation') == 'sum':
    yield skipped('microbatches', subject, "accumulation 'sum' adds means, as it should")
    return
  turned_off = for_accumulation(bench.source)
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
      return Verdict(status='skipped', detail=f'{", ".join(kept)} are statistics of a batch')
    return case.decide(bench)

  yield dataclasses.replace(case, decide=decide)


def _microbatches_by_hand(bench: Bench, mesh: Mesh, count: int) -> Case:
  """Returns the case that microbatches on a mesh give what those by hand do."""
  if reason := why_not_by_hand(bench.source.base.task):
    return skipped('microbatches', 'each by hand', reason)
  axis = stage_axis(bench.source.base.experiment.mesh_axis_names, bench.source.base.experiment.axis_rules)
  if for_a_pipeline(bench.source).overrides:  # masks depend on the microbatches of a pipeline too
    mesh = tuple((name, 1 if name == axis else size) for name, size in mesh)
  overrides = (f'{_MICROBATCHES}={count}',)
  setting, reference = Setting(mesh=mesh, overrides=overrides), Setting(overrides=overrides, by_hand=True)
  return agreement('microbatches', setting, reference, subject=f'{count} against each by hand, {setting}')


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


_MICROBATCHES = 'task.learner.num_microbatches'


def row_cases(bench: Bench) -> Iterator[Case]:
  """Yields the own mesh, without and with microbatches, a mesh beside every axis, and those of --cases."""
  experiment, values = bench.source.base.experiment, bench.source.values
  names, rules = experiment.mesh_axis_names, experiment.axis_rules
  axes = [axis for axis in names if axis in row_axes(names, rules, experiment.inputs_split_mapping)]
  if not axes or bench.num_devices == 1:
    yield skipped('rows', 'uneven rows', 'nothing splits rows')
    return
  is_bare = _refusal(bench, is_bare=True) is None
  if not is_bare and (refusal := _refusal(bench, is_bare=False)):
    yield skipped('rows', 'uneven rows', f'the model or the loss does not take a batch of 3 rows: {refusal}')
    return
  stage = stage_axis(names, rules)
  data = next((axis for axis in reversed(axes) if axis not in (stage, 'context')), axes[-1])
  half = max(bench.num_devices // 2, 1)
  beside: list[Mesh] = [_in_order(names, {axis: 2, data: half}) for axis in names if axis != data]
  counts = (1, 3) if _MICROBATCHES in values else (1,)
  rng = np.random.default_rng((bench.seed, 40))
  drawn = itertools.islice(drawn_meshes(bench, [bench.num_devices]), bench.num_drawn)
  own = _in_order(names, dict(bench.own_mesh))
  wanted = [(own, count) for count in counts] + [(mesh, 1) for mesh in beside]
  wanted += [(_in_order(names, dict(mesh)), int(rng.choice(counts))) for mesh in drawn]
  for mesh, num_microbatches in dict.fromkeys(wanted):
    case = _row_case(bench, mesh, num_microbatches, is_bare)
    with contextlib.suppress(UserError):  # the experiment refuses this mesh
      build_job(bench.source, case.settings[1])
      yield case


def _row_case(bench: Bench, mesh: Mesh, num_microbatches: int, is_bare: bool) -> Case:
  """Returns the case of a mesh: one row in each of several microbatches of the learner, or a few rows at once."""
  source, experiment = bench.source, bench.source.base.experiment
  names, rules = experiment.mesh_axis_names, experiment.axis_rules
  sizes, own_stage = dict(mesh), stage_axis(names, rules)
  stages = sizes.get(own_stage, 1) if own_stage else 1
  rows = row_axes(names, [rule for rule in rules if rule[0] != 'seq'], experiment.inputs_split_mapping) - {own_stage}
  tokens = row_axes(names, [rule for rule in rules if rule[0] == 'seq'])
  parts = num_parts([axis for axis in rows if axis in sizes], sizes)
  num_rows = num_microbatches if num_microbatches > 1 else 3 if parts != 3 else 4
  turned_off = for_few_rows(source, is_pipeline=stages > 1)
  if stages > 1:
    paths = source.paths_of(PipelinedStack)
    num_rows *= int(source.values[f'{paths[0]}.num_microbatches']) if paths else stages
  overrides = turned_off.overrides
  if _MICROBATCHES in source.values:
    overrides += (f'{_MICROBATCHES}={num_microbatches}',)
  spec = source.base.train_input.element_spec()
  length = max((leaf.shape[1] for leaf in spec.values() if len(leaf.shape) > 1), default=0)
  num_columns = length - 1 if any(sizes.get(axis, 1) > 1 for axis in tokens) else None
  cut = Cut(num_rows=num_rows, num_columns=num_columns, is_bare=is_bare)
  setting = Setting(mesh=mesh, overrides=overrides, change=cut)
  subject = f'{num_rows} rows' + (f' in {num_microbatches} microbatches' if num_microbatches > 1 else '')
  subject += f' of {num_columns} tokens' if num_columns else ''
  reference = dataclasses.replace(setting, mesh=())
  return agreement('rows', setting, reference, subject=f'{subject}, {setting}', remark=turned_off.remark)


def _in_order(names: Sequence[str], sizes: Mapping[str, int]) -> Mesh:
  return tuple((name, sizes[name]) for name in names if sizes.get(name, 1) > 1)


def _refusal(bench: Bench, *, is_bare: bool) -> str | None:
  """Returns why model or loss do not take a batch of 3 rows, with or without what marks padding; None if they do."""
  overrides = for_few_rows(bench.source, is_pipeline=False).overrides
  try:
    Runner(bench.source, Setting(overrides=overrides, change=Cut(num_rows=3, is_bare=is_bare))).model.train_step.lower()
  except Exception as error:  # of a user's model, of any kind
    return f'{type(error).__name__}: {(str(error).splitlines() or ["no message"])[0]}'
  return None
