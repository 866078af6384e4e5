"""Products in int8 and fp8: bit for bit those of an emulation in numpy and ml_dtypes, forward and backward."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from spmd_tasks.adapters import LowRankAdapter
from spmd_tasks.layers import Linear, plain_product
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.quantized_products import RECIPES, QuantizedProduct, quantized_product, quantizing
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import current_sharding_scope, sharding_scope

RULES = (('batch', 'data'), ('embed', 'data'), ('mlp', 'mdl'), ('act_mlp', 'mdl'))

NUMBERS = {
  'int8': (np.int8, 127),
  'float8_e4m3fn': (ml_dtypes.float8_e4m3fn, 448),
  'float8_e5m2': (ml_dtypes.float8_e5m2, 57344),
}
F32 = np.float32


def emulate_operand(x, dtype, axis, bound=None):
  """Returns the numbers of the type, as float64, and float32 scales: one along `axis`, or of the whole array (None)."""
  kind, end = NUMBERS[dtype]
  largest = np.abs(x).max(axis=axis, keepdims=True) if bound is None else np.full((1, 1), bound, F32)
  largest = np.where(largest == 0, F32(end), largest)
  scaled = x * (F32(end) / largest)
  if bound is not None:
    scaled = np.clip(scaled, F32(-end), F32(end))
  values = np.rint(scaled) if kind is np.int8 else scaled
  return values.astype(kind).astype(np.float64), largest * F32(1 / end)


def emulate(how, x, w, g):
  """Returns (y, dx, dw) for x [T, I], w [I, O] and the gradient g [T, O] of y; sums are exact in float64."""
  along = (lambda axis: None) if how.scale == 'tensor' else (lambda axis: axis)
  (qx, sx), (qw, sw) = (emulate_operand(each, how.dtype, along(i), how.bound) for each, i in ((x, 1), (w, 0)))
  y = (qx @ qw).astype(F32) * (sx * sw)
  if how.gradient_dtype is None:
    dx, dw = (g.astype(np.float64) @ w.T).astype(F32), (x.T.astype(np.float64) @ g).astype(F32)
  else:
    # Scales of channels are multiplied into the gradient, one for all into the result.
    is_one, one = how.bound is not None or how.scale == 'tensor', np.ones((1, 1), F32)
    q, s = emulate_operand(g * (one if is_one else sw), how.gradient_dtype, along(1))
    dx = (q @ qw.T).astype(F32) * s * (sw if is_one else one)
    q, s = emulate_operand(g * (one if is_one else sx), how.gradient_dtype, along(0))
    dw = (qx.T @ q).astype(F32) * s * (sx if is_one else one)
  if how.bound is not None:
    dx, dw = np.where(np.abs(x) <= how.bound, dx, 0), np.where(np.abs(w) <= how.bound, dw, 0)
  return y, dx, dw


def draw(rng, shape, powers=3):
  """Numbers of 6 bits within few powers of two, zeros among them: sums of their fp8 products are exact in float32."""
  numbers = rng.integers(32, 64, shape) / 4 * 2.0 ** rng.integers(0, powers, shape) * rng.choice([-1, 1], shape)
  return (numbers * (rng.random(shape) < 0.8)).astype(F32)


@pytest.mark.parametrize(
  'name, dtype',
  [
    *((name, np.float32) for name in (*RECIPES, 'by whole tensors', 'a bound that cuts')),
    *((name, ml_dtypes.bfloat16) for name in ('int8', 'int8_forward', 'fp8_full')),
  ],
)
def test_product_and_gradients_are_those_of_the_emulation(name, dtype):
  how = (
    RECIPES.get(name)
    or {
      'by whole tensors': QuantizedProduct(dtype='int8', gradient_dtype='int8', scale='tensor'),
      'a bound that cuts': QuantizedProduct(dtype='float8_e4m3fn', bound=30.0),
    }[name]
  )
  rng = np.random.default_rng(0)
  x, w, g = draw(rng, (12, 16)), draw(rng, (16, 6)), draw(rng, (12, 6), powers=1)
  x[3], w[:, 2], g[:, 4] = 0, 0, 0  # channels of zeros, as padding is

  def product(x, w, g):
    y, backward = jax.vjp(functools.partial(quantized_product, how, 2), x, w)
    return y, *backward(g)

  # The same as x [2, 6, 4, 4] and w [4, 4, 3, 2]: channels are of all their dims.
  shaped = (x.reshape(2, 6, 4, 4), w.reshape(4, 4, 3, 2), g.reshape(2, 6, 3, 2))
  y, dx, dw = jax.jit(product)(*(each.astype(dtype) for each in shaped))
  for made, expected in zip((y, dx, dw), emulate(how, x, w, g), strict=True):
    np.testing.assert_array_equal(np.asarray(made).reshape(expected.shape), expected.astype(dtype))
  assert np.abs(np.asarray(y).reshape(12, 6) - x @ w).max() > 0  # it is another product


@pytest.mark.parametrize(
  'recipe, scatters', [('int8', False), ('int8', True), ('fp8_full', True), ('fp8_hybrid', False)]
)
def test_a_mesh_changes_no_bit(recipe, scatters):
  """Of a Linear whose tokens, inputs and outputs are all split: a channel's maximum is that of all devices."""
  layer = Linear(
    output_dims=12,
    split_dims=('embed', 'mlp'),
    activation_split_dims=('batch', None, 'act_mlp'),
    product=RECIPES[recipe],
  )
  rng = np.random.default_rng(1)
  x, kernel, g = draw(rng, (8, 3, 20)), draw(rng, (20, 12)), draw(rng, (8, 3, 12), powers=1)

  def product(x, kernel, g):
    with layer_scope(scatters_gradients=scatters):
      y, backward = jax.vjp(lambda x, kernel: layer.apply({'params': {'kernel': kernel}}, x), x, kernel)
      return y, *backward(g)

  expected = emulate(RECIPES[recipe], x.reshape(24, 20), kernel, g.reshape(24, 12))
  with sharding_scope(MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2)).build(), RULES):
    split = [
      jax.device_put(each, jax.NamedSharding(current_sharding_scope().mesh, spec))
      for each, spec in zip((x, kernel, g), (jax.P('data'), jax.P('data', 'mdl'), jax.P('data', None, 'mdl')))
    ]
    made = jax.jit(product)(*split)
  for i, (of_mesh, whole) in enumerate(zip(made, expected, strict=True)):
    # Scattered gradients of weights are sums of the devices' products in float32, which round in another order.
    atol = 1e-6 * np.abs(whole).max() if scatters and i == 2 else 0
    np.testing.assert_allclose(np.asarray(of_mesh).reshape(whole.shape), whole, rtol=0, atol=atol)


def test_a_setting_quantizes_below_adapters_and_leaves_other_products():
  adapter = LowRankAdapter(rank=1, alpha=1.0)
  rng = np.random.default_rng(2)
  x = draw(rng, (3, 20))
  weights = {'kernel': draw(rng, (20, 12)), 'lora_a': draw(rng, (20, 1)), 'lora_b': draw(rng, (1, 12))}

  def apply(product, setting=None):
    def compute(weights, x):
      with quantizing(setting):
        return Linear(output_dims=12, product=product).apply({'params': weights}, x)

    return np.asarray(jax.jit(compute)(weights, x))

  added = apply(adapter) - apply(None)
  np.testing.assert_array_equal(apply(None, {'^kernel$': 'int8'}), apply(RECIPES['int8']))
  np.testing.assert_allclose(apply(adapter, 'int8') - apply(RECIPES['int8']), added, rtol=1e-4, atol=1e-3)
  np.testing.assert_array_equal(apply(lambda x, kernel: 2 * plain_product(x, kernel), 'int8'), 2 * apply(None))
