"""Low-rank adapters (LoRA): a small trained product of two matrices beside a frozen kernel.

    Linear(output_dims=64, adapter=LowRankAdapter(rank=8, alpha=16.0))    # y = x . W + alpha / rank * (x . A) . B

After Hu et al., "LoRA" (arXiv 2106.09685); `use_rslora` after Kalajdzievski (arXiv 2312.03732); `use_dora` after Liu et
al., "DoRA" (arXiv 2402.09353). B starts at zero, so that the model starts as the one that it adapts, bit for bit.

The weights of an adapter lie beside the weight that it adapts, and are split and padded like it: `kernel` [I..., O...]
has `lora_a` [I..., R], `lora_b` [R, O...] and with DoRA `lora_magnitude` [O...]. A weight that is not called `kernel`,
such as `up` of experts, has `up_lora_a` and `up_lora_b`. adapted_weights.py finds them in a model.

With `choices`, several adapters lie beside the kernel, stacked: A [N, I..., R], B [N, R, O...], and with DoRA the
columns' factors `lora_scale` [N, O...]; adapter_rows.py says which row of a batch has which.

Shapes: I the dims of a kernel that are contracted, O the others, R rank, E experts, N adapters to choose from.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.adapter_rows import apply_stacked, take_rows
from spmd_tasks.layers.base import declare_weight
from spmd_tasks.sharding import SplitDims, constrain, gather_for_tokens

ADAPTER_TAG = 'adapter'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankAdapter:
  """The settings of an adapter.

  Attributes:
    rank: R.
    alpha: the product is multiplied by alpha / rank.
    dropout_rate: of the adapter's input in training; needs the rng `dropout`.
    use_rslora: divides by the root of the rank instead, so that the rank does not change the size of steps.
    use_dora: also trains the length of each column of the adapted kernel.
    names: the projections that have it, where a layer has several.
    choices: names of several adapters of at most this rank, one of which (or none) each row of a batch has when text is
      generated. They are only read from elsewhere, each with its own scale in its B.
  """

  rank: int
  alpha: float
  dropout_rate: float = 0.0
  use_rslora: bool = False
  use_dora: bool = False
  names: tuple[str, ...] = ()
  choices: tuple[str, ...] = ()

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


def adapter_of(adapters: Sequence[LowRankAdapter], name: str) -> LowRankAdapter | None:
  """Returns the adapter of a projection, None if it has none."""
  return next((adapter for adapter in adapters if name in adapter.names), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankWeights:
  """The weights of one adapter, in the dtype of the computation.

  Attributes:
    adapter: its settings.
    a: [E?, I..., R], or [N, I..., R] with `choices`.
    b: [E?, R, O...], or [N, R, O...].
    num_input_dims: how many dims I has.
    num_stacked_dims: how many dims count separate kernels, as E does.
    token_split_dims: of the dims of inputs that count tokens, such as ('batch', 'seq'); None: not known.
  """

  adapter: LowRankAdapter
  a: jax.Array
  b: jax.Array
  num_input_dims: int
  num_stacked_dims: int
  token_split_dims: SplitDims

  def product(self) -> jax.Array:
    """Returns what the adapter adds to the kernel, [E?, I..., O...].

    Raises:
      UserError: there are several adapters to choose from, and a kernel has only one product.
    """
    if self.adapter.choices:
      raise UserError(
        f'adapters to choose from ({", ".join(self.adapter.choices)}) cannot join a kernel that all rows share, as '
        'those of experts do: leave such weights out of the patterns.'
      )
    return low_rank_product(self.adapter, self.a, self.b, self.num_stacked_dims)

  def apply(self, module: nn.Module, x: jax.Array) -> jax.Array:
    """Returns what the adapter adds to x . kernel: [..., O...] for x [..., I...], without the kernel's product."""
    if self.adapter.choices:
      return apply_stacked(
        x.astype(self.a.dtype),
        self.a,
        self.b,
        num_input_dims=self.num_input_dims,
        token_split_dims=self.token_split_dims,
      )
    rate = self.adapter.dropout_rate
    if rate and module.has_rng('dropout'):
      keep = jax.random.bernoulli(module.make_rng('dropout'), 1 - rate, x.shape)
      x = jnp.where(keep, x / (1 - rate), 0)
    y = jnp.tensordot(x.astype(self.a.dtype), self.a, axes=self.num_input_dims) * self.adapter.scale
    if self.token_split_dims is not None:
      y = constrain(y, (*self.token_split_dims, None))
    return jnp.tensordot(y, self.b, axes=1)


