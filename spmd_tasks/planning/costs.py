"""Estimates how long one instruction of a compiled program takes on a chip, and says on what the estimate rests.

For TPUs the compiler notes its own estimate in cycles. Everything else is a roofline: the larger of the time for the
FLOPs at the chip's peak and the time for the bytes at its memory's bandwidth. Kernels (custom calls) get the share of
the peak that rates.toml has for `attention` or, for all others, `grouped` products; what an attention kernel multiplies
is known from its name and the shapes of its operands. Rows that SparseCores gather or copy to another layout, of which
the compiler estimates nothing, count as kernels too: their bytes at the rate `gather`, as if nothing ran beside them.

Every product of attention has a side as short as a head. Where a TPU's matrix units are wider than a head, a part of
them has nothing to do: heads of 128 fill half of a v6e's. A published profile of a v6e agrees, see chips.py.

Compilers write products in several forms: `dot`; `convolution`, into which the TPU compiler turns every product, batch
dims as dilated windows; and calls of libraries (cuBLAS, oneDNN, Eigen). Each is counted from its shapes, two FLOPs per
multiply-add. Positions of a convolution's window that fall on padding or between dilated elements are not counted.

A fusion reads its operands and writes its results; nothing in between goes through memory. Where it only looks up or
changes a slice of an operand, only the slice moves: loops over stacked layers do little else with their stacks. Arrays
in other memories than HBM (a TPU's vector memory) are not counted.
"""

import dataclasses
import math
import re

