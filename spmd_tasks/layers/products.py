"""Products: the functions that multiply tokens with a kernel that a layer has declared.

    Linear(output_dims=64)                                            # plain_product
    Linear(output_dims=64, product=QuantizedProduct(dtype='int8'))    # quantized_products.py
    Linear(output_dims=64, product=LowRankAdapter(rank=8, alpha=16.0))    # adapter.py, adapters/low_rank.py

Shapes: T... dims that count tokens, I... dims that are contracted, O... dims of the output.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import current_layer_scope, instantiate
from spmd_tasks.layers.scattered_gradients import multiply_on_devices
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import gather_for_tokens, gathered_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeclaredKernel:
  """A kernel that a layer has declared.

  Attributes:
    module: the layer.
    value: float32 [E?, I..., O...]; E counts experts.
    prefix: of the names of weights beside it, for a kernel that is not called `kernel`.
    num_input_dims, num_stacked_dims: how many dims I has, and how many count separate kernels, as E does.
    split_dims, tags: of the kernel.
    dtype: of the computation.
    token_split_dims: of the dims of inputs that count tokens, such as ('batch', 'seq'); None: not known.
  """

  module: nn.Module
  value: jax.Array
  prefix: str = ''
  num_input_dims: int = 1
  num_stacked_dims: int = 0
  split_dims: SplitDims
  tags: tuple[str, ...] = ()
  dtype: Any
  token_split_dims: SplitDims = None


class Product(Protocol):
  """Multiplies an input with a kernel: a function, or an object with settings."""

  def __call__(self, x: jax.Array, kernel: DeclaredKernel, /) -> jax.Array:
    """Returns [T..., O...] in the kernel's dtype for x [T..., I...] and the kernel [I..., O...]."""


def plain_product(x: jax.Array, kernel: DeclaredKernel) -> jax.Array:
  """Returns x . kernel, both cast to the kernel's dtype."""
  return multiply_kernel(functools.partial(_contract, kernel.num_input_dims), x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(num_dims: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns [T..., O...] for x [T..., I...] and the kernel [I..., O...].

  JAX's own gradient of the kernel is computed as [O..., I...] and transposed, for which XLA's CPU compiler writes the
  gradient of the result in another order.
  """
  return jnp.tensordot(x, kernel, axes=num_dims)


def _contract_forward(num_dims, x, kernel):
  saved = x.value if kernel.perturbed else None, kernel.value if x.perturbed else None  # a frozen kernel needs no x
  return jnp.tensordot(x.value, kernel.value, axes=num_dims), saved


def _contract_backward(num_dims, saved, cotangent):
  x, kernel = saved
  cotangent, of_x, of_kernel = instantiate(cotangent), None, None
  if kernel is not None:
    outputs = range(num_dims, kernel.ndim)
    of_outputs = range(cotangent.ndim - len(outputs), cotangent.ndim)
    of_x = jax.lax.dot_general(cotangent, kernel, ((of_outputs, outputs), ((), ())))
  if x is not None:
    tokens = range(x.ndim - num_dims)
    of_kernel = jax.lax.dot_general(x, cotangent, ((tokens, tokens), ((), ())))
  return of_x, of_kernel


_contract.defvjp(_contract_forward, _contract_backward, symbolic_zeros=True)


def multiply_kernel(
  multiply: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: DeclaredKernel
) -> jax.Array:
  """Returns multiply(x, kernel) of two arrays of the kernel's dtype.

  The kernel is gathered over the axes that split the tokens, unless x is smaller, as in decoding: then x travels.
  """
  token_split_dims = kernel.token_split_dims if x.size >= kernel.value.size else None
  x = x.astype(kernel.dtype)
  return multiply_gathered(multiply, x, kernel.value, kernel.dtype, kernel.split_dims, token_split_dims)


def multiply_gathered(
  multiply: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weight: jax.Array,
  dtype: Any,
  split_dims: SplitDims,
  token_split_dims: SplitDims,
) -> jax.Array:
  """Returns multiply(x, weight), the weight cast to `dtype` and gathered over the axes that split the tokens.

  The backward pass gathers the weight again instead of keeping it (fully sharded data parallelism, ZeRO stage 3:
  Rajbhandari et al., 2020). Its gradient is summed over the devices, each of which keeps its part. By default XLA
  inserts both collectives; with `scatters_gradients` in the LayerScope we do (scattered_gradients.py).

  Args:
    multiply: a function of x and the weight; the dims that count tokens come first in x and in the result.
    x, dtype: the tokens, of the dtype of the computation.
    weight, split_dims: in float32, and its split dims.
    token_split_dims: of the dims of x that count tokens; None gathers nothing.
  """
  if not gathered_axes(split_dims, token_split_dims):
    return multiply(x, weight.astype(dtype))

  def gather_and_multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    if current_layer_scope().scatters_gradients:
      return multiply_on_devices(multiply, x, weight.astype(dtype), split_dims, token_split_dims)
    return multiply(x, gather_for_tokens(weight.astype(dtype), split_dims, token_split_dims))

  # Layers are in a loop, where XLA cannot merge the two gathers; without prevent_cse there is no barrier to pay for.
  return jax.checkpoint(gather_and_multiply, prevent_cse=False)(x, weight)
