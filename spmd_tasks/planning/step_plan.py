"""StepPlan: what one compiled step needs and costs, read from its program.

A step that the compiler refused has its state's bytes and the refusal, and no program to read anything else from.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from jax.sharding import Mesh

from spmd_tasks.planning.collectives import Collective, collectives, slice_of_device
from spmd_tasks.planning.compiling import Compilation
from spmd_tasks.planning.memory import LiveBuffer, memory_parts
from spmd_tasks.planning.program import read_program
from spmd_tasks.planning.targets import Target
from spmd_tasks.planning.time import TimePrediction, predict_time
from spmd_tasks.runtime import PartitionedModel, bytes_per_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """One step on one device of the target; bytes are one device's.

  Attributes:
    compilation: the compiled program, or the refusal.
    is_checked: whether the compiler refuses what does not fit, as that of TPUs does.
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
  is_checked: bool
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

  @property
  def fits(self) -> bool | None:
    """Whether one device has the memory; None where its memory is not known."""
    if self.compilation.out_of_memory is not None:
      return False
    if self.hbm_bytes is None:
      return None
    return self.is_checked or self.peak_bytes <= self.hbm_bytes

  def to_json(self) -> dict[str, Any]:
    """The step's part of plan.json."""
    refused = self.compilation.out_of_memory
    names = ('hbm', 'peak', 'argument', 'output', 'alias', 'temp', 'program', 'padding')
    return {
      'fits': self.fits,
      **{f'{name}_bytes': getattr(self, f'{name}_bytes') for name in names},
      'out_of_memory': refused
      and {
        'needed_bytes': refused.needed_bytes,
        'available_bytes': refused.available_bytes,
        'message': refused.message.splitlines()[0],
      },
      'memory': dict(self.memory),
      'largest': [_buffer_json(each) for each in self.largest],
      'compiler_flops': self.compiler_flops,
      'collectives': [_collective_json(each) for each in self.collectives],
      **_time_json(self.time),
      'compile_seconds': round(self.compilation.compile_seconds, 1),
      'trace_seconds': round(self.compilation.trace_seconds, 1),
    }


def _buffer_json(buffer: LiveBuffer) -> dict[str, Any]:
  fields = dataclasses.asdict(buffer)
  return {**fields, 'shape': list(buffer.shape), 'bytes': fields.pop('num_bytes')}


def _collective_json(collective: Collective) -> dict[str, Any]:
  names = [field.name for field in dataclasses.fields(collective) if field.name not in ('group', 'start', 'end')]
  fields = {name: getattr(collective, name) for name in names}
  return {**fields, 'axes': list(collective.axes), 'shape': list(collective.shape)}


def _time_json(time: TimePrediction | None) -> dict[str, Any]:
  if time is None:
    names = ('predicted_step_s', 'predicted_mfu', 'tokens_per_s_per_chip', 'roofline')
    return {**dict.fromkeys(names), 'top_operations': [], 'time_by_kind': {}, 'assumptions': []}
  roofline = dataclasses.asdict(time.roofline)
  return {
    'predicted_step_s': time.seconds,
    'predicted_step_low_s': time.low_s,
    'predicted_step_high_s': time.high_s,
    'predicted_mfu': time.mfu,
    'tokens_per_s_per_chip': time.tokens_per_second_per_chip,
    'hidden_s': time.hidden_s,
    'roofline': {**roofline, 'compute_s': roofline.pop('flops_s'), 'seconds': time.roofline.seconds},
    'time_by_kind': dict(time.by_kind),
    'top_operations': [dataclasses.asdict(each) for each in time.top],
    'assumptions': list(time.assumptions),
  }


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
  slice_of = slice_of_device if target.compiler != 'cpu' else lambda device: device.id // slice_size
  found = collectives(program, model.mesh, slice_of)
  return StepPlan(
    compilation=compilation,
    is_checked=target.compiler == 'tpu',
    hbm_bytes=target.chip.hbm_bytes,
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
    is_checked=True,
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
