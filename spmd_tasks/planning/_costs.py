"""Estimates how long one instruction of a compiled program takes on a chip, and says on what the estimate rests.

For TPUs the compiler notes its own estimate in cycles. Everything else is a roofline: the larger of the time for the
FLOPs at the chip's peak and the time for the bytes at its memory's bandwidth. Kernels (custom calls) get a share of the
peak, `KERNEL_EFFICIENCY`; what an attention kernel multiplies is known from its name and the shapes of its operands.

Every product of attention has a side as short as a head. Where a TPU's matrix units are wider than a head, a part of
them has nothing to do: heads of 128 fill half of a v6e's. A published profile of a v6e agrees, see chips.py.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Literal

from spmd_tasks.planning._instructions import UNKNOWN_CYCLES, Computation, Instruction
from spmd_tasks.planning._products import fusion_flops
from spmd_tasks.planning._traffic import hbm_bytes
from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.scheduled_program import ScheduledProgram

# Of peak FLOP/s, or of the filled part of the matrix units; published attention and grouped-matmul kernels reach 0.5 to
# 0.75.
KERNEL_EFFICIENCY = 0.6

Basis = Literal['cycles', 'roofline', 'kernel']

_CONTROL = frozenset({'while', 'conditional', 'call', 'async-start', 'async-update', 'async-done'})
# Custom calls that only tell the compiler something.
_MARKERS = re.compile('AllocateBuffer|Sharding|SetBound|Bitcast|annotate|Assume|X64|AsyncCollective|Pin|Barrier')
# Attention kernels: how many products of queries with keys (or the like) they compute. One kernel for the gradients of
# queries, keys and values has the name of that for keys and values.
_ALL_GRADIENTS = 5
_OF_KEYS_AND_VALUES = re.compile(r'splash\w*dkv')
_ATTENTION_PRODUCTS = (
  (_OF_KEYS_AND_VALUES, 4),
  (re.compile(r'splash\w*dq'), 3),
  (re.compile(r'splash'), 2),
  (re.compile(r'fmha\w*[bB]ackward'), 5),
  (re.compile(r'fmha'), 2),
)
_OF_CUDNN = re.compile(r'fmha')
# Our grouped matmuls on GPUs: the gradient of weights, and all others.
_GROUPED = re.compile(r'\bgrouped_matmul(_of_weights)?\b')
CAUSAL_SHARE = 0.5  # of the products of all queries with all keys, that attention kernels do not skip


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one execution of an instruction.

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
  efficiency = 1.0
  if instruction.opcode == 'custom-call':
    if _MARKERS.search(instruction.custom_call_target):
      return _NO_COST
    attention = None if _stated_flops(instruction, kernel_flops) else _attention(instruction, computation)
    if attention is not None:
      flops, head_dim = attention
      efficiency = _filled(head_dim, chip.mxu_size)
    else:
      flops = _kernel_flops(instruction, kernel_flops) or _grouped_flops(instruction, computation) or flops
    basis = 'kernel' if flops or instruction.custom_call_target == 'tpu_custom_call' else 'roofline'
  cycles = instruction.estimated_cycles
  if cycles == UNKNOWN_CYCLES:
    return Cost(0, flops, moved, 'cycles', is_known=False)
  if cycles and chip.clock_hz:
    at_peak = flops / chip.peak_flops if chip.peak_flops else 0.0  # a few estimates are below: up to 128% of peak
    return Cost(max(cycles / chip.clock_hz, at_peak), flops, moved, 'cycles')
  seconds = 0.0
  if chip.peak_flops and chip.hbm_bandwidth:
    efficiency *= KERNEL_EFFICIENCY if basis == 'kernel' else 1
    seconds = max(flops / (chip.peak_flops * efficiency), moved / chip.hbm_bandwidth)
  return Cost(seconds, flops, moved, basis, is_known=basis != 'kernel' or flops > 0)


def _text(instruction: Instruction) -> str:
  return f'{instruction.op_name} {instruction.custom_call_target} {instruction.name}'


def _stated_flops(instruction: Instruction, stated: Mapping[str, float]) -> float | None:
  """The FLOPs of a kernel as the caller states them."""
  return next((flops for name, flops in stated.items() if name in _text(instruction)), None)


def _kernel_flops(instruction: Instruction, stated: Mapping[str, float]) -> float:
  """The FLOPs of a kernel as the caller or the kernel's author states them; 0 if neither does."""
  given = _stated_flops(instruction, stated)
  if given is not None:
    return given
  found = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.tail)
  return float(found[1]) if found else 0


def _attention(instruction: Instruction, computation: Computation) -> tuple[float, int] | None:
  """The FLOPs of an attention kernel and the size of a head; None of other kernels.

  The first two operands of floating-point type and three or four dims are queries and keys [..., T, K], to cuDNN
  [B, T, H, K]. A product is of all queries with all keys, of which a causal kernel skips a part.
  """
  text = _text(instruction)
  products = next((count for pattern, count in _ATTENTION_PRODUCTS if pattern.search(text)), None)
  if products is None:
    return None
  operands = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
  arrays = [shape for shape in operands if len(shape.dims) >= 3 and shape.dtype in ('bf16', 'f16', 'f32')]
  if len(arrays) < 2:
    return 0.0, 0
  query, key = arrays[:2]
  has_partial_sums = any(len(result.dims) > len(query.dims) for result in instruction.shape.leaves())
  if has_partial_sums and _OF_KEYS_AND_VALUES.search(text):  # of the queries' gradients: [blocks of keys, *queries]
    products = _ALL_GRADIENTS
  num_keys = key.dims[-3 if _OF_CUDNN.search(instruction.custom_call_target) else -2]
  return products * CAUSAL_SHARE * 2.0 * query.size * num_keys, query.dims[-1]


def _grouped_flops(instruction: Instruction, computation: Computation) -> float | None:
  """The FLOPs of our grouped matmul for GPUs, as if every row belonged to a group; None of other kernels.

  Rows [R, K] times matrices give [R, N]; rows [R, K] and rows [R, N] give the gradients of matrices, [E, K, N].
  """
  found = _GROUPED.search(instruction.op_name) if 'triton' in instruction.custom_call_target else None
  if found is None:
    return None
  left, right = (computation.by_name[name].shape for name in instruction.operands[:2])
  return 2.0 * left.size * (right.dims[-1] if found[1] else instruction.shape.dims[-1])


def _filled(head_dim: int, mxu_size: int | None) -> float:
  """The part of a matrix unit of `mxu_size` rows that a head of this size fills."""
  if not head_dim or not mxu_size:
    return 1.0
  return head_dim / (-(-head_dim // mxu_size) * mxu_size)
