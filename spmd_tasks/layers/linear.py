"""Linear: contracts the last dims of an input with a kernel of any rank, which devices that share the tokens may split.

Shapes: D model, F ffn, H heads, K head dim. `Linear(output_dims=F)` maps [..., D] -> [..., F];
`Linear(output_dims=(H, K))` maps [..., D] -> [..., H, K];
`Linear(output_dims=D, num_input_dims=2)` maps [..., H, K] -> [..., D].
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import LAYER_KERNELS, LINEAR_TAG, FanInNormal, current_layer_scope, declare_weight
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import gather_for_tokens, gathered_axes
from spmd_tasks.sharding.weights import Initializer

if TYPE_CHECKING:
  from spmd_tasks.layers.adapter import AdaptedKernel


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
  ZeRO stage 3: Rajbhandari et al., 2020). Its gradient is summed over the devices, each of which keeps its part. By
  default XLA writes both; with `scatters_gradients` in the LayerScope we do (scattered_gradients.py).

  Args:
    product: multiplies x with the weight; the dims that count tokens come first in x and in the result.
    x, dtype: the tokens, of the dtype of the computation.
    weight, split_dims: in float32, and its split dims.
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


class Linear(nn.Module, kw_only=True):
  """Computes y = x . kernel (+ bias) over the last `num_input_dims` dims of x.

  The kernel keeps one dim per logical dim ([D, H, K], never [D, H*K]). Each dim has its own split dim, so a mesh axis
  that does not divide H never forces a reshape across devices.

  Weights: `kernel`; with `use_bias` also `bias`; with `adapter` also those that it declares.

  Fields:
    output_dims: sizes of the output's dims; an int for one dim.
    num_input_dims: how many trailing dims of the input are contracted. Their sizes are read from the input.
    use_bias: whether to add a bias (initially zero, tagged `no_decay`).
    dtype: of the computation and the output.
    kernel_init: initializer of the kernel; None means FanInNormal.
    split_dims: of the kernel, one entry per dim. The bias takes the last ones.
    activation_split_dims: of the output; None leaves its layout to the compiler.
    adapter: a WeightAdapter, which changes what the kernel computes (adapter.py); None for none.
  """

  output_dims: int | tuple[int, ...]
  num_input_dims: int = 1
  use_bias: bool = False
  dtype: Any = 'float32'
  kernel_init: Initializer | None = None
  split_dims: SplitDims = ('embed', 'mlp')
  activation_split_dims: SplitDims = None
  adapter: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    output_dims = (self.output_dims,) if isinstance(self.output_dims, int) else tuple(self.output_dims)
    num_inputs, split_dims, num_token_dims = self.num_input_dims, self.split_dims, x.ndim - self.num_input_dims
    shape = x.shape[num_token_dims:] + output_dims
    kernel_init = self.kernel_init or FanInNormal(num_input_dims=self.num_input_dims)
    multiply: Any = functools.partial(jnp.tensordot, axes=num_inputs)
    if quantization := current_layer_scope().quantization:
      from spmd_tasks.layers.quantized_products import product_of

      multiply = product_of(quantization, self, num_inputs, multiply)
    kernels: Any = self.get_variable(LAYER_KERNELS, 'kernel')
    if kernels is not None:
      branches = [lambda x, kernel=kernel: multiply(x, kernel.astype(self.dtype)) for kernel in kernels]
      y = jax.lax.switch(current_layer_scope().layers[0], branches, x.astype(self.dtype))
      return self._with_bias(y, output_dims)
    tags = (LINEAR_TAG,)
    kernel = declare_weight(
      self, 'kernel', shape=shape, init=kernel_init, split_dims=split_dims, tags=tags, num_input_dims=num_inputs
    )
    token_split_dims = None
    if self.activation_split_dims is not None and x.size >= kernel.size:  # fewer tokens, as in decoding, travel instead
      token_split_dims = self.activation_split_dims[:num_token_dims]
    y = multiply_gathered(multiply, x.astype(self.dtype), kernel, self.dtype, self.split_dims, token_split_dims)
    adapted_kernel = adapted(
      self.adapter,
      module=self,
      value=kernel,
      num_input_dims=num_inputs,
      split_dims=split_dims,
      dtype=self.dtype,
      token_split_dims=self.activation_split_dims and self.activation_split_dims[:num_token_dims],
    )
    if adapted_kernel is not None:
      y = adapted_kernel.outputs(x, y)
    return self._with_bias(y, output_dims)

  @nn.nowrap
  def _with_bias(self, y: jax.Array, output_dims: tuple[int, ...]) -> jax.Array:
    if self.use_bias:
      bias_split_dims = None if self.split_dims is None else self.split_dims[self.num_input_dims :]
      zeros, tags = jax.nn.initializers.zeros, ('no_decay',)
      bias = declare_weight(self, 'bias', shape=output_dims, init=zeros, split_dims=bias_split_dims, tags=tags)
      # The reshape makes the ranks equal: implicit rank promotion raises in this project.
      y = y + bias.astype(self.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return constrain(y, self.activation_split_dims)


def project(
  layer: Any,
  name: str,
  x: jax.Array,
  output_dims: int | tuple[int, ...],
  split_dims: SplitDims,
  activation_split_dims: SplitDims,
  *,
  scale: float,
  use_bias: bool | None = None,
  num_input_dims: int = 1,
) -> jax.Array:
  """Applies a Linear of this name below a layer with the fields `dtype`, `use_bias` and `adapters`.

  `scale` is FanInNormal's; `use_bias` None is the layer's.
  """
  return Linear(
    output_dims=output_dims,
    num_input_dims=num_input_dims,
    use_bias=layer.use_bias if use_bias is None else use_bias,
    dtype=layer.dtype,
    kernel_init=FanInNormal(scale=scale, num_input_dims=num_input_dims),
    split_dims=split_dims,
    activation_split_dims=activation_split_dims,
    adapter=adapter_of(layer.adapters, name),
    name=name,
  )(x)


def adapted(adapter: Any, **declared: Any) -> 'AdaptedKernel | None':
  """Returns the kernel that a DeclaredKernel of these attributes becomes by a WeightAdapter; None without one."""
  if adapter is None:
    return None
  from spmd_tasks.layers.adapter import DeclaredKernel

  return adapter.adapt(DeclaredKernel(**declared))


def adapter_of(adapters: Sequence[Any], name: str) -> Any:
  """Returns the WeightAdapter of a projection, None if it has none."""
  return next((adapter for adapter in adapters if name in adapter.names), None)


def kernels(*names: str) -> Mapping[str, str]:
  """Returns what `adaptable` of a layer of Linears says: projection -> the name of its weight."""
  return {name: f'{name}/kernel' for name in names}
