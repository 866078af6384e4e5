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
from jax.sharding import Mesh

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job, partition_job
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.planning.collectives import Collective, collectives, slice_of_device
from spmd_tasks.planning.compiling import STEPS, Compilation, compile_step
from spmd_tasks.planning.memory import LiveBuffer, memory_parts
from spmd_tasks.planning.program import read_program
from spmd_tasks.planning.targets import Target, target_of
from spmd_tasks.planning.time import TimePrediction, predict_time
from spmd_tasks.planning.weights import WeightRow, weight_rows
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.flops import model_flops_per_train_step
from spmd_tasks.runtime.parameter_table import bytes_per_device
from spmd_tasks.sharding.specs import stage_axis

_COMPILER_PACKAGES = {'tpu': 'libtpu', 'gpu': 'jax-cuda13-plugin', 'cpu': 'jaxlib'}
_JAX_SHARE = 0.75  # of a GPU's memory, which JAX takes as it starts: docs.jax.dev, "GPU memory allocation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """One step on one device of the target; bytes are one device's.

  Attributes:
    compilation: the compiled program, or the refusal.
    fits: whether one device has the memory; None where its memory is not known.
    hbm_bytes: what the chip has; None on a CPU.
    peak_bytes: what the step needs at its peak, the program included: the compiler's figure.
    argument_bytes, output_bytes, alias_bytes, temp_bytes, program_bytes: the compiler's own figures. A TPU's
      temporaries count more than is held at once.
    memory: bytes by what holds them; they add up to `peak_bytes` within a few percent.
    padding_bytes: how much of the state is padding.
    largest: the arrays that take most at the peak.
    compiler_flops: as the compiler counts them, loop bodies once; None where it does not say.
    collectives: in the program's order.
    time: the predicted time; None where the step was refused.
  """

  compilation: Compilation
  fits: bool | None
  hbm_bytes: int | None
  peak_bytes: int
  argument_bytes: int
  output_bytes: int = 0
  alias_bytes: int = 0
  temp_bytes: int
  program_bytes: int = 0
  memory: Mapping[str, int]
  padding_bytes: int = 0
  largest: Sequence[LiveBuffer] = ()
  compiler_flops: float | None = None
  collectives: Sequence[Collective] = ()
  time: TimePrediction | None = None

  def to_json(self) -> dict[str, Any]:
    """The step's part of plan.json."""
    refused, time = self.compilation.out_of_memory, self.time
    own = [field.name for field in dataclasses.fields(self) if field.name not in ('compilation', 'time')]
    roofline = dataclasses.asdict(time.roofline) if time else {}
    return {
      **{name: getattr(self, name) for name in own},
      'memory': dict(self.memory),
      'largest': [_buffer_json(each) for each in self.largest],
      'collectives': [_collective_json(each) for each in self.collectives],
      'out_of_memory': refused
      and {
        'needed_bytes': refused.needed_bytes,
        'available_bytes': refused.available_bytes,
        'message': refused.message.splitlines()[0],
      },
      'predicted_step_s': time and time.seconds,
      'predicted_step_low_s': time and time.low_s,
      'predicted_step_high_s': time and time.high_s,
      'predicted_mfu': time and time.mfu,
      'tokens_per_s_per_chip': time and time.tokens_per_second_per_chip,
      'hidden_s': time and time.hidden_s,
      'roofline': time and {**roofline, 'compute_s': roofline.pop('flops_s'), 'seconds': time.roofline.seconds},
      'time_by_kind': dict(time.by_kind) if time else {},
      'top_operations': [dataclasses.asdict(each) for each in time.top] if time else [],
      'assumptions': list(time.assumptions) if time else [],
      'compile_seconds': round(self.compilation.compile_seconds, 1),
      'trace_seconds': round(self.compilation.trace_seconds, 1),
    }


def _buffer_json(buffer: LiveBuffer) -> dict[str, Any]:
  fields = dataclasses.asdict(buffer)
  return {**fields, 'shape': list(buffer.shape), 'bytes': fields.pop('num_bytes')}


def _collective_json(collective: Collective) -> dict[str, Any]:
  names = [field.name for field in dataclasses.fields(collective) if field.name not in ('group', 'start', 'end')]
  return {name: getattr(collective, name) for name in names}


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
      'compiler': chip.platform,
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


