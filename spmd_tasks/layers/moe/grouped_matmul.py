"""Multiplies rows sorted by group, each by its group's matrix (a grouped matmul), with one backend per platform.

Shapes: R rows, E groups (experts), K in, N out; S rows of a block.

The backends share one signature, `backend(rows, weights, group_sizes)`:

  'loop'        block by block, here; for CPUs, and for GPUs for which Triton does not compile.
  'megablox'    JAX's Pallas kernel (_megablox_backend.py); for TPUs.
  'triton'      our Pallas kernels (_grouped_matmul_gpu.py); for GPUs.
  'ragged_dot'  `jax.lax.ragged_dot`, which on CPUs and GPUs multiplies every row by every matrix; for tests and for
                counting FLOPs.
"""

from collections.abc import Callable
import functools
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import KernelCall, current_layer_scope
from spmd_tasks.layers.moe._grouped_matmul_gpu import multiply_by_triton
from spmd_tasks.layers.moe._megablox_backend import multiply_by_megablox
from spmd_tasks.sharding.specs import current_device, current_platform

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_LARGEST_BLOCK = 256
_TRITON_COMPILES = re.compile(r'([89]|\d\d)\.\d')  # for NVIDIA GPUs of these compute capabilities


def multiply_by_ragged_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul` by `jax.lax.ragged_dot`."""
  result = jax.lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)
  return result.astype(rows.dtype)


def multiply_by_loop(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul` for a block of rows of one group at a time; reads no rows after the last group."""
  added = max(_block_size(len(rows), len(group_sizes)) - len(rows), 0)
  padded = jnp.pad(rows, ((0, added), (0, 0))) if added else rows
  return _multiply(*_varying_alike(padded, weights, group_sizes))[: len(rows)]


@jax.custom_vjp
def _multiply(rows, weights, group_sizes):
  def body(group, start, mask, result):
    return _write(result, start, mask, _dot(_read(rows, start, mask), weights[group], 1, 0))

  result = jnp.zeros_like(rows, shape=(rows.shape[0], weights.shape[2]))
  return _for_each_block(rows.shape[0], group_sizes, body, result)


def _multiply_backward(saved, d_result):
  rows, weights, group_sizes = saved

  def body(group, start, mask, carry):
    d_rows, d_weights = carry
    d_block = _read(d_result, start, mask)
    d_rows = _write(d_rows, start, mask, _dot(d_block, weights[group], 1, 1))
    return d_rows, d_weights.at[group].add(_dot(_read(rows, start, mask), d_block, 0, 0))

  carry = jnp.zeros_like(rows), jnp.zeros_like(weights, dtype=jnp.float32)
  d_rows, d_weights = _for_each_block(rows.shape[0], group_sizes, body, carry)
  return d_rows, d_weights.astype(weights.dtype), None


_multiply.defvjp(lambda *arguments: (_multiply(*arguments), arguments), _multiply_backward)


def _for_each_block(num_rows: int, group_sizes: jax.Array, body: Callable[..., Any], carry: Any) -> Any:
  """Runs `carry = body(group, start, mask, carry)` for blocks of S rows, each within one group.

  A block starts at row `start`; `mask`, bool [S, 1], is true for those of its rows that are not another block's.
  """
  size = min(num_rows, _block_size(num_rows, group_sizes.shape[0]))
  ends, counts = jnp.cumsum(group_sizes), -(-group_sizes // size)
  block_ends = jnp.cumsum(counts)

  def step(i, carry):
    group = jnp.sum(block_ends <= i, dtype=jnp.int32)
    end = ends[group]
    first = end - group_sizes[group] + (i - block_ends[group] + counts[group]) * size
    start = jnp.minimum(first, num_rows - size)  # a block does not extend past the last row
    row = start + jnp.arange(size, dtype=jnp.int32)
    return body(group, start, ((row >= first) & (row < jnp.minimum(first + size, end)))[:, None], carry)

  return jax.lax.fori_loop(jnp.zeros_like(block_ends[-1]), block_ends[-1], step, carry)


def _block_size(num_rows: int, num_groups: int) -> int:
  """Returns S: half of the mean group, within limits."""
  return min(num_rows, _LARGEST_BLOCK, max(8, num_rows // (2 * num_groups)))


def _read(x: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the block of x [R, ...], with zeros where the mask is false."""
  return jnp.where(mask, jax.lax.dynamic_slice_in_dim(x, start, mask.shape[0]), 0)


