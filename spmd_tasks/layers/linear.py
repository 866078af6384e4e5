"""Linear: contracts the last dims of an input with a kernel of any rank.

Shapes: D model, F ffn, H heads, K head dim. `Linear(output_dims=F)` maps [..., D] -> [..., F];
`Linear(output_dims=(H, K))` maps [..., D] -> [..., H, K];
`Linear(output_dims=D, num_input_dims=2)` maps [..., H, K] -> [..., D].
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.layers.base import LINEAR_TAG, FanInNormal, declare_weight
from spmd_tasks.layers.products import DeclaredKernel, Product, plain_product
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import Initializer


class Linear(nn.Module, kw_only=True):
  """Computes y = x . kernel (+ bias) over the last `num_input_dims` dims of x.

  The kernel keeps one dim per logical dim ([D, H, K], never [D, H*K]). Each dim has its own split dim, so a mesh axis
  that does not divide H never forces a reshape across devices.

  Weights: `kernel`; with `use_bias` also `bias`; also those that an adapter declares.

  Fields:
    output_dims: sizes of the output's dims; an int for one dim.
    num_input_dims: how many trailing dims of the input are contracted. Their sizes are read from the input.
    use_bias: whether to add a bias (initially zero, tagged `no_decay`).
    dtype: of the computation and the output.
    kernel_init: initializer of the kernel; None means FanInNormal.
    split_dims: of the kernel, one entry per dim. The bias takes the last ones.
    activation_split_dims: of the output; None leaves its layout to the compiler.
    product: multiplies x with the kernel, see products.py: a QuantizedProduct, an adapter such as LowRankAdapter, or a
      function; None for plain_product.
  """

  output_dims: int | tuple[int, ...]
  num_input_dims: int = 1
  use_bias: bool = False
  dtype: Any = 'float32'
  kernel_init: Initializer | None = None
  split_dims: SplitDims = ('embed', 'mlp')
  activation_split_dims: SplitDims = None
  product: Product | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.multiply(x, plain_product if self.product is None else self.product)
    if self.use_bias:
      bias_split_dims = None if self.split_dims is None else self.split_dims[self.num_input_dims :]
      shape, zeros, tags = y.shape[x.ndim - self.num_input_dims :], jax.nn.initializers.zeros, ('no_decay',)
      bias = declare_weight(self, 'bias', shape=shape, init=zeros, split_dims=bias_split_dims, tags=tags)
      # The reshape makes the ranks equal: implicit rank promotion raises in this project.
      y = y + bias.astype(self.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return constrain(y, self.activation_split_dims)

  def multiply(self, x: jax.Array, product: Product) -> jax.Array:
    """Declares the kernel, and returns product(x, kernel).

    `intercept_products` lets a caller of the model replace the product, or the kernel.
    """
    output_dims = (self.output_dims,) if isinstance(self.output_dims, int) else tuple(self.output_dims)
    num_inputs, num_token_dims = self.num_input_dims, x.ndim - self.num_input_dims
    kernel = declare_weight(
      self,
      'kernel',
      shape=x.shape[num_token_dims:] + output_dims,
      init=self.kernel_init or FanInNormal(num_input_dims=num_inputs),
      split_dims=self.split_dims,
      tags=(LINEAR_TAG,),
      num_input_dims=num_inputs,
    )
    declared = DeclaredKernel(
      module=self,
      value=kernel,
      num_input_dims=num_inputs,
      split_dims=self.split_dims,
      dtype=self.dtype,
      token_split_dims=self.activation_split_dims and self.activation_split_dims[:num_token_dims],
    )
    return product(x, declared)


def intercept_products(
  replace: Callable[[Linear, Callable[[jax.Array, Product], jax.Array], jax.Array, Product], jax.Array],
) -> contextlib.AbstractContextManager[None]:
  """Context in which each Linear multiplies by replace(linear, multiply, x, product) in place of multiply(x, product).

  Of several contexts the outermost replaces first.
  """

  def intercept(call: Any, arguments: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
    if isinstance(context.module, Linear) and context.method_name == 'multiply':
      return replace(context.module, call, *arguments, **named)
    return call(*arguments, **named)

  return nn.intercept_methods(intercept)


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
  """Applies a Linear named `name`, a sublayer of a layer with the fields `dtype`, `use_bias` and `adapters`.

  `scale` is FanInNormal's; `use_bias` None takes the layer's.
  """
  return Linear(
    output_dims=output_dims,
    num_input_dims=num_input_dims,
    use_bias=layer.use_bias if use_bias is None else use_bias,
    dtype=layer.dtype,
    kernel_init=FanInNormal(scale=scale, num_input_dims=num_input_dims),
    split_dims=split_dims,
    activation_split_dims=activation_split_dims,
    product=adapter_of(layer.adapters, name),
    name=name,
  )(x)


def adapted(adapter: Any, **declared: Any) -> Any:
  """Returns the AdaptedKernel that a WeightAdapter makes of a DeclaredKernel of these attributes; None without one."""
  return None if adapter is None else adapter.adapt(DeclaredKernel(**declared))


def adapter_of(adapters: Sequence[Any], name: str) -> Any:
  """Returns the WeightAdapter of a projection, or None."""
  return next((adapter for adapter in adapters if name in adapter.names), None)


def kernels(*names: str) -> Mapping[str, str]:
  """Returns projection -> the name of its weight, which `adaptable` of a layer of Linears returns."""
  return {name: f'{name}/kernel' for name in names}