def plan_step(
  compilation: Compilation,
  model: PartitionedModel,
  target: Target,
  *,
  num_slices: int = 1,
  num_tokens: int | None = None,
  model_flops: float | None = None,
) -> StepPlan:
  """Reads what the compiler says of one step.

  Args:
    compilation: of the step.
    model: whose step it is.
    target: the chips.
    num_slices: of the mesh, for fake devices, which do not know their slice.
    num_tokens, model_flops: of the step on all devices together; None where they have no meaning.
  """
  if compilation.out_of_memory is not None:
    return _refused(compilation, model)
  assert isinstance(model.mesh, Mesh)
  analysis = compilation.program.memory_analysis()
  program = read_program(compilation.program)
  parts = memory_parts(analysis, program, model)
  slice_size = target.num_devices // num_slices
  slice_of = slice_of_device if target.chip.platform != 'cpu' else lambda device: device.id // slice_size
  found = collectives(program, model.mesh, slice_of)
  hbm_bytes = target.chip.hbm_bytes
  is_checked = target.chip.platform == 'tpu'  # their compiler refuses what does not fit
  return StepPlan(
    compilation=compilation,
    fits=None if hbm_bytes is None else is_checked or parts.compiler_bytes <= hbm_bytes,
    hbm_bytes=hbm_bytes,
    peak_bytes=parts.compiler_bytes,
    argument_bytes=analysis.argument_size_in_bytes,
    output_bytes=analysis.output_size_in_bytes,
    alias_bytes=analysis.alias_size_in_bytes,
    temp_bytes=analysis.temp_size_in_bytes,
    program_bytes=analysis.generated_code_size_in_bytes,
    memory=parts.parts(),
    padding_bytes=parts.padding,
    largest=parts.largest,
    compiler_flops=_flops(compilation.program),
    collectives=found,
    time=predict_time(program, found, target.chip, model.mesh, model_flops=model_flops, num_tokens=num_tokens),
  )


def _refused(compilation: Compilation, model: PartitionedModel) -> StepPlan:
  """The plan of a refused step: its state by shapes and shardings, and the rest of what the compiler needs."""
  state, refused = model.padded_state, compilation.out_of_memory
  assert refused is not None
  held = {'weights': bytes_per_device(state.weights)}
  if compilation.step == 'train':
    held |= {
      'optimizer': bytes_per_device(state.learner),
      'other_state': bytes_per_device((state.step, state.rng, state.non_trainable)),
      'batch': bytes_per_device(model.input_layout.padded),
    }
  arguments = sum(held.values())
  temporaries = max(0, refused.needed_bytes - (0 if refused.is_temporaries else arguments))
  return StepPlan(
    compilation=compilation,
    fits=False,
    hbm_bytes=refused.available_bytes,
    peak_bytes=arguments + temporaries,
    argument_bytes=arguments,
    temp_bytes=temporaries,
    memory=held | {'temporaries': temporaries},
    padding_bytes=round(held['weights'] * model.padding_waste),
  )


def _flops(program: Any) -> float | None:
  """Returns the compiler's count of FLOPs, None where it has none (GPU)."""
  costs = program.cost_analysis()
  costs = costs[0] if isinstance(costs, list) and costs else costs
  return None if not costs else costs.get('flops')


def _notes(target: Target, planned: Mapping[str, StepPlan]) -> tuple[str, ...]:
  needed, available = max(step.peak_bytes for step in planned.values()), target.chip.hbm_bytes
  if target.chip.platform == 'gpu' and available and _JAX_SHARE * available < needed <= available:
    return (
      f"JAX takes {_JAX_SHARE:.0%} of a GPU's memory and this needs {needed / available:.0%}: run it with the "
      'environment variable XLA_CLIENT_MEM_FRACTION=0.95.',
    )
  return ()


def mesh_devices(experiment: Experiment) -> int | None:
  """Returns the number of devices that the experiment's mesh needs; None where a size is -1 (all that are left)."""
  if -1 in experiment.ici_mesh_shape:
    return None
  return math.prod(experiment.ici_mesh_shape) * math.prod(experiment.dcn_mesh_shape or (1,))


def check_num_devices(experiment: Experiment, target: Target) -> None:
  """Raises a UserError if the target has not the chips, or not the slices, that the mesh is for."""
  num_slices = math.prod(experiment.dcn_mesh_shape or (1,))
  wanted = mesh_devices(experiment) or target.num_devices
  mesh = f'ici_mesh_shape {experiment.ici_mesh_shape}'
  if experiment.dcn_mesh_shape is not None:
    mesh += f' x dcn_mesh_shape {experiment.dcn_mesh_shape}'
  other = target_of(target.chip, wanted, num_slices)
  remedy = f'take --target {other!r}, or ' if other else ''
  if wanted != target.num_devices:
    raise UserError(
      f'target {target.name!r} has {target.num_devices:,} chips but {mesh} needs {wanted:,}: {remedy}set '
      f'--ici_mesh_shape to {len(experiment.ici_mesh_shape)} sizes for these.'
    )
  if target.chip.platform == 'tpu' and num_slices != target.num_slices:
    raise UserError(
      f'target {target.name!r} has {target.num_slices} slice(s) but {mesh} is for {num_slices}: {remedy}set '
      f'--dcn_mesh_shape to sizes whose product is {target.num_slices}.'
    )


def _versions(target: Target) -> dict[str, str]:
  package = _COMPILER_PACKAGES[target.chip.platform]
  try:
    compiler = importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # a CUDA plugin of another major version
    compiler = 'unknown'
  return {'jax': jax.__version__, package: compiler}


def pipeline_report(job: Job, model: PartitionedModel) -> dict[str, Any] | None:
  """Returns `pipeline` of plan.json; None if the model has no pipeline on this mesh.

  `ticks` are what each stage processes in each tick: `F3` is the forward pass of microbatch 3, `B3` its backward pass,
  `F3.1` the forward pass in repeat 1 of a circular pipeline, None a bubble.
  """
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
