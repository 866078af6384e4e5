"""Several low-rank adapters beside one kernel: each row of a batch has one of them, or none.

    adapter = LowRankAdapter(rank=16, alpha=16.0, choices=('french', 'legal'))
    with adapters_of_rows(jnp.array([0, 2, 1])):          # int32 [B]: none, 'legal', 'french'
      y = Linear(output_dims=64, adapter=adapter)(x)      # x [B, T, I]

The adapters are stacked, so that one compiled step computes every mix of them (Chen et al., "Punica", 2023; Sheng et
al., "S-LoRA", 2023). Number 0 is all zeros: its rows have the bits of the kernel alone. No row depends on the adapters
of the others.

Shapes: B rows, T tokens, N adapters with that of number 0; I the dims of a kernel that are contracted, O the others,
R rank.
"""

from collections.abc import Iterator
import contextlib
import contextvars
import math

import jax
import jax.numpy as jnp

from spmd_tasks.sharding import SplitDims, constrain

_rows: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar('adapter_rows', default=None)

# With more adapters per row than this, a step gathers those of its rows instead of multiplying by all. A gathered copy
# is read, written and read again: three times the traffic; the rest of the factor is a guess.
_MAX_ADAPTERS_PER_ROW = 4


@contextlib.contextmanager
def adapters_of_rows(numbers: jax.Array | None) -> Iterator[None]:
  """Context in which row b of every batch has the adapter numbers[b], int32 [B]; None: no row has one."""
  token = _rows.set(numbers)
  try:
    yield
  finally:
    _rows.reset(token)


def apply_stacked(
  x: jax.Array, a: jax.Array, b: jax.Array, *, num_input_dims: int, token_split_dims: SplitDims
) -> jax.Array:
  """Returns x . A . B by each row's own A and B.

  Args:
    x: [B, T..., I...].
    a: [N, I..., R].
    b: [N, R, O...].
    num_input_dims: how many dims I has.
    token_split_dims: of [B, T...]; None: not known.

  Returns:
    [B, T..., O...].
  """
  numbers, num_token_dims = _rows.get(), x.ndim - num_input_dims
  if numbers is None:
    return jnp.zeros((*x.shape[:num_token_dims], *b.shape[2:]), b.dtype)
  _check_rows(numbers, x)
  input_dims = tuple(range(num_token_dims, x.ndim))
  if math.prod(x.shape[1:num_token_dims]) == 1 and a.shape[0] <= _MAX_ADAPTERS_PER_ROW * x.shape[0]:
    # A step, which waits for the memory: all adapters in one product, where each row keeps its own, read each once.
    # Gathered, a copy of one adapter per row would be written and read.
    y = jnp.tensordot(x, a, axes=(input_dims, tuple(range(1, 1 + num_input_dims))))  # [B, T..., N, R]
    is_own = numbers[:, None] == jnp.arange(a.shape[0])[None, :]
    y = jnp.where(is_own.reshape(x.shape[0], *[1] * (num_token_dims - 1), a.shape[0], 1), y, 0)
    if token_split_dims is not None:
      y = constrain(y, (*token_split_dims, None, None))
    return jnp.tensordot(y, b, axes=2)
  a, b = (jnp.take(stacked, numbers, axis=0, mode='clip') for stacked in (a, b))
  y = jax.lax.dot_general(x, a, ((input_dims, tuple(range(1, 1 + num_input_dims))), ((0,), (0,))))  # [B, T..., R]
  if token_split_dims is not None:
    y = constrain(y, (*token_split_dims, None))
  return jax.lax.dot_general(y, b, (((y.ndim - 1,), (1,)), ((0,), (0,))))


def take_rows(stacked: jax.Array, x: jax.Array) -> jax.Array:
  """Returns [B, ...], each row's own of [N, ...]; that of number 0 where no row has an adapter. x is [B, ...]."""
  numbers = _rows.get()
  if numbers is None:
    return jnp.broadcast_to(stacked[:1], (x.shape[0], *stacked.shape[1:]))
  _check_rows(numbers, x)
  return jnp.take(stacked, numbers, axis=0, mode='clip')


def _check_rows(numbers: jax.Array, x: jax.Array) -> None:
  if numbers.shape != x.shape[:1]:
    raise ValueError(f'{numbers.shape} adapters for an input {x.shape}: one per row is needed.')
