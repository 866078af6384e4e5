"""Several low-rank adapters of one kernel: each row of a batch selects one of them, or none.

    adapter = AdapterChoices(rank=16, choices=('french', 'legal'))
    linear = Linear(output_dims=64, product=adapter.of_rows(jnp.array([0, 2, 1])))    # none, 'legal', 'french'
    y = linear(x)                                                                     # x [B, T, I]

The adapters are stacked, so that one compiled step computes any mix of them (Chen et al., "Punica", 2023; Sheng et al.,
"S-LoRA", 2023): A [N, I..., R], B [N, R, O...]. Adapter 0 is all zeros: rows that select it have, bit for bit, the
outputs of the kernel alone. No row depends on the adapters of other rows.

Shapes: B rows, T tokens, N adapters including adapter 0, I the dims of a kernel that are contracted, O its other dims,
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

# With more adapters per row, a step gathers the adapters of its rows instead of multiplying by all. A gathered copy is
# read, written and read again, which triples the memory traffic; the rest of the factor is a guess.
_MAX_ADAPTERS_PER_ROW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterChoices(WeightAdapter):
  """Settings of stacked adapters. Their weights are restored from elsewhere, with the scales multiplied into B.

  Attributes:
    rank: the largest rank.
    choices: the names of the adapters.
    names: the projections that have the adapters, if a layer has several.
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
  """Stacked adapters of which row b selects numbers[b], int32 [B]."""

  names: tuple[str, ...]
  settings: AdapterChoices
  numbers: jax.Array

  def adapt(self, kernel: DeclaredKernel) -> '_StackedKernel':
    return dataclasses.replace(self.settings.adapt(kernel), numbers=self.numbers)


@dataclasses.dataclass(frozen=True)
class _StackedKernel(AdaptedKernel):
  """A kernel with A [N, I..., R] and B [N, R, O...]; no row has an adapter if `numbers` is None."""

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
      f"the adapters {', '.join(self.settings.choices)} cannot be selected per row in experts or in latent attention's "
      'kv_up, whose kernel all rows share: serve one adapter alone (--job_log_dir), or merge it '
      '(--mode export --format hf).'
    )

  def _products(self, x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns x . A . B with each row's A and B, [B, T..., O...] for x [B, T..., I...]."""
    a, b, num_input_dims = self.a, self.b, self.declared.num_input_dims
    num_token_dims, token_split_dims = x.ndim - num_input_dims, self.declared.token_split_dims
    input_dims = tuple(range(num_token_dims, x.ndim))
    if math.prod(x.shape[1:num_token_dims]) == 1 and a.shape[0] <= _MAX_ADAPTERS_PER_ROW * x.shape[0]:
      # A decoding step is memory-bound: one product with all adapters reads each once, and masks the others' results.
      # Gathering would write and read a copy of an adapter for each row.
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
