"""grouped_matmul: rows sorted by group, each times its group's matrix.

Its backends are sibling files behind one signature, backend(rows, weights, group_sizes):

  'loop'        our own, block by block; for CPU, where `ragged_dot` computes every row with every group's matrix.
  'tokamax'     Triton and Mosaic kernels of the optional package of that name, for GPU and TPU.
  'ragged_dot'  what JAX itself has: always there, and on some platforms as dense as on CPU.

Shapes: R rows, E groups (experts), K in, N out.
"""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import contextvars
import functools
import importlib.util
import types

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.grouped_matmul_loop import multiply_by_loop
from spmd_tasks.layers.moe.grouped_matmul_tokamax import multiply_by_tokamax

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def multiply_by_ragged_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """`grouped_matmul` by `jax.lax.ragged_dot`."""
  result = jax.lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)
  return result.astype(rows.dtype)


GROUPED_MATMUL_BACKENDS: Mapping[str, GroupedMatmul] = types.MappingProxyType(
  {'loop': multiply_by_loop, 'tokamax': multiply_by_tokamax, 'ragged_dot': multiply_by_ragged_dot}
)


def grouped_matmul(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, backend: str | None = None
) -> jax.Array:
  """Returns [R, N], in the rows' dtype: each row times its group's matrix, accumulated in float32.

  Rows past the groups' end give zeros and take no gradient, whatever they hold.

  Args:
    rows: [R, K], sorted by group.
    weights: [E, K, N].
    group_sizes: int32 [E], with a sum of at most R.
    backend: a name in GROUPED_MATMUL_BACKENDS; None for `best_backend`.

  Raises:
    UserError: a backend of another name.
  """
  multiply = GROUPED_MATMUL_BACKENDS[resolve_backend(backend)]
  if multiply is multiply_by_loop:  # it neither reads nor writes rows past the groups' end
    return multiply(rows, weights, group_sizes)
  num_used = jnp.sum(group_sizes)
  return _clear_rows_from(num_used, multiply(_clear_rows_from(num_used, rows), weights, group_sizes))


@jax.custom_vjp
def _clear_rows_from(start: jax.Array, rows: jax.Array) -> jax.Array:
  """`rows` [R, N] with zeros from row `start` on, and so its gradient. Left to autodiff, a mask [R, N] is saved."""
  keep = jnp.arange(rows.shape[0], dtype=jnp.int32) < start
  return jnp.where(keep[:, None], rows, jnp.zeros((), rows.dtype))


_clear_rows_from.defvjp(
  lambda start, rows: (_clear_rows_from(start, rows), start),
  lambda start, d_rows: (None, _clear_rows_from(start, d_rows)),
)


_in_place_of_all: contextvars.ContextVar[str | None] = contextvars.ContextVar('backend', default=None)


@contextlib.contextmanager
def one_backend_for_all(name: str) -> Iterator[None]:
  """What is traced inside uses this backend, whatever it asks for: to count FLOPs, which loops and kernels hide."""
  token = _in_place_of_all.set(name)
  try:
    yield
  finally:
    _in_place_of_all.reset(token)


def resolve_backend(backend: str | None) -> str:
  """The name itself, or that of the best backend for None; a ValueError lists the names."""
  backend = _in_place_of_all.get() or backend
  if backend is None:
    return best_backend(jax.default_backend())
  if backend not in GROUPED_MATMUL_BACKENDS:
    raise UserError(f'backend {backend!r} is unknown: choose one of {sorted(GROUPED_MATMUL_BACKENDS)}, or None.')
  return backend


@functools.cache
def best_backend(platform: str) -> str:
  """The name of the best backend on a platform ('cpu', 'gpu', 'tpu'), found once per process and logged."""
  if platform == 'cpu':
    name, reason = 'loop', 'the platform is CPU'
  elif platform not in ('gpu', 'tpu'):
    name, reason = 'ragged_dot', f'no other is for {platform}'
  elif error := _why_tokamax_fails():
    name, reason = 'ragged_dot', f'tokamax cannot be used: {error}'
  else:
    name, reason = 'tokamax', 'it is installed and passes a trial'
  logging.info('Grouped matmuls of the experts are computed by %r: %s.', name, reason)
  return name


def _why_tokamax_fails() -> str:
  """Compiles and runs one grouped matmul and its gradients; '' if that works, else the error."""
  if importlib.util.find_spec('tokamax') is None:
    return 'it is not installed (`pip install tokamax`)'

  def try_it():
    rows, weights = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((2, 128, 128), jnp.bfloat16)
    loss = lambda rows, weights: jnp.sum(multiply_by_tokamax(rows, weights, jnp.array([100, 156])))
    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, weights))

  try:
    # This may be asked for while a step is being traced; another thread knows nothing of that.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
      executor.submit(try_it).result()
  except Exception as error:  # whatever it is, there is a backend that works
    return f'{type(error).__name__}: {error}'
  return ''
