"""Multiplies rows sorted by group, each by its group's matrix (a grouped matmul), with one of several backends.

Shapes: R rows, E groups (experts), K in, N out.

The backends share one signature, `backend(rows, weights, group_sizes)`:

  'loop'        block by block (_loop_backend.py); for CPU, where `ragged_dot` multiplies every row by every matrix.
  'megablox'    JAX's Pallas kernel (_megablox_backend.py); for TPU.
  'tokamax'     Triton and Mosaic kernels of the optional package tokamax; for GPU and TPU.
  'ragged_dot'  `jax.lax.ragged_dot`; always available, but computes dense products on CPU and possibly elsewhere.

`best_grouped_matmul_backend` picks one per platform.
"""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import contextvars
import functools
import importlib.util
import sys
import types

from absl import flags, logging
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe._loop_backend import multiply_by_loop
from spmd_tasks.layers.moe._megablox_backend import multiply_by_megablox
from spmd_tasks.sharding import current_platform

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def multiply_by_ragged_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Computes `grouped_matmul` by `jax.lax.ragged_dot`."""
  result = jax.lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)
  return result.astype(rows.dtype)


def multiply_by_tokamax(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  """Computes `grouped_matmul` by `tokamax.ragged_dot`. Rows outside of all groups must be zero.

  Args:
    rows, weights, group_sizes: see `grouped_matmul`.
    implementation: 'mosaic', 'triton' or 'xla'; None for the first that supports the device and these shapes.

  Raises:
    ImportError: tokamax is not installed.
  """
  import tokamax  # optional, and slow to import

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(sys.argv[:1])  # otherwise tokamax parses the whole command line and exits at an unknown flag
  result = tokamax.ragged_dot(
    rows, weights, group_sizes, preferred_element_type=jnp.float32, implementation=implementation
  )
  return result.astype(rows.dtype)


GROUPED_MATMUL_BACKENDS: Mapping[str, GroupedMatmul] = types.MappingProxyType(
  {
    'loop': multiply_by_loop,
    'megablox': multiply_by_megablox,
    'tokamax': multiply_by_tokamax,
    'ragged_dot': multiply_by_ragged_dot,
  }
)


def grouped_matmul(
  rows: jax.Array,
  weights: jax.Array,
  group_sizes: jax.Array,
  *,
  backend: str | None = None,
  clear_rest: bool = True,
) -> jax.Array:
  """Returns [R, N], in the rows' dtype: each row times its group's matrix, accumulated in float32.

  Rows after the last group give zeros and take no gradient, whatever they hold.

  Args:
    rows: [R, K], sorted by group.
    weights: [E, K, N].
    group_sizes: int32 [E], rows per group, with a sum of at most R.
    backend: a name in GROUPED_MATMUL_BACKENDS; None for the best on this platform.
    clear_rest: False leaves the results and gradients of rows after the last group undefined, where that is faster.

  Raises:
    UserError: the backend is unknown.
  """
  multiply = GROUPED_MATMUL_BACKENDS[resolve_backend(backend)]
  # The loop neither reads nor writes rows after the last group; nor does the kernel, which starts without zeros there.
  if multiply is multiply_by_loop or (multiply is multiply_by_megablox and not clear_rest):
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


_backend_override: contextvars.ContextVar[str | None] = contextvars.ContextVar('backend', default=None)


@contextlib.contextmanager
def override_grouped_matmul_backend(name: str) -> Iterator[None]:
  """Makes every grouped matmul traced in this context use one backend, whatever backend it asks for.

  For counting FLOPs, which loops and kernels hide from the jaxpr.
  """
  token = _backend_override.set(name)
  try:
    yield
  finally:
    _backend_override.reset(token)


def resolve_backend(backend: str | None) -> str:
  """Returns the backend to use: the override if there is one, else `backend`, else the best on this platform.

  Raises:
    UserError: the backend is unknown.
  """
  backend = _backend_override.get() or backend
  if backend is None:
    return best_grouped_matmul_backend(current_platform())
  if backend not in GROUPED_MATMUL_BACKENDS:
    raise UserError(f'backend {backend!r} is unknown: choose one of {sorted(GROUPED_MATMUL_BACKENDS)}, or None.')
  return backend


@functools.cache
def best_grouped_matmul_backend(platform: str) -> str:
  """Returns the name of the best backend for a platform ('cpu', 'gpu', 'tpu'), decided and logged once per process."""
  if platform == 'cpu':
    name, reason = 'loop', 'the platform is CPU'
  elif platform == 'tpu':
    name, reason = 'megablox', 'the platform is TPU'
  elif platform != 'gpu':
    name, reason = 'ragged_dot', f'there is no other backend for {platform}'
  elif error := _why_tokamax_fails():
    name, reason = 'ragged_dot', f'tokamax cannot be used: {error}'
  else:
    name, reason = 'tokamax', 'it is installed and passes a trial'
  logging.info('The experts compute grouped matmuls by %r: %s.', name, reason)
  return name


def _why_tokamax_fails() -> str:
  """Tries one grouped matmul and its gradients by tokamax; returns '' if both work, else the error."""
  if importlib.util.find_spec('tokamax') is None:
    return 'it is not installed (`pip install tokamax`)'

  def try_it():
    rows, weights = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((2, 128, 128), jnp.bfloat16)
    loss = lambda rows, weights: jnp.sum(multiply_by_tokamax(rows, weights, jnp.array([100, 156])))
    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, weights))

  try:
    # The caller may be tracing a step; a fresh thread has no trace context, so the trial really runs.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
      executor.submit(try_it).result()
  except Exception as error:  # any failure falls back to ragged_dot
    return f'{type(error).__name__}: {error}'
  return ''