def _write(x: jax.Array, start: jax.Array, mask: jax.Array, block: jax.Array) -> jax.Array:
  """Returns x with the block where the mask is true."""
  old = jax.lax.dynamic_slice_in_dim(x, start, mask.shape[0])
  return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(mask, block.astype(x.dtype), old), start, 0)


def _dot(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
  """Contracts dim `x_dim` of the matrix x with dim `y_dim` of the matrix y, in float32."""
  return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=jnp.float32)


def _varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Casts the arrays to vary over the same mesh axes, which loops inside a `shard_map` with check_vma=True require."""
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
  missing = (tuple(sorted(axes - jax.typeof(x).mat.varying)) for x in arrays)
  return tuple(jax.lax.pcast(x, names, to='varying') if names else x for x, names in zip(arrays, missing))


GROUPED_MATMUL_BACKENDS: dict[str, GroupedMatmul] = {
  'loop': multiply_by_loop,
  'megablox': multiply_by_megablox,
  'triton': multiply_by_triton,
  'ragged_dot': multiply_by_ragged_dot,
}


def grouped_matmul(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, backend: str | None = None
) -> jax.Array:
  """Returns [R, N], in the rows' dtype: each row times its group's matrix, accumulated in float32.

  The results and gradients of rows after the last group are undefined, whatever these rows hold.

  Args:
    rows, weights: [R, K], sorted by group, and [E, K, N].
    group_sizes: int32 [E], rows per group, with a sum of at most R.
    backend: a name in GROUPED_MATMUL_BACKENDS; None for the best on this platform. A UserError if it is unknown.
  """
  name = resolve_backend(backend)
  multiply = GROUPED_MATMUL_BACKENDS[name]
  if (on_kernel := current_layer_scope().on_kernel) is not None:
    on_kernel(KernelCall('grouped_matmul', name, (rows, weights)))
  if not len(rows):
    return (rows @ weights[0]).astype(rows.dtype)
  if multiply is not multiply_by_ragged_dot:  # the others neither read nor write rows after the last group
    return multiply(rows, weights, group_sizes)
  num_used = jnp.sum(group_sizes)
  return clear_rows_from(num_used, multiply(clear_rows_from(num_used, rows), weights, group_sizes))


@jax.custom_vjp
def clear_rows_from(start: jax.Array, rows: jax.Array) -> jax.Array:
  """Zeroes `rows` [R, N] and their gradient from row `start` on. Plain autodiff would save a mask [R, N]."""
  keep = jnp.arange(rows.shape[0], dtype=jnp.int32) < start
  return jnp.where(keep[:, None], rows, jnp.zeros((), rows.dtype))


clear_rows_from.defvjp(
  lambda start, rows: (clear_rows_from(start, rows), start),
  lambda start, d_rows: (None, clear_rows_from(start, d_rows)),
)


def resolve_backend(backend: str | None) -> str:
  """Returns `backend`, or the best on this platform if it is None; 'ragged_dot' while FLOPs are counted."""
  if current_layer_scope().plain_products:
    return 'ragged_dot'
  if backend is None:
    return best_grouped_matmul_backend(current_platform())
  if backend not in GROUPED_MATMUL_BACKENDS:
    raise UserError(f'backend {backend!r} is unknown: choose one of {sorted(GROUPED_MATMUL_BACKENDS)}, or None.')
  return backend


@functools.cache
def best_grouped_matmul_backend(platform: str) -> str:
  """Returns the name of the best backend for a platform ('cpu', 'gpu', 'tpu'), decided and logged once per process."""
  name = {'cpu': 'loop', 'tpu': 'megablox', 'gpu': 'triton'}.get(platform, 'ragged_dot')
  reason = f'the platform is {platform!r}'
  capability = str(getattr(current_device(), 'compute_capability', None))
  if name == 'triton' and not _TRITON_COMPILES.fullmatch(capability):
    name, reason = 'loop', f'kernels need an NVIDIA GPU of compute capability 8.0 or more, not {capability}'
  logging.info('The experts compute grouped matmuls by %r: %s.', name, reason)
  return name
