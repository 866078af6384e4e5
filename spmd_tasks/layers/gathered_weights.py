"""Multiplies tokens with a weight that the devices that share the tokens split too (fully sharded data parallelism).

`multiply_gathered` gathers the weight; its gradient is summed over the devices, each of which keeps its part. XLA
writes both; with `scatters_gradients` in the LayerScope we do (scattered_gradients.py).
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_platform, gather_for_tokens, is_split_over_tokens


def multiply_gathered(
  product: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weight: jax.Array,
  dtype: Any,
  split_dims: SplitDims,
  token_split_dims: SplitDims,
) -> jax.Array:
  """Returns product(x, weight), the weight cast to `dtype` and gathered over the axes that split the tokens.

  Nothing of the gathered weight is kept for the backward pass, which gathers it again (fully sharded data parallelism,
  ZeRO stage 3: Rajbhandari et al., 2020). Kept, the weights of all layers would be on every device.

  The dims that count tokens come first in x, which has this dtype, and in the product; `token_split_dims` are theirs,
  and without them nothing is gathered. `weight` is in float32.
  """
  if not is_split_over_tokens(split_dims, token_split_dims):
    return product(x, weight.astype(dtype))

  def gather_and_multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    if current_layer_scope().scatters_gradients:
      from spmd_tasks.layers.scattered_gradients import multiply_on_devices

      return multiply_on_devices(product, x, weight.astype(dtype), split_dims, token_split_dims)
    return product(x, gather_for_tokens(weight.astype(dtype), split_dims, token_split_dims))

  # Layers are in a loop, where XLA cannot merge the two gathers; without prevent_cse there is no barrier to pay for.
  return jax.checkpoint(gather_and_multiply, prevent_cse=False)(x, weight)


def multiply(x: jax.Array, kernel: jax.Array, num_dims: int = 1, dtype: Any = None) -> jax.Array:
  """Returns x . kernel over the last `num_dims` dims of x, in `dtype`.

  JAX writes a kernel's gradient as (cotangents^T . x)^T. XLA on CPUs transposes the cotangents for it, with what they
  come from. Where x is no larger, it is x^T . cotangents here, and there is no forward-mode derivative.
  """
  product = functools.partial(jnp.tensordot, axes=num_dims, preferred_element_type=dtype)
  if current_platform() != 'cpu' or math.prod(x.shape[-num_dims:]) ** 2 > kernel.size:
    return product(x, kernel)
  tokens, outputs = tuple(range(x.ndim - num_dims)), tuple(range(num_dims - kernel.ndim, 0))

  def forward(x: Any, kernel: Any) -> Any:  # a kernel without a tangent is frozen
    return product(x.value, kernel.value), (x.value if kernel.perturbed else None, kernel.value)

  def backward(saved: Any, cotangent: jax.Array) -> Any:
    x, kernel = saved
    of_x = jnp.tensordot(cotangent, kernel, (outputs, outputs)).astype(kernel.dtype)
    return of_x, None if x is None else jnp.tensordot(x, cotangent, (tokens, tokens)).astype(kernel.dtype)

  (own := jax.custom_vjp(product)).defvjp(forward, backward, symbolic_zeros=True)
  return own(x, kernel)
