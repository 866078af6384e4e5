"""The claim that rows which the mesh does not divide change no number: those of a batch, or of a microbatch."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding import num_parts, row_axes, stage_axis
from spmd_tasks.verification._batches import CutInput
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case, agreement, not_applicable
from spmd_tasks.verification._layouts import Mesh
from spmd_tasks.verification._mesh_claims import drawn_meshes
from spmd_tasks.verification._promises import for_few_rows
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Setting, build_job
from spmd_tasks.verification._stack_claims import STAGE, AsPipeline, plain_stack

_MICROBATCHES = 'task.learner.num_microbatches'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """Gives the training batches other rows, and perhaps a pipeline; a change of a Setting. Fields: see CutInput."""

  num_rows: int
  num_columns: int | None = None
  is_bare: bool = False
  pipeline: AsPipeline | None = None

  def __call__(self, job: Job, sizes: Mapping[str, int]) -> Job:
    cut = CutInput(job.train_input, num_rows=self.num_rows, num_columns=self.num_columns, is_bare=self.is_bare)
    job = dataclasses.replace(job, train_input=cut)
    return job if self.pipeline is None else self.pipeline(job, sizes)


def row_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the own mesh, without and with microbatches, a mesh beside every axis, and `num_more` drawn ones."""
  experiment, values = bench.source.base.experiment, bench.source.values
  names, rules = experiment.mesh_axis_names, experiment.axis_rules
  axes = [axis for axis in names if axis in row_axes(names, rules, experiment.inputs_split_mapping)]
  is_bare = next((bare for bare in (True, False) if _can_run(bench, bare)), None)
  if not axes or is_bare is None or bench.num_devices == 1:
    reason = 'nothing splits rows' if is_bare is not None else 'the model takes batches of one size'
    yield not_applicable('rows', 'uneven rows', reason)
    return
  stage = stage_axis(names, rules)
  data = next((axis for axis in reversed(axes) if axis not in (stage, 'context')), axes[-1])
  half = max(bench.num_devices // 2, 1)
  beside: list[Mesh] = [_in_order(names, {axis: 2, data: half}) for axis in names if axis != data]
  with contextlib.suppress(UserError):
    plain_stack(bench.source.base.task.model)
    beside.append(((STAGE, 2), (data, half)))
  counts = (1, 3) if _MICROBATCHES in values else (1,)
  rng = np.random.default_rng((bench.seed, 40))
  drawn = itertools.islice(drawn_meshes(bench, [bench.num_devices]), num_more)
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
  stages = sizes.get(own_stage or STAGE, 1)
  rows = row_axes(names, [rule for rule in rules if rule[0] != 'seq'], experiment.inputs_split_mapping) - {own_stage}
  tokens = row_axes(names, [rule for rule in rules if rule[0] == 'seq'])
  parts = num_parts([axis for axis in rows if axis in sizes], sizes)
  num_rows = num_microbatches if num_microbatches > 1 else 3 if parts != 3 else 4
  turned_off, pipeline = for_few_rows(source, is_pipeline=stages > 1), None
  if stages > 1:
    paths = source.paths_of(PipelinedStack)
    num_rows *= int(source.values[f'{paths[0]}.num_microbatches']) if paths else stages
    if not paths:
      pipeline = AsPipeline(schedule='gpipe', num_microbatches=stages, num_repeats=1)
  overrides = turned_off.overrides
  if _MICROBATCHES in source.values:
    overrides += (f'{_MICROBATCHES}={num_microbatches}',)
  spec = source.base.train_input.element_spec()
  length = max((leaf.shape[1] for leaf in spec.values() if len(leaf.shape) > 1), default=0)
  num_columns = length - 1 if any(sizes.get(axis, 1) > 1 for axis in tokens) else None
  cut = Cut(num_rows=num_rows, num_columns=num_columns, is_bare=is_bare)
  setting = Setting(mesh=mesh, overrides=overrides, change=dataclasses.replace(cut, pipeline=pipeline))
  subject = f'{num_rows} rows' + (f' in {num_microbatches} microbatches' if num_microbatches > 1 else '')
  subject += f' of {num_columns} tokens' if num_columns else ''
  reference = dataclasses.replace(setting, mesh=(), change=cut)
  return agreement('rows', setting, reference, subject=f'{subject}, {setting}', remark=turned_off.remark)


def _in_order(names: Sequence[str], sizes: Mapping[str, int]) -> Mesh:
  return tuple((name, sizes[name]) for name in names if sizes.get(name, 1) > 1)


def _can_run(bench: Bench, is_bare: bool) -> bool:
  """Whether model and loss take a batch of three rows, with or without what marks padding, on one device."""
  overrides = for_few_rows(bench.source, is_pipeline=False).overrides
  try:
    Runner(bench.source, Setting(overrides=overrides, change=Cut(num_rows=3, is_bare=is_bare))).model.train_step.lower()
  except Exception:  # of a user's model, of any kind
    return False
  return True
