"""Products in int8 and fp8 for training: a Linear quantizes both operands as it multiplies; weights stay in float32.

    Task(..., quantization='int8')                                     # every Linear, by one of RECIPES
    Task(..., quantization={'ffn/down': None, 'ffn/': 'fp8_full'})     # the first pattern that a kernel's name has

Each channel, the values of one sum, has a scale: its largest absolute value becomes the largest number of the dtype.
x . w is (values of x . values of w), summed in int32 or float32, times the scales of its row and its column. The
gradients dx = g . w' and dw = x' . g use the values of x and w again. They sum over the dims of these scales, so the
scales are multiplied into g first, and g is quantized once for each gradient. Google's `qwix` does the same, and has
these recipes (MaxText uses them). `qwix` itself is not used: while it traces a model, it replaces the code objects of
JAX's functions in the whole process, and it exports no product with a backward pass.

Zeros, such as padding, change no scale. The scale of a channel that is sharded over devices is of the maximum over all
of them, so that any mesh gives the same numbers. Rows that are summed in parts, such as microbatches, have one scale
per part in dw.

Shapes: T... dims that count tokens, I... dims that are contracted, O... dims of the output.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.adapter import WeightAdapter
from spmd_tasks.layers.base import LINEAR_TAG, current_layer_scope
from spmd_tasks.layers.linear import Linear, intercept_products
from spmd_tasks.layers.products import DeclaredKernel, Product, multiply_kernel, plain_product
from spmd_tasks.sharding.quantized import dequantized_spec
from spmd_tasks.sharding.weight_names import compile_pattern, matching_names
from spmd_tasks.sharding.weights import is_quantized, leaf_name

# The largest number used of each dtype. int8 does not use -128, so that it is symmetric.
_LARGEST = {'int8': 127.0, 'float8_e4m3fn': 448.0, 'float8_e5m2': 57344.0}
_TINY = 2.0**-100  # a channel whose largest value is smaller becomes zeros: a quotient by it might be infinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedProduct:
  """A Product of quantized operands, which a Linear can have as its `product`, and its settings.

  Attributes:
    dtype: of inputs and weights: 'int8', 'float8_e4m3fn' or 'float8_e5m2'.
    gradient_dtype: of the output's gradient, for a quantized backward pass; None for a straight-through one, with the
      unquantized operands in the dtype of the computation (Bengio et al., 2013, arXiv 1308.3432).
    scale: 'channel', or 'tensor' for one scale per operand.
    bound: fixes the scale of inputs and weights; larger values are clipped, and have no gradient. None scales by the
      largest value.
  """

  dtype: str = 'int8'
  gradient_dtype: str | None = None
  scale: str = 'channel'
  bound: float | None = None

  def __post_init__(self):
    for name, known in (
      ('dtype', (*_LARGEST,)),
      ('gradient_dtype', (*_LARGEST, None)),
      ('scale', ('channel', 'tensor')),
    ):
      if (value := getattr(self, name)) not in known:
        raise UserError(f'{name}={value!r} of a quantized product must be one of {known}.')
    if self.bound is not None and not 0 < self.bound < float('inf'):
      raise UserError(f'bound={self.bound!r} of a quantized product must be a positive number, or None.')
    if self.gradient_dtype and (self.dtype == 'int8') != (self.gradient_dtype == 'int8'):
      raise UserError(
        f'gradient_dtype={self.gradient_dtype!r} is multiplied with dtype={self.dtype!r}: both must be int8, or both '
        'float8.'
      )

  def __call__(self, x: jax.Array, kernel: DeclaredKernel) -> jax.Array:
    if current_layer_scope().plain_products:
      return plain_product(x, kernel)
    return multiply_kernel(functools.partial(quantized_product, self, kernel.num_input_dims), x, kernel)


_E4M3, _E5M2 = 'float8_e4m3fn', 'float8_e5m2'
RECIPES: Mapping[str, QuantizedProduct] = {
  'int8': QuantizedProduct(dtype='int8', gradient_dtype='int8'),  # MaxText's, with qwix
  'int8_forward': QuantizedProduct(dtype='int8'),  # AQT's, with unquantized gradients
  'fp8': QuantizedProduct(dtype=_E4M3, gradient_dtype=_E4M3),  # MaxText's
  'fp8_forward': QuantizedProduct(dtype=_E4M3),  # MaxText's aqt_fp8
  'fp8_full': QuantizedProduct(dtype=_E4M3, gradient_dtype=_E5M2, bound=224.0),  # MaxText's, with bounds for Ironwood
  # Float8CurrentScaling of NVIDIA's Transformer Engine, in its format HYBRID.
  'fp8_hybrid': QuantizedProduct(dtype=_E4M3, gradient_dtype=_E5M2, scale='tensor'),
}


Setting = str | QuantizedProduct | Mapping[str, str | QuantizedProduct | None]  # of `Task.quantization`


def rules_of(setting: Setting) -> dict[str, QuantizedProduct | None]:
  """Returns the products by pattern, in order. Raises a UserError if there is no such recipe."""
  rules: dict[str, QuantizedProduct | None] = {}
  for pattern, product in (setting if isinstance(setting, Mapping) else {'': setting}).items():
    if product is not None and not isinstance(product, QuantizedProduct) and product not in RECIPES:
      raise UserError(
        f'task.quantization has {product!r}: it must be one of {", ".join(RECIPES)}, a QuantizedProduct, or a dict of '
        'these, or of None, by patterns of names.'
      )
    rules[pattern] = RECIPES[product] if isinstance(product, str) else product
  return rules


def quantizing(setting: Setting | None) -> contextlib.AbstractContextManager[None]:
  """Context in which a model is called (traced): its Linears multiply as `setting` says, a value of Task.quantization.

  An adapter then adapts the quantized product. A Linear with another product of its own keeps it.
  """
  if setting is None:
    return contextlib.nullcontext()
  rules = [(compile_pattern(pattern), product) for pattern, product in rules_of(setting).items()]

  def quantize(layer: Linear, multiply: Any, x: jax.Array, product: Product) -> jax.Array:
    name = '/'.join((*layer.path, 'kernel'))
    quantized = next((product for pattern, product in rules if pattern.search(name)), None)
    if quantized is not None and product is plain_product:
      product = quantized
    elif quantized is not None and isinstance(product, WeightAdapter):
      product = functools.partial(product, product=quantized)
    return multiply(x, product)

  return intercept_products(quantize)


def check_patterns(setting: Setting, weight_specs: Any) -> None:
  """Raises a UserError if a pattern matches no kernel of a Linear, or matches experts."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(weight_specs, is_leaf=is_quantized)
  tags = {leaf_name(path): dequantized_spec(spec).tags for path, spec in leaves}
  known = [name for name in tags if {LINEAR_TAG, 'expert'}.intersection(tags[name])]
  seen: set[str] = set()  # matched by an earlier pattern
  for pattern, product in rules_of(setting).items():
    names = matching_names((pattern,), known, setting='task.quantization')
    experts = [name for name in names if 'expert' in tags[name] and name not in seen]
    seen.update(names)
    if experts and product is not None and isinstance(setting, Mapping):
      raise UserError(
        f'task.quantization has {pattern!r}, which matches {experts[0]}: grouped products of experts are not '
        'quantized; give patterns of other layers, such as "attention/", or first "experts/": None.'
      )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_product(settings: QuantizedProduct, num_inputs: int, x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns x . weight of quantized operands, in the dtype of x; `settings` also says how gradients are computed.

  Args:
    settings: dtypes and scales.
    num_inputs: how many dims I... has.
    x, weight: floating [T..., I...] and [I..., O...].
  """
  return _forward(settings, num_inputs, x, weight)[0]


def _forward(settings: QuantizedProduct, num_inputs: int, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
  num_tokens, num_outputs = x.ndim - num_inputs, weight.ndim - num_inputs
  inputs, rows = range(num_tokens, x.ndim), range(num_inputs)
  quantized_x = _quantize(
    x, settings.dtype, settings, inputs, bound=settings.bound, crosses_tokens=settings.scale == 'tensor'
  )
  quantized_weight = _quantize(weight, settings.dtype, settings, rows, bound=settings.bound, crosses_tokens=False)
  y = _multiply(quantized_x[0], quantized_weight[0], inputs, rows)
  y = y * (
    _row_scales(quantized_x[1], num_tokens, num_outputs) * _column_scales(quantized_weight[1], num_inputs, num_tokens)
  )
  is_inside = None if settings.bound is None else tuple(jnp.abs(operand) <= settings.bound for operand in (x, weight))
  residuals = (x, weight) if settings.gradient_dtype is None else (quantized_x, quantized_weight)
  return y.astype(x.dtype), (*residuals, is_inside)


def _backward(settings: QuantizedProduct, num_inputs: int, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, weight, is_inside = residuals
  if settings.gradient_dtype is None:
    dx, dw = jax.vjp(functools.partial(jnp.tensordot, axes=num_inputs), x, weight)[1](g)
  else:
    (x, row_scales), (weight, column_scales) = x, weight
    num_tokens, num_outputs = x.ndim - num_inputs, weight.ndim - num_inputs
    tokens, outputs = range(num_tokens), range(num_tokens, g.ndim)
    for_dx = for_dw = g
    after_dx = after_dw = jnp.float32(1)
    if settings.bound is None and settings.scale == 'channel':
      for_dx = g.astype(jnp.float32) * _column_scales(column_scales, num_inputs, num_tokens)
      for_dw = g.astype(jnp.float32) * _row_scales(row_scales, num_tokens, num_outputs)
    else:  # one scale, which is multiplied in afterwards, so that XLA reads g only once
      after_dx, after_dw = column_scales.reshape(()), row_scales.reshape(())
    values, scale = _quantize(
      for_dx, settings.gradient_dtype, settings, outputs, crosses_tokens=settings.scale == 'tensor'
    )
    dx = _multiply(values, weight, outputs, range(num_inputs, weight.ndim))
    dx = dx * _row_scales(scale, num_tokens, num_inputs) * after_dx
    values, scale = _quantize(for_dw, settings.gradient_dtype, settings, tokens, crosses_tokens=True)
    dw = _multiply(x, values, tokens, tokens) * _column_scales(scale, num_tokens, num_inputs) * after_dw
  if is_inside is not None:
    dx, dw = (jnp.where(inside, gradient, 0) for inside, gradient in zip(is_inside, (dx, dw)))
  return dx.astype(g.dtype), dw.astype(g.dtype)


quantized_product.defvjp(_forward, _backward)


def _quantize(
  x: jax.Array,
  dtype: str,
  settings: QuantizedProduct,
  summed: Sequence[int],
  *,
  bound: float | None = None,
  crosses_tokens: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns (values, float32 scales of size 1 in the dims `summed`); x is approximately values * scales."""
  end = _LARGEST[dtype]
  if bound is not None:
    largest = jnp.full((1,) * x.ndim, bound, jnp.float32)
  else:
    largest = jnp.max(jnp.abs(x), axis=None if settings.scale == 'tensor' else (*summed,), keepdims=True)
    largest = largest.astype(jnp.float32)
    if crosses_tokens and (axes := jax.typeof(largest).mat.varying):  # in a shard_map over the tokens
      largest = jax.lax.pmax(largest, (*axes,))
    largest = jnp.where(largest < _TINY, end, largest)  # NaN stays NaN
  scaled = x.astype(jnp.float32) * (end / largest)
  if bound is not None:
    scaled = jnp.clip(scaled, -end, end)
  # Multiply by 1 / end: XLA may rewrite a division by a constant so, and bits must not depend on it.
  return (jnp.round(scaled) if dtype == 'int8' else scaled).astype(dtype), largest * (1 / end)


def _multiply(x: jax.Array, y: jax.Array, x_dims: Sequence[int], y_dims: Sequence[int]) -> jax.Array:
  """Contracts values over these dims in int32 or float32; returns float32."""
  sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
  dims = ((*x_dims,), (*y_dims,)), ((), ())
  return jax.lax.dot_general(x, y, dims, preferred_element_type=sum_dtype).astype(jnp.float32)


def _row_scales(scale: jax.Array, num_tokens: int, num_others: int) -> jax.Array:
  """Reshapes scales of rows to [T..., 1...], to broadcast over [T..., others...]."""
  return scale.reshape(*scale.shape[:num_tokens], *(1,) * num_others)


def _column_scales(scale: jax.Array, num_summed: int, num_others: int) -> jax.Array:
  """Reshapes scales of columns to [1..., O...], to broadcast over [others..., O...]."""
  return scale.reshape(*(1,) * num_others, *scale.shape[num_summed:])
