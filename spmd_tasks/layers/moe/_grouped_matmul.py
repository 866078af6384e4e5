"""Multiplies rows sorted by group, each by its group's matrix (a grouped matmul), with one of several backends.

Shapes: R rows, E groups (experts), K in, N out.

The backends share one signature, `backend(rows, weights, group_sizes)`:

  'loop'        block by block (_loop_backend.py); for CPU, and for GPU where no kernel works.
  'megablox'    JAX's Pallas kernel (_megablox_backend.py); for TPU.
  'tokamax'     Triton and Mosaic kernels of the optional package tokamax; for GPU and TPU.
  'triton'      our Pallas kernels (_triton_backend.py); for GPU.
  'ragged_dot'  `jax.lax.ragged_dot`; always available, but multiplies every row by every matrix on CPU and GPU.

`best_grouped_matmul_backend` picks one per platform; on GPUs by a trial, and `agree_on_grouped_matmul_backend` lets the
processes of a job agree on what all of them can use.
"""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import contextvars
import importlib.util
import sys
import types

from absl import flags, logging
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe._loop_backend import multiply_by_loop
from spmd_tasks.layers.moe._megablox_backend import multiply_by_megablox
from spmd_tasks.layers.moe._triton_backend import multiply_by_triton
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
    'triton': multiply_by_triton,
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
  # The loop neither reads nor writes rows after the last group; nor do the kernels, which start without zeros there.
  if multiply is multiply_by_loop or (multiply in (multiply_by_megablox, multiply_by_triton) and not clear_rest):
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


_chosen: dict[str, str] = {}  # platform -> backend
_BEST_FIRST_ON_GPU = ('tokamax', 'triton', 'loop')


def best_grouped_matmul_backend(platform: str) -> str:
  """Returns the name of the best backend for a platform ('cpu', 'gpu', 'tpu'), decided and logged once per process."""
  if platform not in _chosen:
    _chosen[platform] = _choose(platform)
  return _chosen[platform]


def agree_on_grouped_matmul_backend(platform: str, gather: Callable[[str | None], list[str | None]]):
  """Makes the processes of a job use one backend, the best that works on all of them; all call it.

  Hosts on which the trials of `best_grouped_matmul_backend` end differently would compile different programs, and wait
  for one another without end. Call it once the model has been traced, before a step is compiled.

  Args:
    platform: of the mesh.
    gather: returns the values that all processes gave it, by their index.
  """
  votes = gather(_chosen.get(platform))
  names = {vote for vote in votes if vote is not None}
  if len(names) > 1:
    _chosen[platform] = agreed = max(names, key=_BEST_FIRST_ON_GPU.index)
    logging.warning(
      'The experts compute grouped matmuls by %r on all processes, because processes %s can use nothing better: make '
      'their GPUs, drivers and packages like those of the others.',
      agreed,
      [index for index, vote in enumerate(votes) if vote == agreed],
    )


def _choose(platform: str) -> str:
  if platform == 'cpu':
    name, reason = 'loop', 'the platform is CPU'
  elif platform == 'tpu':
    name, reason = 'megablox', 'the platform is TPU'
  elif platform != 'gpu':
    name, reason = 'ragged_dot', f'there is no other backend for {platform}'
  elif not (error := _why_tokamax_fails()):
    name, reason = 'tokamax', 'it is installed and passes a trial'
  elif not (failure := _why_triton_fails()):
    name, reason = 'triton', f'tokamax cannot be used: {error}'
  else:
    name, reason = 'loop', f'tokamax cannot be used: {error}; nor can triton: {failure}'
  logging.info('The experts compute grouped matmuls by %r: %s.', name, reason)
  return name


def _why_tokamax_fails() -> str:
  """Returns '' if tokamax passes a trial, else why it does not."""
  if importlib.util.find_spec('tokamax') is None:
    return 'it is not installed (`pip install tokamax`)'
  if jax.default_backend() != 'gpu':
    return 'it chooses its kernel by the devices of this process, which has no GPU'
  return _why_it_fails(multiply_by_tokamax)


def _why_triton_fails() -> str:
  """Returns '' if our kernels pass a trial, or there is no GPU to try them on; else why they do not."""
  return _why_it_fails(multiply_by_triton) if jax.default_backend() == 'gpu' else ''


def _why_it_fails(multiply: GroupedMatmul) -> str:
  """Tries one grouped matmul and its gradients; returns '' if they agree with plain products, else the error."""

  def try_it():
    rows, weights = (
      jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((256, 128), (2, 128, 128)))
    )

    def with_gradients(multiply):
      loss = lambda rows, weights: jnp.sum(multiply(rows, weights).astype(jnp.float32) ** 2)
      return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(rows, weights)

    plainly = lambda rows, weights: jnp.concatenate([rows[:100] @ weights[0], rows[100:] @ weights[1]])
    found = with_gradients(lambda rows, weights: multiply(rows, weights, jnp.array([100, 156])))
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(with_gradients(plainly)), strict=True):
      ours, wanted = (x.astype(jnp.float32) for x in (ours, wanted))
      if not jnp.max(jnp.abs(ours - wanted)) <= 0.05 * jnp.max(jnp.abs(wanted)):  # which a NaN is not either
        raise ArithmeticError('its numbers differ from those of plain products')

  try:
    # The caller may be tracing a step; a fresh thread has no trace context, so the trial really runs.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
      executor.submit(try_it).result()
  except Exception as error:  # any failure leads to another backend
    return f'{type(error).__name__}: {error}'
  return ''
