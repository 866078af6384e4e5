"""Low-rank adapters (LoRA): a small trained product of two matrices beside a frozen kernel.

    Linear(output_dims=64, product=LowRankAdapter(rank=8, alpha=16.0))    # y = x . W + alpha / rank * (x . A) . B

After Hu et al., "LoRA" (arXiv 2106.09685); `use_rslora` after Kalajdzievski (arXiv 2312.03732); `use_dora` after Liu et
al., "DoRA" (arXiv 2402.09353). B starts at zero, so that the model starts as the one that it adapts, bit for bit.

The weights of an adapter lie beside the weight that it adapts, and are split and padded like it: `kernel` [I..., O...]
has `lora_a` [I..., R], `lora_b` [R, O...] and with DoRA `lora_magnitude` [O...]. A weight that is not called `kernel`,
such as `up` of experts, has `up_lora_a` and `up_lora_b`. adapted_weights.py finds them in a model.

Shapes: I the dims of a kernel that are contracted, O the others, R rank, E experts.
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
    dropout_rate: of the adapter's input in training; needs the rng `dropout`. For a kernel that adapters join, as those
      of experts, it is drawn once a microbatch for each expert and input feature, and not anew for each token.
    use_rslora: divides by the root of the rank instead, so that the rank does not change the size of steps.
    use_dora: also trains the length of each column of the adapted kernel.
    names: the projections that have it, where a layer has several.
  """

  rank: int
  alpha: float
  dropout_rate: float = 0.0
  use_rslora: bool = False
  use_dora: bool = False
  names: tuple[str, ...] = ()

  def __post_init__(self):
    if not isinstance(self.rank, int) or self.rank < 1:
      raise UserError(f'the rank of an adapter is {self.rank!r}; it must be 1 or more, such as 8.')
    if not self.alpha > 0:
      raise UserError(f'alpha of an adapter is {self.alpha!r}; it must be more than 0, such as twice the rank.')
    if not 0 <= self.dropout_rate < 1:
      raise UserError(f'dropout_rate of an adapter is {self.dropout_rate!r}; it must be in [0, 1).')

  @property
  def scale(self) -> float:
    """The factor of the product."""
    return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

  def adapt(self, kernel: DeclaredKernel) -> '_LowRankKernel':
    """Declares A uniform within +-1 / sqrt(I), as in `peft`, B zero, and DoRA's magnitudes as those of the kernel."""
    a, b = declare_product(kernel, self.rank)
    if kernel.token_split_dims is not None:
      a, b = (
        gather_for_tokens(x, split_dims, kernel.token_split_dims)
        for x, split_dims in zip((a, b), _product_split_dims(kernel))
      )
    scale = self._declare_magnitude(kernel, a, b) if self.use_dora else None
    return _LowRankKernel(self, kernel, a, b, scale)

  def _declare_magnitude(self, kernel: DeclaredKernel, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns DoRA's magnitudes [E?, O...] divided by the lengths of the adapted kernel's columns.

    As in the paper (section 4.3) and in `peft`, no gradient goes through the lengths.
    """
    num_stacked, num_inputs = kernel.num_stacked_dims, kernel.num_input_dims
    product = low_rank_product(self, a, b, num_stacked).astype(jnp.float32)
    adapted = jax.lax.stop_gradient(kernel.value.astype(jnp.float32) + product)
    magnitude = declare_weight(
      kernel.module,
      f'{kernel.prefix}lora_magnitude',
      shape=_without_inputs(kernel, kernel.value.shape),
      init=lambda rng, shape, dtype: column_lengths(kernel.value, num_inputs, num_stacked).astype(dtype),
      split_dims=kernel.split_dims and _without_inputs(kernel, kernel.split_dims),
      tags=(ADAPTER_TAG, 'no_decay', *kernel.tags),
    )
    return (magnitude / column_lengths(adapted, num_inputs, num_stacked)).astype(kernel.dtype)


@dataclasses.dataclass(frozen=True)
class _LowRankKernel(AdaptedKernel):
  """A kernel with A [E?, I..., R], B [E?, R, O...] and factors of its columns [E?, O...], cast for the computation."""

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
    """Returns x with dropout; one number is drawn for each place of the shape."""
    rate, module = self.adapter.dropout_rate, self.declared.module
    if not rate or not module.has_rng('dropout'):
      return x
    return jnp.where(jax.random.bernoulli(module.make_rng('dropout'), 1 - rate, shape), x / (1 - rate), 0)


def declare_product(kernel: DeclaredKernel, rank: int, num_choices: int | None = None) -> tuple[jax.Array, jax.Array]:
  """Declares A and B of an adapter, or the stacks of several, [N, ...]; returns them in the computation's dtype."""
  shape, num_stacked, end = kernel.value.shape, kernel.num_stacked_dims, kernel.num_stacked_dims + kernel.num_input_dims
  bound = 1 / math.sqrt(math.prod(shape[num_stacked:end]))
  choices = () if num_choices is None else (num_choices,)  # in front of all other dims, and not split
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


def column_lengths(kernel: jax.Array, num_input_dims: int, num_stacked_dims: int = 0) -> jax.Array:
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
  """Returns the kernel that computes alone what it computes with its adapter, float32.

  Args:
    adapter: the settings.
    kernel, a, b, magnitude: the weights; `magnitude` for DoRA only.
    num_stacked_dims: how many leading dims count layers and experts.
  """
  adapted = kernel.astype(jnp.float32) + low_rank_product(
    adapter, a.astype(jnp.float32), b.astype(jnp.float32), num_stacked_dims
  )
  if magnitude is None:
    return adapted
  num_inputs = kernel.ndim - magnitude.ndim
  lengths = column_lengths(adapted, num_inputs, num_stacked_dims)
  # Padding has columns of length 0.
  scale = jnp.where(lengths > 0, magnitude.astype(jnp.float32) / jnp.where(lengths > 0, lengths, 1.0), 0.0)
  return adapted * jnp.expand_dims(scale, _input_dims(num_stacked_dims, num_inputs))
