"""The backend 'megablox': grouped matmuls by JAX's Pallas kernel for TPUs (MegaBlocks: Gale et al., 2022).

The kernel stops at the end of the last group: the rest of the rows is neither read nor written, and needs no zeros. It
compiles for TPUs on any machine; elsewhere it is interpreted, slowly, for tests.

Shapes: R rows, E groups (experts), K in, N out.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import current_device

_LANES = 128
# Each tile reads and writes the sum in float32: products of few rows, or over few inputs, would wait for it.
_ROWS_OF_TILES = (256, 512, 1024)
_LEAST_SUMMED = 512
_MIB = 2**20
# Three quarters of the vector memory that a kernel gets by default: the rest is for the compiler's temporaries.
_TILE_BYTES = {'TPU v6 lite': 24 * _MIB, 'TPU7x': 24 * _MIB}
_DEFAULT_TILE_BYTES = 12 * _MIB
# Products in bfloat16 in the time in which one byte comes from HBM.
_FLOPS_PER_BYTE = {'TPU v6 lite': 560}
_DEFAULT_FLOPS_PER_BYTE = 310


def multiply_by_megablox(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul`; rows after the last group, and their gradients, are undefined. Refuses GPUs."""
  device = current_device()
  if device.platform not in ('tpu', 'cpu'):
    raise UserError(
      f"backend='megablox' is a kernel for TPUs, and the devices are of the platform {device.platform!r}: choose "
      "'triton', or None for the best."
    )
  num_rows = rows.shape[0]
  padded = _round_up(num_rows, _LANES if num_rows <= _LANES else _ROWS_OF_TILES[0])
  if padded > num_rows:
    rows = jnp.pad(rows, ((0, padded - num_rows), (0, 0)))
  return _multiply(device.device_kind, rows, weights, group_sizes)[:num_rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(kind: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Multiplies by the kernel on a kind of device; R is a multiple of the smallest number of rows in a tile."""
  return _gmm(kind, rows, weights, group_sizes, transpose=False)


def _gmm(kind: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, transpose: bool) -> jax.Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # Pallas takes a second to import

  num_in, num_out = weights.shape[:0:-1] if transpose else weights.shape[1:]
  sizes = rows.shape[0], weights.shape[0], num_in, num_out
  return gmm(
    rows,
    weights,
    group_sizes,
    preferred_element_type=rows.dtype,
    tiling=_best_tile(kind, *sizes, _itemsize(rows, weights), sums_rows=False),
    transpose_rhs=transpose,
    interpret=not kind.startswith('TPU'),
  )


def _multiply_backward(kind, saved, d_result):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  rows, weights, group_sizes = saved
  d_rows = _gmm(kind, d_result, weights, group_sizes, transpose=True)
  d_weights = tgmm(
    rows.swapaxes(0, 1),
    d_result,
    group_sizes,
    preferred_element_type=weights.dtype,
    tiling=_best_tile(kind, rows.shape[0], *weights.shape, _itemsize(rows, weights), sums_rows=True),
    interpret=not kind.startswith('TPU'),
  )
  return d_rows, d_weights, None


_multiply.defvjp(lambda kind, *arguments: (_multiply(kind, *arguments), arguments), _multiply_backward)


@functools.cache
def _best_tile(
  kind: str, num_rows: int, num_groups: int, num_in: int, num_out: int, itemsize: int, *, sums_rows: bool
) -> tuple[int, int, int]:
  """Returns the rows, inputs and outputs of a tile: among the tiles that fit, the fastest by products and bytes.

  A tile is computed once for each group that has rows in it, so tiles of many rows are computed in vain at the borders
  of small groups. Small tiles of inputs and outputs read rows and matrices again and again.

  Args:
    num_rows: R, a multiple of 256, or at most 128 rounded up.
    itemsize: the bytes of an element.
    sums_rows: the product is the gradient of matrices, [E, K, N] from [R, K] and [R, N].
  """
  largest = _TILE_BYTES.get(kind, _DEFAULT_TILE_BYTES)
  per_byte = _FLOPS_PER_BYTE.get(kind, _DEFAULT_FLOPS_PER_BYTE)
  candidates: list[tuple[float, tuple[int, int, int]]] = []
  rows_of_tiles = [rows for rows in _ROWS_OF_TILES if num_rows % rows == 0] or [num_rows]
  for tile in itertools.product(rows_of_tiles, _tile_sizes(num_in), _tile_sizes(num_out)):
    rows, ins, outs = tile
    if not sums_rows and ins < min(num_in, _LEAST_SUMMED):
      continue
    result = ins * outs if sums_rows else rows * outs
    if 2 * itemsize * (rows * ins + ins * outs + rows * outs) + 4 * result > largest:  # all twice; the sum in float32
      continue
    visits = num_rows // rows + num_groups
    steps = -(-num_in // ins) * -(-num_out // outs)  # for each visit
    flops = 2 * visits * steps * rows * ins * outs
    if sums_rows:
      elements = visits * steps * rows * (ins + outs) + num_groups * steps * ins * outs
    elif ins >= num_in:  # rows and matrices stay in vector memory until the next ones are needed
      elements = steps * (num_rows * ins + num_groups * ins * outs + num_rows * outs)
    else:
      elements = visits * steps * (rows * ins + ins * outs) + num_rows * num_out
    of_bytes = elements * itemsize * per_byte
    candidates.append((max(flops, of_bytes) + 0.1 * (flops + of_bytes), tile))
  return min(candidates)[1]


def _tile_sizes(size: int) -> list[int]:
  """Returns multiples of 128 that divide K or N into parts with little padding."""
  return list(dict.fromkeys(_round_up(-(-size // count), _LANES) for count in range(1, -(-size // _LANES) + 1)))


def _itemsize(*arrays: jax.Array) -> int:
  return max(x.dtype.itemsize for x in arrays)


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
