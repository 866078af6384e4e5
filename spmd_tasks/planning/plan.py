"""Plan: what a run will need and cost on a target, found by compiling it there.

plan = make_plan(job, parse_target('v5p:4x4x2'))
plan.fits
json.dumps(plan.to_json())          # plan.json
print(format_plan(plan.to_json()))
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
import math
from typing import Any

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job, partition_job
from spmd_tasks.planning.compiling import STEPS, compile_step
from spmd_tasks.planning.pipeline import pipeline_report
from spmd_tasks.planning.step_plan import StepPlan, plan_step
from spmd_tasks.planning.targets import Target, target_of
from spmd_tasks.planning.weights import WeightRow, weight_rows
from spmd_tasks.runtime import model_flops_per_train_step

_COMPILER_PACKAGES = {'tpu': 'libtpu', 'gpu': 'jax-cuda13-plugin', 'cpu': 'jaxlib'}
_JAX_SHARE = 0.75  # of a GPU's memory, which JAX takes as it starts: docs.jax.dev, "GPU memory allocation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A job on a target.

  Attributes:
    experiment: its name.
    target: the chips.
    mesh: size of each axis.
    dcn_mesh: how much of each size lies across slices; None: one slice.
    num_params: of the model, without padding.
    tokens_per_step: positions of a training batch.
    model_flops: of a training step on all devices together; rematerialisation and padding are not counted.
    steps: by name, in the order in which they were asked for; the first one's figures are the plan's.
    weights: a row per weight, the largest first.
    pipeline: stages, microbatches, schedule, ticks and bubble; None without a pipeline.
    notes: what a reader must know, such as that another compiler was used.
    suggestions: changes of the settings that fit, as they were found.
  """

  experiment: str
  target: Target
  mesh: dict[str, int]
  dcn_mesh: dict[str, int] | None
  num_params: int
  tokens_per_step: int
  model_flops: int
  steps: dict[str, StepPlan]
  weights: list[WeightRow]
  pipeline: dict[str, Any] | None
  notes: tuple[str, ...] = ()
  suggestions: tuple[dict[str, Any], ...] = ()

  @property
  def first(self) -> StepPlan:
    """The step that the plan's own figures are of."""
    return next(iter(self.steps.values()))

  @property
  def fits(self) -> bool | None:
    """Whether every step fits; None where the device's memory is not known."""
    answers = [step.fits for step in self.steps.values()]
    return False if False in answers else None if None in answers else True

  @property
  def peak_bytes(self) -> int:
    """The memory that one device needs for the largest step."""
    return max(step.peak_bytes for step in self.steps.values())

  def to_json(self) -> dict[str, Any]:
    """The plan as plan.json has it; docs/planning.md lists the keys."""
    chip, first = self.target.chip, self.first.to_json()
    return {
      'experiment': self.experiment,
      'target': self.target.name,
      'num_devices': self.target.num_devices,
      'num_slices': self.target.num_slices,
      'compiler': self.target.compiler,
      'chip': chip.name,
      'chip_figures': dataclasses.asdict(chip),
      'mesh': self.mesh,
      'dcn_mesh': self.dcn_mesh,
      'num_params': self.num_params,
      'tokens_per_step': self.tokens_per_step,
      'model_flops': self.model_flops,
      'step': next(iter(self.steps)),
      **first,
      'fits': self.fits,
      'steps': {name: step.to_json() for name, step in self.steps.items()},
      'weights': [row.to_json() for row in self.weights],
      'pipeline': self.pipeline,
      'notes': list(self.notes),
      'suggestions': list(self.suggestions),
      'versions': _versions(self.target),
    }


