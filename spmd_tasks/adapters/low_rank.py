"""Low-rank adapters (LoRA): a small trained product of two matrices is added to a frozen kernel.

    Linear(output_dims=64, product=LowRankAdapter(rank=8, alpha=16.0))    # y = x . W + alpha / rank * (x . A) . B

From Hu et al., "LoRA" (arXiv 2106.09685); `use_rslora` from Kalajdzievski (arXiv 2312.03732); `use_dora` from Liu et
al., "DoRA" (arXiv 2402.09353). B is initially zero, so that the model starts bit for bit as its base model.

An adapter's weights are siblings of its kernel, and sharded and padded like it: `kernel` [I..., O...] has `lora_a`
[I..., R], `lora_b` [R, O...] and, with DoRA, `lora_magnitude` [O...]. A kernel with another name, such as `up` of
experts, has `up_lora_a` and `up_lora_b`. adapted_weights.py finds them in a model.

Shapes: I the dims of a kernel that are contracted, O its other dims, R rank, E experts.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers import AdaptedKernel, DeclaredKernel, WeightAdapter, declare_weight
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.sharding import constrain
from spmd_tasks.sharding.specs import gather_for_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankAdapter(WeightAdapter):
  """The settings of an adapter.

  Attributes:
    rank: R.
    alpha: the product is multiplied by alpha / rank.
    dropout_rate: dropout of the adapter's input in training, with the rng `dropout`. If the product is added to the
      kernel itself, as in experts, all tokens of a microbatch share the mask of each expert and input feature.
    use_rslora: divides alpha by the square root of the rank, so that the rank does not change the size of updates.
    use_dora: also trains the norm of each column of the adapted kernel.
    names: the projections that have the adapter, if a layer has several.
  """

  rank: int
  alpha: float
  dropout_rate: float = 0.0
  use_rslora: bool = False
  use_dora: bool = False
  names: tuple[str, ...] = ()

  def __post_init__(self):
    if not isinstance(self.rank, int) or self.rank < 1:
      raise UserError(f'rank {self.rank!r} of an adapter must be at least 1, such as 8.')
    if not self.alpha > 0:
      raise UserError(f'alpha {self.alpha!r} of an adapter must be positive, such as twice the rank.')
    if not 0 <= self.dropout_rate < 1:
      raise UserError(f'dropout_rate {self.dropout_rate!r} of an adapter must be in [0, 1).')

  @property
  def scale(self) -> float:
    """The factor of the product."""
    return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

  def adapt(self, kernel: DeclaredKernel) -> '_LowRankKernel':
    """Declares A, uniform in +-1 / sqrt(I) as in `peft`, B, zero, and with DoRA the norms of the kernel's columns."""
    a, b = declare_product(kernel, self.rank)
    if kernel.token_split_dims is not None:
      a, b = (
        gather_for_tokens(x, split_dims, kernel.token_split_dims)
        for x, split_dims in zip((a, b), _product_split_dims(kernel))
      )
    scale = self._declare_magnitude(kernel, a, b) if self.use_dora else None
    return _LowRankKernel(self, kernel, a, b, scale)

  def _declare_magnitude(self, kernel: DeclaredKernel, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns DoRA's magnitudes [E?, O...] divided by the norms of the adapted kernel's columns.

    As in the paper (section 4.3) and in `peft`, the norms have no gradient.
    """
    num_stacked, num_inputs = kernel.num_stacked_dims, kernel.num_input_dims
    product = low_rank_product(self, a, b, num_stacked).astype(jnp.float32)
    adapted = jax.lax.stop_gradient(kernel.value.astype(jnp.float32) + product)
    magnitude = declare_weight(
      kernel.module,
      f'{kernel.prefix}lora_magnitude',
      shape=_without_inputs(kernel, kernel.value.shape),
      init=lambda rng, shape, dtype: column_norms(kernel.value, num_inputs, num_stacked).astype(dtype),
      split_dims=kernel.split_dims and _without_inputs(kernel, kernel.split_dims),
      tags=(ADAPTER_TAG, 'no_decay', *kernel.tags),
    )
    return (magnitude / column_norms(adapted, num_inputs, num_stacked)).astype(kernel.dtype)


@dataclasses.dataclass(frozen=True)
class _LowRankKernel(AdaptedKernel):
  """A kernel with A [E?, I..., R], B [E?, R, O...] and scales of its columns [E?, O...], in the computation's dtype."""

  adapter: LowRankAdapter
  declared: DeclaredKernel
  a: jax.Array
  b: jax.Array
  scale: jax.Array | None

  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    declared, num_token_dims = self.declared, x.ndim - self.declared.num_input_dims
    x = self._dropped(x, x.shape).astype(self.a.dtype)
    low = jnp.tensordot(x, self.a, axes=declared.num_input_dims) * self.adapter.scale
    if declared.token_split_dims is not None:
      low = constrain(low, (*declared.token_split_dims, None))
    added = jnp.tensordot(low, self.b, axes=1)
    y = y + added.astype(y.dtype)
    return y if self.scale is None else y * self.scale.reshape((1,) * num_token_dims + self.scale.shape)

  def kernel(self) -> jax.Array:
    declared, num_stacked = self.declared, self.declared.num_stacked_dims
    a = self._dropped(self.a, (*self.a.shape[:-1], 1))
    adapted = declared.value.astype(declared.dtype) + low_rank_product(self.adapter, a, self.b, num_stacked)
    if self.scale is None:
      return adapted
    return adapted * jnp.expand_dims(self.scale, _input_dims(num_stacked, declared.num_input_dims))

  def _dropped(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Applies dropout to x, with a mask of `shape`."""
    rate, module = self.adapter.dropout_rate, self.declared.module
    if not rate or not module.has_rng('dropout'):
      return x
    return jnp.where(jax.random.bernoulli(module.make_rng('dropout'), 1 - rate, shape), x / (1 - rate), 0)


def declare_product(kernel: DeclaredKernel, rank: int, num_choices: int | None = None) -> tuple[jax.Array, jax.Array]:
  """Declares A and B of an adapter, or of stacked adapters [N, ...]; returns them in the computation's dtype."""
  shape, num_stacked, end = kernel.value.shape, kernel.num_stacked_dims, kernel.num_stacked_dims + kernel.num_input_dims
  bound = 1 / math.sqrt(math.prod(shape[num_stacked:end]))
  choices = () if num_choices is None else (num_choices,)  # the first dim, which is not sharded
  a_split_dims, b_split_dims = _product_split_dims(kernel)

  def declare(name: str, shape: tuple[int, ...], init: Any, split_dims: Any, num_input_dims: int) -> jax.Array:
    return declare_weight(
      kernel.module,
      f'{kernel.prefix}{name}',
      shape=(*choices, *shape),
      init=init,
      split_dims=split_dims and (*[None] * len(choices), *split_dims),
      tags=(ADAPTER_TAG, *kernel.tags),
      num_input_dims=None if choices else num_input_dims,
    ).astype(kernel.dtype)

  uniform = lambda rng, shape, dtype: jax.random.uniform(rng, shape, dtype, -bound, bound)
  a = declare('lora_a', (*shape[:end], rank), uniform, a_split_dims, kernel.num_input_dims)
  b = declare('lora_b', (*shape[:num_stacked], rank, *shape[end:]), jax.nn.initializers.zeros, b_split_dims, 1)
  return a, b


def _product_split_dims(kernel: DeclaredKernel) -> tuple[Any, Any]:
  """Returns the split dims of A and of B."""
  if kernel.split_dims is None:
    return None, None
  num_stacked, end = kernel.num_stacked_dims, kernel.num_stacked_dims + kernel.num_input_dims
  return (*kernel.split_dims[:end], None), (*kernel.split_dims[:num_stacked], None, *kernel.split_dims[end:])


def _without_inputs(kernel: DeclaredKernel, dims: Sequence[Any]) -> tuple[Any, ...]:
  return (*dims[: kernel.num_stacked_dims], *dims[kernel.num_stacked_dims + kernel.num_input_dims :])


def _input_dims(num_stacked_dims: int, num_input_dims: int) -> tuple[int, ...]:
  return tuple(range(num_stacked_dims, num_stacked_dims + num_input_dims))


def column_norms(kernel: jax.Array, num_input_dims: int, num_stacked_dims: int = 0) -> jax.Array:
  """Returns the L2 norms of a kernel's columns, float32 [E?, O...] for [E?, I..., O...]."""
  dims = _input_dims(num_stacked_dims, num_input_dims)
  return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=dims))


