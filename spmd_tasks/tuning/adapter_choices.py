"""Several low-rank adapters beside one kernel: each row of a batch has one of them, or none.

    adapter = AdapterChoices(rank=16, choices=('french', 'legal'))
    linear = Linear(output_dims=64, adapter=adapter.of_rows(jnp.array([0, 2, 1])))    # none, 'legal', 'french'
    y = linear(x)                                                                     # x [B, T, I]

The adapters are stacked, so that one compiled step computes every mix of them (Chen et al., "Punica", 2023; Sheng et
al., "S-LoRA", 2023): A [N, I..., R], B [N, R, O...] and with DoRA the columns' factors `lora_scale` [N, O...]. Number 0
is all zeros: its rows have the bits of the kernel alone. No row depends on the adapters of the others.

Shapes: B rows, T tokens, N adapters with that of number 0; I the dims of a kernel that are contracted, O the others,
R rank.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers import AdaptedKernel, DeclaredKernel, WeightAdapter, declare_weight
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.sharding import constrain
from spmd_tasks.tuning.adapters import declare_product

# With more adapters per row than this, a step gathers those of its rows instead of multiplying by all. A gathered copy
# is read, written and read again: three times the traffic; the rest of the factor is a guess.
_MAX_ADAPTERS_PER_ROW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterChoices(WeightAdapter):
  """Settings of adapters to choose from. They are only read from elsewhere, each with its own scale in its B.

  Attributes:
    rank: the largest.
    choices: their names.
    use_dora: whether any of them scales columns.
    names: the projections that have them, where a layer has several.
  """

  rank: int
  choices: tuple[str, ...]
  use_dora: bool = False
  names: tuple[str, ...] = ()

  def adapt(self, kernel: DeclaredKernel) -> '_StackedKernel':
    a, b = declare_product(kernel, self.rank, num_choices=len(self.choices) + 1)
    scales = None
    if self.use_dora:
      scales = declare_weight(
        kernel.module,
        f'{kernel.prefix}lora_scale',
        shape=(len(self.choices) + 1, *b.shape[2:]),
        init=jax.nn.initializers.ones,
        split_dims=kernel.split_dims and (None, *kernel.split_dims[kernel.num_input_dims :]),
        tags=(ADAPTER_TAG, 'no_decay'),
      ).astype(kernel.dtype)
    return _StackedKernel(self, kernel, a, b, scales)

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
  """A kernel with A [N, I..., R], B [N, R, O...] and factors of columns [N, O...]; without numbers no row has any."""

  settings: AdapterChoices
  declared: DeclaredKernel
  a: jax.Array
  b: jax.Array
  scales: jax.Array | None
  numbers: jax.Array | None = None

  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    if self.numbers is None:
      return y
    y = y + self._products(x.astype(self.a.dtype), self.numbers).astype(y.dtype)
    if self.scales is None:
      return y
    scales = jnp.take(self.scales, self.numbers, axis=0, mode='clip')  # [B, O...]
    num_more = y.ndim - scales.ndim
    return y * scales.reshape(scales.shape[:1] + (1,) * num_more + scales.shape[1:])

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