from spmd_tasks.planning.chips import Chip, rate_of
from spmd_tasks.planning.hlo import UNKNOWN_CYCLES, Computation, Instruction, Shape, nested

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
# Our grouped matmuls on GPUs: the gradient of weights, and all others.
_GROUPED = re.compile(r'\bgrouped_matmul(_of_weights)?\b')
_PAGED_ATTENTION = re.compile(r'\bpaged_attention\b')  # our kernel for GPUs
CAUSAL_SHARE = 0.5  # of the products of all queries with all keys, that attention kernels do not skip
_GEMM_TARGETS = ('gemm', 'matmul', 'dot')
_NO_TRAFFIC = frozenset({
  'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'while', 'conditional', 'call', 'after-all',
  'partition-id', 'replica-id', 'iota', 'opt-barrier', 'optimization-barrier', 'async-start', 'async-update',
})  # fmt: skip
_SLICES = frozenset({'slice', 'dynamic-slice', 'gather'})
# What changes its first operand in place -> which operand has the new values.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
_VIEWS = frozenset({'bitcast', 'get-tuple-element'})


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one execution of an instruction.

  Attributes:
    seconds: how long it takes.
    flops: of products inside of it.
    at_peak: seconds of these products at the chip's peak for the type of their operands.
    hbm_bytes: read and written in the device's main memory.
    basis: 'cycles' of the compiler; 'roofline'; 'kernel': FLOPs at an assumed efficiency.
    is_known: whether that is an estimate; if not, the bytes of a kernel count, or nothing.
  """

  seconds: float
  flops: float
  hbm_bytes: float
  basis: str
  is_known: bool = True
  at_peak: float = 0.0


_NO_COST = Cost(0, 0, 0, 'roofline')


def instruction_cost(instruction: Instruction, chip: Chip) -> Cost:
  """Returns the cost of one execution, without that of other computations that a loop, a call or a branch runs."""
  if instruction.opcode in _CONTROL:
    return _NO_COST
  basis = 'roofline'
  by_type, moved, efficiency = flops_by_type(instruction), hbm_bytes(instruction), 1.0
  if instruction.opcode == 'custom-call':
    if _MARKERS.search(instruction.target):
      return _NO_COST
    attention = _attention(instruction)
    if attention is not None:
      by_type, head_dim = {'bf16': attention[0]}, attention[1]
      efficiency = filled_part(head_dim, chip.mxu_size) * rate_of(chip, 'attention').value
    else:
      stated = nested(instruction.backend_config, 'custom_call_config', 'cost_estimate') or {}
      if of_kernel := float(stated.get('flops') or 0) or _grouped_flops(instruction):
        by_type = {'bf16': of_kernel}
      if 'triton' in instruction.target and _PAGED_ATTENTION.search(instruction.op_name):
        paged_flops, paged_bytes = _of_pages(instruction)
        by_type, moved = {'bf16': paged_flops}, min(moved, int(paged_bytes))
      efficiency = rate_of(chip, 'grouped').value
    basis = 'kernel' if sum(by_type.values()) or instruction.target == 'tpu_custom_call' else 'roofline'
  flops, cycles = sum(by_type.values()), instruction.estimated_cycles
  peaks = ((count, chip.peak_of(dtype)) for dtype, count in by_type.items())
  at_peak = sum(count / peak for count, peak in peaks if peak)
  if cycles == UNKNOWN_CYCLES:
    inside = (instruction,) if instruction.fused is None else instruction.fused.instructions
    rows = sum(2 * each.shape.stored_bytes for each in inside if each.opcode in ('gather', 'copy'))  # read and written
    if rows and chip.hbm_bandwidth:  # by SparseCores
      return Cost(rows / chip.hbm_bandwidth / rate_of(chip, 'gather').value, flops, rows, 'kernel', at_peak=at_peak)
    return Cost(0, flops, moved, 'cycles', is_known=False, at_peak=at_peak)
  if cycles and chip.clock_hz:  # a few estimates are below: up to 128% of peak
    return Cost(max(cycles / chip.clock_hz, at_peak), flops, moved, 'cycles', at_peak=at_peak)
  seconds = 0.0
  if chip.peak_flops and chip.hbm_bandwidth:
    seconds = max(at_peak / (efficiency if basis == 'kernel' else 1), moved / chip.hbm_bandwidth)
  return Cost(seconds, flops, moved, basis, is_known=basis != 'kernel' or flops > 0, at_peak=at_peak)


def _attention(instruction: Instruction) -> tuple[float, int] | None:
  """The FLOPs of an attention kernel and the size of a head; None of other kernels.

  The first two operands of floating-point type and three or four dims are queries and keys [..., T, K], to cuDNN
  [B, T, H, K]. A product is of all queries with all keys, of which a causal kernel skips a part.
  """
  text = f'{instruction.op_name} {instruction.target} {instruction.name}'
  products = next((count for pattern, count in _ATTENTION_PRODUCTS if pattern.search(text)), None)
  if products is None:
    return None
  shapes = [operand.shape for operand in instruction.operands]
  arrays = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype in ('bf16', 'f16', 'f32')]
  if len(arrays) < 2:
    return 0.0, 0
  query, key = arrays[:2]
  has_partial_sums = any(len(result.dims) > len(query.dims) for result in instruction.shape.leaves())
  if has_partial_sums and _OF_KEYS_AND_VALUES.search(text):  # of the queries' gradients: [blocks of keys, *queries]
    products = _ALL_GRADIENTS
  num_keys = key.dims[-3 if 'fmha' in instruction.target else -2]
  return products * CAUSAL_SHARE * 2.0 * query.size * num_keys, query.dims[-1]


def _grouped_flops(instruction: Instruction) -> float | None:
  """The FLOPs of our grouped matmul for GPUs, as if every row belonged to a group; None of other kernels.

  Rows [R, K] times matrices give [R, N]; rows [R, K] and rows [R, N] give the gradients of matrices, [E, K, N].
  """
  found = _GROUPED.search(instruction.op_name) if 'triton' in instruction.target else None
  if found is None:
    return None
  left, right = (operand.shape for operand in instruction.operands[:2])
  return 2.0 * left.size * (right.dims[-1] if found[1] else instruction.shape.dims[-1])


def _of_pages(instruction: Instruction) -> tuple[float, float]:
  """Returns the FLOPs and the bytes of attention to pages by our kernel for GPUs, for rows that are full."""
  tables, query, *stored = (operand.shape for operand in instruction.operands[2:])
  num_layers, num_blocks, _, block, head_dim = stored[0].dims
  num_rows, table_len = tables.dims
  result = [*instruction.shape.leaves()][-1]
  of_pages = sum(map(_in_hbm, stored))
  read = of_pages / num_layers * min(num_rows * table_len / num_blocks, 1)
  flops = 2.0 * query.size * table_len * block * (1 + result.dims[-1] / head_dim)
  return flops, hbm_bytes(instruction) - of_pages + read


def filled_part(size: int, mxu_size: int | None) -> float:
  """Returns the part of matrix units of `mxu_size` rows that a side of this size fills, such as a head."""
  if not size or not mxu_size:
    return 1.0
  return size / (-(-size // mxu_size) * mxu_size)


def flops_by_type(instruction: Instruction) -> dict[str, float]:
  """Returns the FLOPs of products, convolutions and a library's products, also of those in a fusion, by their type.

  That is the wider one of the product's two operands, such as 'bf16' or 's8'.
  """
  found: dict[str, float] = {}
  for each in [instruction] if instruction.fused is None else instruction.fused.instructions:
    if each.fused is not None:
      inner = flops_by_type(each)
    elif flops := _product_flops(each):
      inner = {max((operand.shape for operand in each.operands[:2]), key=lambda shape: shape.bits).dtype: flops}
    else:
      continue
    for dtype, flops in inner.items():
      found[dtype] = found.get(dtype, 0) + flops
  return found


def _product_flops(instruction: Instruction) -> float:
  if len(instruction.operands) < 2:
    return 0
  lhs, rhs = (operand.shape for operand in instruction.operands[:2])
  match instruction.opcode:
    case 'dot':
      dims = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
      return 2 * instruction.shape.size * math.prod(lhs.dims[dim] for dim in dims)
    case 'convolution':
      return _convolution_flops(lhs, rhs, instruction)
    case 'custom-call' if any(name in instruction.target for name in _GEMM_TARGETS):
      return _library_flops(instruction, lhs)
  return 0


def _library_flops(instruction: Instruction, lhs: Shape) -> float:
  config = instruction.backend_config
  numbers = config.get('gemm_backend_config', config)
  dims = nested(numbers, 'dot_dimension_numbers', 'lhs_contracting_dimensions') or ()
  output = next(instruction.shape.leaves(), None)
  if output is None or not lhs.dims:
    return 0
  return 2 * output.size * (math.prod(lhs.dims[int(dim)] for dim in dims) if dims else lhs.dims[-1])


def _convolution_flops(lhs: Shape, rhs: Shape, instruction: Instruction) -> float:
  numbers, output = instruction.proto.convolution_dimension_numbers, instruction.shape
  pairs = 1
  for window, of_lhs, of_rhs, of_output in zip(
    instruction.proto.window.dimensions,
    numbers.input_spatial_dimensions,
    numbers.kernel_spatial_dimensions,
    numbers.output_spatial_dimensions,
    strict=True,
  ):
    pairs *= _window_pairs(
      lhs=lhs.dims[of_lhs],
      kernel=rhs.dims[of_rhs],
      output=output.dims[of_output],
      stride=window.stride,
      pad=window.padding_low,
      lhs_dilate=window.base_dilation,
      rhs_dilate=window.window_dilation,
    )
  batch, features = (output.dims[dim] for dim in (numbers.output_batch_dimension, numbers.output_feature_dimension))
  return 2 * batch * features * rhs.dims[numbers.kernel_input_feature_dimension] * pairs


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


def hbm_bytes(instruction: Instruction) -> int:
  """Returns the bytes that one execution of an instruction moves; 0 for control flow, views and ends of async pairs."""
  opcode, shapes = instruction.opcode, [operand.shape for operand in instruction.operands]
  if opcode in _NO_TRAFFIC or opcode.endswith('-done'):
    return 0
  if instruction.fused is not None:
    return _fusion_bytes(instruction, instruction.fused)
  if opcode in _SLICES:
    return 2 * _in_hbm(instruction.shape)
  if opcode == 'dynamic-update-slice':
    return 2 * _in_hbm(shapes[1])
  if opcode == 'scatter':  # in place, too: the compiler copies what is to stay
    return _in_hbm(shapes[1]) + 2 * _in_hbm(shapes[2])
  written = _in_hbm(instruction.shape)
  if opcode.endswith('-start'):
    written = _in_hbm(instruction.shape.elements[0]) if instruction.shape.elements else 0
  return written + sum(map(_in_hbm, shapes))


def _fusion_bytes(instruction: Instruction, fused: Computation) -> int:
  def read(value: Instruction, within: Computation) -> int:
    """The bytes read of a value: slices of it if nothing else is taken, none where it is changed in place."""
    total = value.shape.stored_bytes if value is within.root else 0
    for user in within.users.get(value, ()):
      if user.opcode in _SLICES and user.operands[0] is value:
        total += user.shape.stored_bytes
      elif user.opcode in _UPDATES and user.operands[0] is value:
        continue
      elif user.opcode == 'tuple' and user is within.root:
        continue  # handed on as it is
      elif _is_view(user):
        total += read(user, within)
      elif user.opcode == 'convert':
        total += read(user, within) * value.shape.stored_bytes // max(user.shape.stored_bytes, 1)
      elif user.fused:
        inner = zip(user.fused.parameters, user.operands)
        total += sum(read(parameter, user.fused) for parameter, operand in inner if operand is value)
      else:
        return value.shape.stored_bytes
    return min(total, value.shape.stored_bytes)

  operands = zip(fused.parameters, instruction.operands)
  total = sum(read(parameter, fused) for parameter, operand in operands if _in_hbm(operand.shape))
  results = fused.root.operands if fused.root.opcode == 'tuple' else (fused.root,)
  written = zip(results, instruction.shape.leaves())
  return total + sum(_written(result, shape) for result, shape in written if _in_hbm(shape))


def _is_view(inside: Instruction) -> bool:
  """Whether an instruction of a fusion hands on its operand; the TPU's compiler wraps operands in fused copies."""
  copied = inside.fused.root.operands if inside.fused and inside.fused.root.opcode == 'copy' else ()
  return inside.opcode in _VIEWS or any(each.opcode == 'parameter' for each in copied)


def _written(result: Instruction, shape: Shape) -> int:
  while _is_view(result):
    result = result.operands[0]
  if result.opcode == 'parameter':
    return 0
  if result.opcode not in _UPDATES:
    return shape.stored_bytes
  changed = result.operands[0]
  while _is_view(changed):
    changed = changed.operands[0]
  if result.opcode == 'scatter' and changed.opcode != 'parameter':  # of an array that begins as zeros, all is written
    return shape.stored_bytes
  return result.operands[_UPDATES[result.opcode]].shape.stored_bytes


def _in_hbm(shape: Shape) -> int:
  return sum(leaf.stored_bytes for leaf in shape.leaves() if leaf.memory_space == 0)
