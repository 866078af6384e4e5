"""The backend 'megablox': grouped matmuls by JAX's Pallas kernel for TPUs (MegaBlocks: Gale et al., 2022).

The kernel stops at the end of the last group: the rest of the rows is neither read nor written, and needs no zeros. It
compiles for TPUs on any machine; elsewhere it is interpreted, slowly, for tests.

Shapes: R rows, E groups (experts), K in, N out.
"""

import functools

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import current_platform

_LANES = 128
_ROWS_PER_TILE = 512
_LARGEST_TILE = 1024  # of K and N: tiles of this size, twice each, and the sum fit in a TPU core's vector memory


def multiply_by_megablox(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul`; rows after the last group, and their gradients, are undefined. Refuses GPUs."""
  platform = current_platform()
  if platform not in ('tpu', 'cpu'):
    raise UserError(
      f"backend='megablox' is a kernel for TPUs, and the devices are of the platform {platform!r}: choose 'triton', "
      'or None for the best.'
    )
  num_rows, interpret = rows.shape[0], platform != 'tpu'
  tile = min(_ROWS_PER_TILE, _round_up(num_rows, _LANES))
  padded = _round_up(num_rows, tile)
  if padded > num_rows:
    rows = jnp.pad(rows, ((0, padded - num_rows), (0, 0)))
  return _multiply((tile, interpret), rows, weights, group_sizes)[:num_rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(how: tuple[int, bool], rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Multiplies by the kernel. `how`: the number of rows in a tile, which divides R, and whether to interpret it."""
  return _gmm(how, rows, weights, group_sizes, transpose=False)


def _gmm(how: tuple[int, bool], rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, transpose: bool):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # Pallas takes a second to import

  tile, interpret = how
  num_in, num_out = weights.shape[:0:-1] if transpose else weights.shape[1:]
  return gmm(
    rows,
    weights,
    group_sizes,
    preferred_element_type=rows.dtype,
    tiling=(tile, _tile_of(num_in), _tile_of(num_out)),
    transpose_rhs=transpose,
    interpret=interpret,
  )


def _multiply_backward(how, saved, d_result):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  rows, weights, group_sizes = saved
  tile, interpret = how
  d_rows = _gmm(how, d_result, weights, group_sizes, transpose=True)
  d_weights = tgmm(
    rows.swapaxes(0, 1),
    d_result,
    group_sizes,
    preferred_element_type=weights.dtype,
    tiling=(tile, _tile_of(weights.shape[1]), _tile_of(weights.shape[2])),
    interpret=interpret,
  )
  return d_rows, d_weights, None


_multiply.defvjp(lambda how, *arguments: (_multiply(how, *arguments), arguments), _multiply_backward)


def _tile_of(size: int) -> int:
  """Returns the tile size of K or N, a multiple of 128: among the largest ones, the one that pads least."""
  if size <= _LARGEST_TILE:
    return _round_up(size, _LANES)
  tiles = range(_LARGEST_TILE, _LARGEST_TILE // 2, -_LANES)
  return min(tiles, key=lambda tile: (_round_up(size, tile), -tile))


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