def low_rank_product(adapter: LowRankAdapter, a: Any, b: Any, num_stacked_dims: int = 0) -> Any:
  """Returns scale * A . B, [stacked..., I..., O...] for A [stacked..., I..., R] and B [stacked..., R, O...]."""
  multiply: Callable[..., Any] = lambda a, b: jnp.tensordot(a, b, axes=1) * adapter.scale
  for _ in range(num_stacked_dims):
    multiply = jax.vmap(multiply)
  return multiply(a, b)


def merge_low_rank(
  adapter: LowRankAdapter, kernel: Any, a: Any, b: Any, magnitude: Any = None, *, num_stacked_dims: int = 0
) -> Any:
  """Returns a kernel, float32, that computes the same without the adapter.

  Args:
    adapter: the settings of the adapter.
    kernel, a, b, magnitude: the weights; `magnitude` for DoRA only.
    num_stacked_dims: the number of leading dims for layers and experts.
  """
  adapted = kernel.astype(jnp.float32) + low_rank_product(
    adapter, a.astype(jnp.float32), b.astype(jnp.float32), num_stacked_dims
  )
  if magnitude is None:
    return adapted
  num_inputs = kernel.ndim - magnitude.ndim
  norms = column_norms(adapted, num_inputs, num_stacked_dims)
  # Columns of padding have norm 0.
  scale = jnp.where(norms > 0, magnitude.astype(jnp.float32) / jnp.where(norms > 0, norms, 1.0), 0.0)
  return adapted * jnp.expand_dims(scale, _input_dims(num_stacked_dims, num_inputs))
