"""The products of a grouped matmul and of its gradients, by Pallas kernels for NVIDIA GPUs, compiled by Triton.

They read rows and matrices in place: nothing is transposed, padded or cleared first. Both operands of each
product go through shared memory, four steps ahead.

Shapes: R rows, E groups (experts), K in, N out.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from spmd_tasks.sharding.specs import current_device, current_platform


class _Tile(NamedTuple):
  """The `rows` x `columns` of a result that one program computes, and how: `num_bytes` of a row per step."""

  rows: int
  columns: int
  num_bytes: int = 64
  num_warps: int = 4


_LEAST, _TILE = 16, _Tile(128, 128)
_WIDE_TILE = _Tile(128, 256, num_bytes=128, num_warps=8)  # for wgmma: 0 to 30% faster than _TILE on an H200


@jax.custom_vjp
def multiply_by_triton(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul` by kernels for GPUs, which are interpreted elsewhere, slowly, for tests."""
  return grouped_product(rows, weights, group_sizes)


def _multiply_backward(saved: Any, d_results: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  rows, weights, group_sizes = saved
  d_weights = weight_gradients(rows, d_results, group_sizes, weights.dtype)
  return grouped_product(d_results, weights, group_sizes, is_transposed=True), d_weights, None


multiply_by_triton.defvjp(lambda *operands: (multiply_by_triton(*operands), operands), _multiply_backward)


def grouped_product(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, is_transposed: bool = False
) -> jax.Array:
  """Returns [R, N], in the rows' dtype: each row times its group's matrix. Rows after the last group get no result.

  Args:
    rows: [R, K], sorted by group.
    weights: [E, K, N], or [E, N, K] with `is_transposed`.
    group_sizes: int32 [E].
  """
  num_rows, (num_groups, *shape) = rows.shape[0], weights.shape
  num_out = shape[0 if is_transposed else 1]
  is_wide = getattr(current_device(), 'compute_capability', None) == '9.0' and num_rows >= _WIDE_TILE.rows * num_groups
  tile = _tile(num_rows // num_groups, num_out, _WIDE_TILE if is_wide else _TILE)
  ends, counts = jnp.cumsum(group_sizes, dtype=jnp.int32), -(-group_sizes // tile.rows)
  block_ends, num_blocks = jnp.cumsum(counts), pl.cdiv(num_rows, tile.rows) + num_groups - 1
  blocks = jnp.arange(num_blocks, dtype=jnp.int32)
  groups = jnp.sum(block_ends[None, :] <= blocks[:, None], axis=1, dtype=jnp.int32)  # E for a block of no rows
  clipped = jnp.minimum(groups, num_groups - 1)
  firsts = ends[clipped] - group_sizes[clipped] + (blocks - block_ends[clipped] + counts[clipped]) * tile.rows
  bounds = jnp.stack([firsts, jnp.where(groups < num_groups, ends[clipped], firsts)])
  return _call(
    functools.partial(_product, is_transposed=is_transposed),
    tile,
    (pl.cdiv(num_out, tile.columns), num_blocks),
    (rows, weights, clipped, bounds),
    jax.ShapeDtypeStruct((num_rows, num_out), rows.dtype),
    name='grouped_matmul',
  )


def weight_gradients(rows: jax.Array, d_results: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
  """Returns [E, K, N]: for each group the sum over its rows [R, K] of the products row^T d_result [R, N]."""
  shape = len(group_sizes), rows.shape[1], d_results.shape[1]
  tile = _tile(shape[1], shape[2], _TILE)
  bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])
  return _call(
    _outer_products,
    tile,
    (pl.cdiv(shape[2], tile.columns), pl.cdiv(shape[1], tile.rows), shape[0]),
    (rows, d_results, bounds),
    jax.ShapeDtypeStruct(shape, dtype),
    name='grouped_matmul_of_weights',
  )


def _tile(num_rows: int, num_columns: int, most: _Tile) -> _Tile:
  """Returns `most` with fewer rows and columns for a smaller result."""
  fit = lambda size, limit: max(_LEAST, min(limit, pl.next_power_of_2(max(size, 1))))
  return most._replace(rows=fit(num_rows, most.rows), columns=fit(num_columns, most.columns))


def _call(
  kernel: Any, tile: _Tile, grid: tuple[int, ...], operands: Sequence[jax.Array], out: Any, *, name: str
) -> jax.Array:
  whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
  return pl.pallas_call(
    functools.partial(kernel, tile=tile),
    grid=grid,
    in_specs=[*map(whole, operands)],
    out_specs=whole(out),
    out_shape=out,
    compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=4),
    interpret=current_platform() != 'gpu',
    name=name,
  )(*operands)


def _product(rows_ref, weights_ref, groups_ref, bounds_ref, result_ref, *, tile, is_transposed) -> None:
  """Computes one tile of the results."""
  block = pl.program_id(1)
  group, first, end = groups_ref[block], bounds_ref[0, block], bounds_ref[1, block]
  rows, columns = pl.ds(first, tile.rows), pl.ds(pl.program_id(0) * tile.columns, tile.columns)
  is_row, is_column = first + jnp.arange(tile.rows) < end, _in_bounds(columns, result_ref.shape[1])
  size, num_in = _step_size(tile, rows_ref, weights_ref), rows_ref.shape[1]

  def add_columns(i, total):
    part = pl.ds(i * size, size)
    is_part = _in_bounds(part, num_in)
    read = functools.partial(_load, fills=is_part is not None)
    x = read(rows_ref.at[rows, part], is_row, is_part)
    if is_transposed:
      return _add_product(total, x, read(weights_ref.at[group, columns, part], is_column, is_part).T)
    return _add_product(total, x, read(weights_ref.at[group, part, columns], is_part, is_column))

  num_steps = (first < end).astype(jnp.int32) * pl.cdiv(num_in, size)
  total = jax.lax.fori_loop(0, num_steps, add_columns, jnp.zeros(tile[:2], jnp.float32))
  _store(result_ref.at[rows, columns], total, is_row, is_column)


def _outer_products(rows_ref, d_results_ref, bounds_ref, result_ref, *, tile) -> None:
  """Computes one tile of a group's gradient."""
  group = pl.program_id(2)
  begin, end = bounds_ref[group], bounds_ref[group + 1]
  slices = [pl.ds(pl.program_id(1 - dim) * size, size) for dim, size in enumerate(tile[:2])]
  masks = [_in_bounds(positions, size) for positions, size in zip(slices, result_ref.shape[1:], strict=True)]
  size = _step_size(tile, rows_ref, d_results_ref)

  def add_rows(first, is_own, total):
    rows = pl.ds(first, size)
    read = functools.partial(_load, fills=is_own is not None)
    operands = zip((rows_ref, d_results_ref), slices, masks, strict=True)
    x, y = (read(ref.at[rows, columns], is_own, mask) for ref, columns, mask in operands)
    return _add_product(total, x.T, y)

  num_whole = (end - begin) // size
  add_whole = lambda i, total: add_rows(begin + i * size, None, total)
  total = jax.lax.fori_loop(0, num_whole, add_whole, jnp.zeros(tile[:2], jnp.float32))
  last = begin + num_whole * size
  total = add_rows(last, last + jnp.arange(size) < end, total)
  _store(result_ref.at[group, slices[0], slices[1]], total, *masks)


def _step_size(tile: _Tile, *operands: Any) -> int:
  """Returns how many entries of the contracted dim are multiplied per step."""
  return tile.num_bytes // max(ref.dtype.itemsize for ref in operands)


def _in_bounds(positions: Any, size: int) -> jax.Array | None:
  """Returns the mask of a slice's positions within a dim of `size`; None if every slice lies within it."""
  return None if size % positions.size == 0 else positions.start + jnp.arange(positions.size) < size


def _mask(shape: Sequence[int], of_rows: jax.Array | None, of_columns: jax.Array | None) -> jax.Array | None:
  masks = [] if of_rows is None else [of_rows[:, None]]
  masks += [] if of_columns is None else [of_columns[None, :]]
  return functools.reduce(jnp.logical_and, [jnp.broadcast_to(mask, shape) for mask in masks]) if masks else None


def _load(ref: Any, of_rows: jax.Array | None, of_columns: jax.Array | None, *, fills: bool) -> jax.Array:
  """Reads the entries in the masks; the others are 0 if `fills`, else undefined, for results that are not stored."""
  return pltriton.load(ref, mask=_mask(ref.shape, of_rows, of_columns), other=0.0 if fills else None)


def _store(ref: Any, x: jax.Array, of_rows: jax.Array | None, of_columns: jax.Array | None) -> None:
  pltriton.store(ref, x.astype(ref.dtype), mask=_mask(x.shape, of_rows, of_columns))


def _add_product(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  dtype = jnp.promote_types(x.dtype, y.dtype)  # Triton multiplies equal dtypes only
  x, y = x.astype(dtype), y.astype(dtype)
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return total + jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
