"""StepPlan: what one compiled step needs and costs, read from the compiler.

A step that the compiler refused has its state's bytes and the refusal, and no program to read anything else from.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from spmd_tasks.planning.compiling import Compilation
from spmd_tasks.planning.targets import Target
from spmd_tasks.runtime import PartitionedModel, bytes_per_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """One step on one device of the target; bytes are one device's.

  Attributes:
    compilation: the compiled program, or the refusal.
    is_checked: whether the compiler refuses what does not fit, as that of TPUs does.
    hbm_bytes: what the chip has; None on a CPU.
    peak_bytes: what the step needs at its peak, the program included.
    argument_bytes, output_bytes, alias_bytes, temp_bytes, program_bytes: the compiler's own figures. A TPU's
      temporaries count more than is held at once.
    memory: bytes by what holds them; they add up to `peak_bytes`.
    flops: as the compiler counts them, loop bodies once; None where it does not say.
    assumptions: what the figures rest on, beside the compiler.
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
  flops: float | None = None
  assumptions: tuple[str, ...] = ()

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
    names = ('hbm', 'peak', 'argument', 'output', 'alias', 'temp', 'program')
    return {
      'fits': self.fits,
      **{f'{name}_bytes': getattr(self, f'{name}_bytes') for name in names},
      'out_of_memory': refused
      and {
        'needed_bytes': refused.needed_bytes,
        'available_bytes': refused.available_bytes,
        'message': refused.message,
      },
      'memory': dict(self.memory),
      'flops': self.flops,
      'predicted_step_s': None,
      'predicted_mfu': None,
      'collectives': [],
      'assumptions': list(self.assumptions),
      'compile_seconds': round(self.compilation.compile_seconds, 1),
      'trace_seconds': round(self.compilation.trace_seconds, 1),
    }


def plan_step(compilation: Compilation, model: PartitionedModel, target: Target) -> StepPlan:
  """Reads what the compiler says of one step."""
  held = _held_bytes(model, compilation.step)
  if compilation.out_of_memory is not None:
    refused, arguments = compilation.out_of_memory, sum(held.values())
    temporaries = refused.needed_bytes - (0 if refused.is_temporaries else arguments)
    return StepPlan(
      compilation=compilation,
      is_checked=True,
      hbm_bytes=refused.available_bytes,
      peak_bytes=arguments + temporaries,
      argument_bytes=arguments,
      temp_bytes=temporaries,
      memory=held | {'temporaries': temporaries},
    )
  analysis = compilation.program.memory_analysis()
  arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
  outputs, aliases = analysis.output_size_in_bytes, analysis.alias_size_in_bytes
  program = analysis.generated_code_size_in_bytes
  if target.compiler == 'tpu':
    peak = analysis.peak_memory_in_bytes + program
  else:
    peak = arguments + outputs - aliases + temporaries + program
  rest = {'arguments, rounded up': max(0, arguments - sum(held.values()))} if compilation.step == 'train' else {}
  known = held | rest | {'outputs': outputs - aliases, 'program': program}
  return StepPlan(
    compilation=compilation,
    is_checked=target.compiler == 'tpu',
    hbm_bytes=target.chip.hbm_bytes,
    peak_bytes=peak,
    argument_bytes=arguments,
    output_bytes=outputs,
    alias_bytes=aliases,
    temp_bytes=temporaries,
    program_bytes=program,
    memory=known | {'temporaries': peak - sum(known.values())},
    flops=_flops(compilation.program),
  )


def _held_bytes(model: PartitionedModel, step: str) -> dict[str, int]:
  """Bytes of the step's arguments by kind, from their shapes and shardings."""
  state = model.padded_state
  weights = {'weights': bytes_per_device(state.weights)}
  others = bytes_per_device((state.step, state.rng, state.non_trainable))
  if step != 'train':
    return weights
  return weights | {
    'optimizer': bytes_per_device(state.learner),
    'other_state': others,
    'batch': bytes_per_device(model.input_layout.padded),
  }


def _flops(program: Any) -> float | None:
  """Returns the compiler's count of FLOPs, None where it has none (GPU)."""
  costs = program.cost_analysis()
  costs = costs[0] if isinstance(costs, list) and costs else costs
  return None if not costs else costs.get('flops')
