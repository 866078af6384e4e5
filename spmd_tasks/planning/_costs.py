"""Estimates how long one instruction of a compiled program takes on a chip, and says on what the estimate rests.

For TPUs the compiler notes its own estimate in cycles. Everything else is a roofline: the larger of the time for the
FLOPs at the chip's peak and the time for the bytes at its memory's bandwidth. Kernels (custom calls) get a share of the
peak, `KERNEL_EFFICIENCY`; what an attention kernel multiplies is known from its name and the shapes of its operands.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Literal

from spmd_tasks.planning._hlo_text import Shape
from spmd_tasks.planning._instructions import UNKNOWN_CYCLES, Computation, Instruction
from spmd_tasks.planning._products import fusion_flops
from spmd_tasks.planning._traffic import hbm_bytes
from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.scheduled_program import ScheduledProgram

KERNEL_EFFICIENCY = 0.6  # of peak FLOP/s; published attention and grouped-matmul kernels reach 0.5 to 0.75

Basis = Literal['cycles', 'roofline', 'kernel']

_CONTROL = frozenset({'while', 'conditional', 'call', 'async-start', 'async-update', 'async-done'})
# Custom calls that only tell the compiler something.
_MARKERS = re.compile('AllocateBuffer|Sharding|SetBound|Bitcast|annotate|Assume|X64|AsyncCollective|Pin|Barrier')
# Attention kernels: how many products of queries with keys (or the like) they compute.
_ATTENTION_PRODUCTS = (
  (re.compile(r'splash\w*dkv'), 4),
  (re.compile(r'splash\w*dq'), 3),
  (re.compile(r'splash'), 2),
  (re.compile(r'fmha\w*[bB]ackward'), 5),
  (re.compile(r'fmha'), 2),
)
CAUSAL_SHARE = 0.5  # of the products of all queries with all keys, that attention kernels do not skip


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one execution of an instruction costs.

  Attributes:
    seconds: how long it takes.
    flops: of products inside of it.
    hbm_bytes: read and written in the device's main memory.
    basis: 'cycles' of the compiler; 'roofline'; 'kernel': FLOPs at an assumed efficiency.
    is_known: whether that is an estimate; if not, the bytes of a kernel count, or nothing.
  """

  seconds: float
  flops: float
  hbm_bytes: float
  basis: Basis
  is_known: bool = True


_NO_COST = Cost(0, 0, 0, 'roofline')


def instruction_cost(
  program: ScheduledProgram,
  instruction: Instruction,
  computation: Computation,
  chip: Chip,
  kernel_flops: Mapping[str, float],
) -> Cost:
  """Returns the cost of one execution, without that of other computations that a loop, a call or a branch runs.

  Args:
    program, instruction, computation: where the instruction is.
    chip: its figures.
    kernel_flops: part of a custom call's op_name or target -> FLOPs of one execution on one device.
  """
  if instruction.opcode in _CONTROL:
    return _NO_COST
  basis: Basis = 'roofline'
  flops = fusion_flops(program, instruction, computation)
  moved = hbm_bytes(program, instruction, computation)
  if instruction.opcode == 'custom-call':
    if _MARKERS.search(instruction.custom_call_target):
      return _NO_COST
    flops = _kernel_flops(instruction, computation, kernel_flops) or flops
    basis = 'kernel' if flops or instruction.custom_call_target == 'tpu_custom_call' else 'roofline'
  cycles = instruction.estimated_cycles
  if cycles == UNKNOWN_CYCLES:
    return Cost(0, flops, moved, 'cycles', is_known=False)
  if cycles and chip.clock_hz:
    return Cost(cycles / chip.clock_hz, flops, moved, 'cycles')
  seconds = 0.0
  if chip.peak_flops and chip.hbm_bandwidth:
    efficiency = KERNEL_EFFICIENCY if basis == 'kernel' else 1
    seconds = max(flops / (chip.peak_flops * efficiency), moved / chip.hbm_bandwidth)
  return Cost(seconds, flops, moved, basis, is_known=basis != 'kernel' or flops > 0)


def _kernel_flops(instruction: Instruction, computation: Computation, stated: Mapping[str, float]) -> float:
  """The FLOPs of a kernel: as the caller or the kernel's author states them, or those of attention."""
  text = f'{instruction.op_name} {instruction.custom_call_target} {instruction.name}'
  for name, flops in stated.items():
    if name in text:
      return flops
  for pattern, num_products in _ATTENTION_PRODUCTS:
    if pattern.search(text):
      shapes = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
      return num_products * CAUSAL_SHARE * _attention_product(shapes)
  found = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.tail)
  return float(found[1]) if found else 0


def _attention_product(shapes: list[Shape]) -> float:
  """FLOPs of all queries times all keys: 2 * (all of a query's dims) * (length of a key).

  The first two operands of floating-point type and three or four dims are queries and keys [..., T, K].
  """
  arrays = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype in ('bf16', 'f16', 'f32')]
  if len(arrays) < 2:
    return 0
  query, key = arrays[:2]
  return 2.0 * query.size * key.dims[-2]
