"""Counts the FLOPs of matrix products and convolutions in a compiled program, two per multiply-add.

Compilers write products in several forms: `dot`; `convolution`, into which the TPU compiler turns every product, batch
dims as dilated windows; and calls of libraries (cuBLAS, oneDNN, Eigen). Each is counted from its shapes. Positions of a
convolution's window that fall on padding or between dilated elements are not multiplied, and not counted.
"""

from collections.abc import Mapping
import math
import re

from spmd_tasks.planning._hlo_text import Shape
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_WINDOW = re.compile(r'(\w+)=([\w\-]+)')
_GEMM_TARGETS = ('gemm', 'matmul', 'dot')


def program_flops(program: ScheduledProgram) -> float:
  """Returns the FLOPs of one device in one execution of the program: products and convolutions, loops counted."""
  return sum(
    step.count * instruction_flops(step.instruction, step.computation) for step in program.steps(inside_fusions=True)
  )


def fusion_flops(program: ScheduledProgram, instruction: Instruction, computation: Computation) -> float:
  """Returns the FLOPs of one instruction, with all that it fuses."""
  fused = program.graph.called(instruction) if instruction.opcode == 'fusion' else None
  if fused is None:
    return instruction_flops(instruction, computation)
  return sum(fusion_flops(program, each, fused) for each in fused.instructions)


def instruction_flops(instruction: Instruction, computation: Computation) -> float:
  """Returns the FLOPs of a product, a convolution or a library's product; 0 for every other instruction."""
  if instruction.opcode not in ('dot', 'convolution', 'custom-call'):
    return 0
  shapes = [computation.by_name[name].shape for name in instruction.operands[:2] if name in computation.by_name]
  if len(shapes) < 2:
    return 0
  attributes = instruction.attributes
  if instruction.opcode == 'dot':
    return 2 * instruction.shape.size * _contracted(shapes[0], attributes.get('lhs_contracting_dims', '{}'))
  if instruction.opcode == 'convolution':
    return _convolution_flops(shapes[0], shapes[1], instruction.shape, attributes)
  if any(name in instruction.custom_call_target for name in _GEMM_TARGETS):
    return _library_flops(instruction, shapes[0])
  return 0


def _contracted(lhs: Shape, dims: str) -> int:
  return math.prod(lhs.dims[int(dim)] for dim in re.findall(r'\d+', dims) if int(dim) < len(lhs.dims))


def _library_flops(instruction: Instruction, lhs: Shape) -> float:
  config = instruction.backend_config
  config = config.get('gemm_backend_config', config)
  numbers = config.get('dot_dimension_numbers', {}) if isinstance(config, Mapping) else {}
  dims = [int(dim) for dim in numbers.get('lhs_contracting_dimensions', ())]
  output = next(instruction.shape.leaves(), None)
  if output is None or not lhs.dims:
    return 0
  contracted = math.prod(lhs.dims[dim] for dim in dims if dim < len(lhs.dims)) if dims else lhs.dims[-1]
  return 2 * output.size * contracted


def _convolution_flops(lhs: Shape, rhs: Shape, output: Shape, attributes: Mapping[str, str]) -> float:
  labels = re.fullmatch(r'(\w+)_(\w+)->(\w+)', attributes.get('dim_labels', ''))
  if not labels:
    return 0
  lhs_labels, rhs_labels, out_labels = labels.groups()
  window = dict(_WINDOW.findall(attributes.get('window', '')))
  pairs = 1
  for label in sorted(set(out_labels) - {'b', 'f'}):
    number = int(label)
    pairs *= _window_pairs(
      lhs=lhs.dims[lhs_labels.index(label)],
      kernel=rhs.dims[rhs_labels.index(label)],
      output=output.dims[out_labels.index(label)],
      stride=_window_number(window, 'stride', number),
      pad=int(window['pad'].split('x')[number].split('_')[0]) if 'pad' in window else 0,
      lhs_dilate=_window_number(window, 'lhs_dilate', number),
      rhs_dilate=_window_number(window, 'rhs_dilate', number),
    )
  batch, features = output.dims[out_labels.index('b')], output.dims[out_labels.index('f')]
  return 2 * batch * features * rhs.dims[rhs_labels.index('i')] * pairs


def _window_number(window: Mapping[str, str], name: str, dim: int) -> int:
  return int(window[name].split('x')[dim]) if name in window else 1


def _window_pairs(
  *, lhs: int, kernel: int, output: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
  """Counts pairs (output position o, kernel position k) that meet an element of the left side.

  The position is o * stride + k * rhs_dilate - pad. It meets one if it is a multiple of lhs_dilate, from 0 to below
  lhs * lhs_dilate.
  """
  divisor = math.gcd(stride, lhs_dilate)
  period = lhs_dilate // divisor  # positions that are multiples of lhs_dilate come once every `period` outputs
  inverse = pow(stride // divisor, -1, period) if period > 1 else 0
  count = 0
  for position in range(kernel):
    start = position * rhs_dilate - pad
    if start % divisor:
      continue
    low = max(0, -(start // stride))  # the first output whose position is not negative
    high = min(output - 1, (lhs_dilate * (lhs - 1) - start) // stride)
    if high < low:
      continue
    first = (-(start // divisor) * inverse) % period
    first += -(-(low - first) // period) * period if low > first else 0
    count += max(0, (high - first) // period + 1) if first <= high else 0
  return count
