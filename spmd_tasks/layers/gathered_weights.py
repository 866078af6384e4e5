"""Multiplies tokens with a weight that the devices that share the tokens split too (fully sharded data parallelism).

Every layer with a kernel does so by `multiply_gathered`: the weight is gathered, and its gradient is summed over the
devices, each of which keeps its part. By default XLA writes both; with `scatters_gradients` in the LayerScope we do
(scattered_gradients.py).
"""

from collections.abc import Callable
from typing import Any

import jax

from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import gather_for_tokens, gathered_axes


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

  Args:
    product: multiplies x with the weight; the dims that count tokens come first in x and in the result.
    x: the tokens, of `dtype`.
    weight: in float32.
    dtype: of the computation; few bytes are gathered.
    split_dims: of the weight.
    token_split_dims: of the dims of x that count tokens; None gathers nothing.
  """
  if not gathered_axes(split_dims, token_split_dims):
    return product(x, weight.astype(dtype))

  def gather_and_multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    if current_layer_scope().scatters_gradients:
      from spmd_tasks.layers.scattered_gradients import multiply_on_devices

      return multiply_on_devices(product, x, weight.astype(dtype), split_dims, token_split_dims)
    return product(x, gather_for_tokens(weight.astype(dtype), split_dims, token_split_dims))

  # Layers are in a loop, where XLA cannot merge the two gathers; without prevent_cse there is no barrier to pay for.
  return jax.checkpoint(gather_and_multiply, prevent_cse=False)(x, weight)
