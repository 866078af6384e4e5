"""Several low-rank adapters beside one kernel: each row of a batch has one of them, or none.

    adapter = AdapterChoices(rank=16, choices=('french', 'legal'))
    linear = Linear(output_dims=64, product=adapter.of_rows(jnp.array([0, 2, 1])))    # none, 'legal', 'french'
    y = linear(x)                                                                     # x [B, T, I]

The adapters are stacked, so that one compiled step computes every mix of them (Chen et al., "Punica", 2023; Sheng et
al., "S-LoRA", 2023): A [N, I..., R], B [N, R, O...]. Number 0 is all zeros: its rows have the bits of the kernel alone.
No row depends on the adapters of the others.

Shapes: B rows, T tokens, N adapters with that of number 0; I the dims of a kernel that are contracted, O the others,
R rank.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from spmd_tasks.adapters.low_rank import declare_product
from spmd_tasks.errors import UserError
from spmd_tasks.layers import AdaptedKernel, DeclaredKernel, WeightAdapter
from spmd_tasks.sharding import constrain

# With more adapters per row than this, a step gathers those of its rows instead of multiplying by all. A gathered copy
# is read, written and read again: three times the traffic; the rest of the factor is a guess.
_MAX_ADAPTERS_PER_ROW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterChoices(WeightAdapter):
  """Settings of adapters to choose from. They are only read from elsewhere, each with its own scale in its B.

  Attributes:
    rank: the largest.
    choices: their names.
    names: the projections that have them, where a layer has several.
  """

  rank: int
  choices: tuple[str, ...]
  names: tuple[str, ...] = ()

  def adapt(self, kernel: DeclaredKernel) -> '_StackedKernel':
    return _StackedKernel(self, kernel, *declare_product(kernel, self.rank, num_choices=len(self.choices) + 1))

  def of_rows(self, numbers: jax.Array) -> '_ChosenAdapters':
    return _ChosenAdapters(self.names, self, numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class _ChosenAdapters(WeightAdapter):
  """Adapters of which row b has number numbers[b], int32 [B]."""

  names: tuple[str, ...]
  settings: AdapterChoices
  numbers: jax.Array

  def adapt(self, kernel: DeclaredKernel) -> '_StackedKernel':
    return dataclasses.replace(self.settings.adapt(kernel), numbers=self.numbers)


@dataclasses.dataclass(frozen=True)
class _StackedKernel(AdaptedKernel):
  """A kernel with A [N, I..., R] and B [N, R, O...]; without numbers no row has an adapter."""

  settings: AdapterChoices
  declared: DeclaredKernel
  a: jax.Array
  b: jax.Array
  numbers: jax.Array | None = None

  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    if self.numbers is None:
      return y
    return y + self._products(x.astype(self.a.dtype), self.numbers).astype(y.dtype)

  def kernel(self) -> jax.Array:
    raise UserError(
      f'adapters to choose from ({", ".join(self.settings.choices)}) cannot join a kernel that all rows share, as '
      "those of experts and of latent attention's kv_up do: serve such an adapter alone (a job: --job_log_dir), or "
      'merge it (--mode export --format hf).'
    )

  def _products(self, x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns x . A . B by each row's own A and B, [B, T..., O...] for x [B, T..., I...]."""
    a, b, num_input_dims = self.a, self.b, self.declared.num_input_dims
    num_token_dims, token_split_dims = x.ndim - num_input_dims, self.declared.token_split_dims
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