def declare_low_rank(
  module: nn.Module,
  adapter: LowRankAdapter,
  *,
  prefix: str = '',
  shape: tuple[int, ...],
  num_input_dims: int = 1,
  num_stacked_dims: int = 0,
  split_dims: SplitDims,
  dtype: Any,
  token_split_dims: SplitDims = None,
  tags: tuple[str, ...] = (),
) -> LowRankWeights:
  """Declares the weights of an adapter of a kernel: A uniform within +-1 / sqrt(I), as in `peft`, and B zero.

  Args:
    module: the Linen module that declared the kernel.
    adapter: its settings.
    prefix: of the names, for a kernel with a name of its own.
    shape, split_dims, tags: of the kernel, [E?, I..., O...].
    num_input_dims: how many dims I has.
    num_stacked_dims: how many dims count separate kernels.
    dtype: of the computation.
    token_split_dims: see LowRankWeights.
  """
  end = num_stacked_dims + num_input_dims
  stacked, inputs, outputs = shape[:num_stacked_dims], shape[num_stacked_dims:end], shape[end:]
  bound = 1 / math.sqrt(math.prod(inputs))
  a_split = None if split_dims is None else (*split_dims[:end], None)
  b_split = None if split_dims is None else (*split_dims[:num_stacked_dims], None, *split_dims[end:])
  tags, choices = (ADAPTER_TAG, *tags), _num_choices(adapter)
  if choices:  # in front of all other dims, and not split
    a_split, b_split = (split and (None, *split) for split in (a_split, b_split))
  a = declare_weight(
    module,
    f'{prefix}lora_a',
    shape=(*choices, *stacked, *inputs, adapter.rank),
    init=lambda rng, shape, dtype: jax.random.uniform(rng, shape, dtype, -bound, bound),
    split_dims=a_split,
    tags=tags,
    num_input_dims=None if choices else num_input_dims,
  ).astype(dtype)
  b = declare_weight(
    module,
    f'{prefix}lora_b',
    shape=(*choices, *stacked, adapter.rank, *outputs),
    init=jax.nn.initializers.zeros,
    split_dims=b_split,
    tags=tags,
    num_input_dims=None if choices else 1,
  ).astype(dtype)
  if token_split_dims is not None and not choices:  # the tokens of generation are fewer than the numbers of adapters
    a, b = gather_for_tokens(a, a_split, token_split_dims), gather_for_tokens(b, b_split, token_split_dims)
  return LowRankWeights(
    adapter=adapter,
    a=a,
    b=b,
    num_input_dims=num_input_dims,
    num_stacked_dims=num_stacked_dims,
    token_split_dims=token_split_dims,
  )


def declare_magnitude(
  module: nn.Module,
  kernel: jax.Array,
  weights: LowRankWeights,
  split_dims: SplitDims,
  *,
  prefix: str = '',
  tags: tuple[str, ...] = (),
) -> jax.Array:
  """Declares DoRA's magnitudes [E?, O...] and returns them divided by the lengths of the adapted kernel's columns.

  As in the paper (section 4.3) and in `peft`, no gradient goes through the lengths. Where there are several adapters to
  choose from, `declare_scales` takes the place of this.

  Args:
    module: the Linen module that declared the kernel.
    kernel, split_dims: [E?, I..., O...].
    weights: of the adapter.
    prefix, tags: as in `declare_low_rank`.
  """
  num_stacked = weights.num_stacked_dims
  end = num_stacked + weights.num_input_dims
  adapted = jax.lax.stop_gradient(kernel.astype(jnp.float32) + weights.product().astype(jnp.float32))
  lengths = functools.partial(column_lengths, num_input_dims=weights.num_input_dims, num_stacked_dims=num_stacked)
  magnitude = declare_weight(
    module,
    f'{prefix}lora_magnitude',
    shape=(*kernel.shape[:num_stacked], *kernel.shape[end:]),
    init=lambda rng, shape, dtype: lengths(kernel).astype(dtype),
    split_dims=None if split_dims is None else (*split_dims[:num_stacked], *split_dims[end:]),
    tags=(ADAPTER_TAG, 'no_decay', *tags),
  )
  return magnitude / lengths(adapted)


def declare_scales(module: nn.Module, weights: LowRankWeights, x: jax.Array, split_dims: SplitDims) -> jax.Array:
  """Declares the factors [N, O...] of several adapters' columns, 1 without DoRA; returns those of each row, [B, O...].

  Args:
    module: the Linen module that declared the kernel.
    weights: of the adapters.
    x: the input, [B, ...].
    split_dims: of the kernel.
  """
  scales = declare_weight(
    module,
    'lora_scale',
    shape=(*_num_choices(weights.adapter), *weights.b.shape[2:]),
    init=jax.nn.initializers.ones,
    split_dims=None if split_dims is None else (None, *split_dims[weights.num_input_dims :]),
    tags=(ADAPTER_TAG, 'no_decay'),
  )
  return take_rows(scales, x)


def _num_choices(adapter: LowRankAdapter) -> tuple[int, ...]:
  """Returns (N,), or () for a single adapter."""
  return (len(adapter.choices) + 1,) if adapter.choices else ()


def column_lengths(kernel: jax.Array, num_input_dims: int, num_stacked_dims: int = 0) -> jax.Array:
  """Returns the L2 norms of a kernel's columns, float32 [E?, O...] for [E?, I..., O...]."""
  dims = tuple(range(num_stacked_dims, num_stacked_dims + num_input_dims))
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
  if magnitude is not None:
    num_inputs = kernel.ndim - magnitude.ndim
    lengths = column_lengths(adapted, num_inputs, num_stacked_dims)
    # Padding has columns of length 0.
    scale = jnp.where(lengths > 0, magnitude.astype(jnp.float32) / jnp.where(lengths > 0, lengths, 1.0), 0.0)
    dims = range(num_stacked_dims, num_stacked_dims + num_inputs)
    adapted = adapted * jnp.broadcast_to(jnp.expand_dims(scale, tuple(dims)), adapted.shape)
  return adapted