def make_plan(job: Job, target: Target, *, steps: Sequence[str] = ('train',), show_progress: bool = True) -> Plan:
  """Partitions a job over a target and compiles its steps there.

  Args:
    job: the built experiment.
    target: the chips; their number must be that of the mesh.
    steps: names in STEPS, without repetition.
    show_progress: whether to write a line on stderr while the compiler works.

  Raises:
    UserError: the mesh needs another number of chips, or a split or a step is impossible.
  """
  if unknown := [step for step in steps if step not in STEPS]:
    raise UserError(f'--plan_steps names {unknown[0]!r}, which is no step: choose from {", ".join(STEPS)}.')
  if not steps or len(set(steps)) < len(steps):
    raise UserError(f'--plan_steps {",".join(steps)!r} must name each step once: choose from {", ".join(STEPS)}.')
  check_num_devices(job.experiment, target)
  mesh = job.experiment.mesh_spec().build(target.devices())
  model = partition_job(job, mesh)
  num_tokens = max(math.prod(spec.shape[:2]) for spec in model.input_layout.spec.values())
  model_flops = model_flops_per_train_step(
    job.task, model.input_layout.spec, model.abstract_state.variables, model.weight_specs
  )
  planned = {}
  dcn_shape = job.experiment.dcn_mesh_shape
  for step in steps:
    compilation = compile_step(job, model, step, target, show_progress=show_progress)
    trained = {'num_tokens': num_tokens, 'model_flops': model_flops} if step == 'train' else {}
    num_slices = math.prod(dcn_shape or (1,))
    planned[step] = plan_step(compilation, model, target, num_slices=num_slices, **trained)
  return Plan(
    experiment=job.name,
    target=target,
    mesh=dict(mesh.shape),
    dcn_mesh=None if dcn_shape is None else dict(zip(mesh.axis_names, dcn_shape)),
    num_params=model.total_num_params,
    tokens_per_step=num_tokens,
    model_flops=model_flops,
    steps=planned,
    weights=weight_rows(model),
    pipeline=pipeline_report(job, model),
    notes=_notes(target, planned),
  )


def _notes(target: Target, planned: Mapping[str, StepPlan]) -> tuple[str, ...]:
  notes = [] if target.note is None else [target.note]
  needed, available = max(step.peak_bytes for step in planned.values()), target.chip.hbm_bytes
  if target.compiler == 'gpu' and available and _JAX_SHARE * available < needed <= available:
    notes.append(
      f"JAX takes {_JAX_SHARE:.0%} of a GPU's memory and this needs {needed / available:.0%}: run it with the "
      'environment variable XLA_CLIENT_MEM_FRACTION=0.95.'
    )
  return tuple(notes)


def mesh_devices(experiment: Experiment) -> int | None:
  """Returns the number of devices that the experiment's mesh needs; None where a size is -1 (all that are left)."""
  if -1 in experiment.ici_mesh_shape:
    return None
  return math.prod(experiment.ici_mesh_shape) * math.prod(experiment.dcn_mesh_shape or (1,))


def check_num_devices(experiment: Experiment, target: Target) -> None:
  """Raises a UserError if the target has not the chips, or not the slices, that the mesh is for."""
  wanted, num_slices = mesh_devices(experiment), math.prod(experiment.dcn_mesh_shape or (1,))
  mesh = f'ici_mesh_shape {experiment.ici_mesh_shape}'
  if experiment.dcn_mesh_shape is not None:
    mesh += f' x dcn_mesh_shape {experiment.dcn_mesh_shape}'
  if wanted is not None and wanted != target.num_devices:
    other = target_of(target.chip, wanted, num_slices)
    remedy = f'take --target {other!r}, or ' if other else ''
    raise UserError(
      f'target {target.name!r} has {target.num_devices:,} chips but {mesh} needs {wanted:,}: {remedy}set '
      f'--ici_mesh_shape to {len(experiment.ici_mesh_shape)} sizes for these.'
    )
  if target.chip.platform == 'tpu' and num_slices != target.num_slices:
    other = target_of(target.chip, target.num_devices, num_slices)
    remedy = f'take --target {other!r}, or ' if other else ''
    raise UserError(
      f'target {target.name!r} has {target.num_slices} slice(s) but {mesh} is for {num_slices}: {remedy}set '
      f'--dcn_mesh_shape to sizes whose product is {target.num_slices}.'
    )


def _versions(target: Target) -> dict[str, str]:
  package = _COMPILER_PACKAGES[target.compiler]
  try:
    compiler = importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # a CUDA plugin of another major version
    compiler = 'unknown'
  return {'jax': jax.__version__, package: compiler}
