"""Linear, and products with weights that are split over the devices of the tokens, whoever writes the collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import Linear
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.products import multiply_gathered
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, context_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights, weight_specs


@pytest.mark.parametrize(
  'input_dims, output_dims, einsum',
  [
    ((6,), 5, 'btd,df->btf'),
    ((6,), (3, 2), 'btd,dhk->bthk'),
    ((3, 2), 5, 'bthk,hkd->btd'),
  ],
)
@pytest.mark.parametrize('use_bias', [False, True])
def test_linear_is_an_einsum(rng, input_dims, output_dims, einsum, use_bias):
  x = rng.normal(size=(2, 4, *input_dims)).astype(np.float32)
  layer = Linear(output_dims=output_dims, num_input_dims=len(input_dims), use_bias=use_bias, split_dims=None)
  weights = unbox_weights(layer.init(jax.random.key(0), x)['params'])
  weights = jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32), weights)
  expected = np.einsum(einsum, x.astype(np.float64), weights['kernel'].astype(np.float64))
  if use_bias:
    expected = expected + weights['bias']
  y, transpose = jax.vjp(lambda weights, x: layer.apply({'params': weights}, x), weights, x)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

  cotangent = rng.normal(size=y.shape).astype(np.float32)
  (of_x, of_kernel), of_y = einsum.split('->')[0].split(','), einsum.split('->')[1]
  weights_cotangent, x_cotangent = transpose(cotangent)
  expected_x, expected_kernel = (
    np.einsum(f'{of_y},{of_kernel}->{of_x}', cotangent.astype(np.float64), weights['kernel']),
    np.einsum(f'{of_x},{of_y}->{of_kernel}', x.astype(np.float64), cotangent),
  )
  np.testing.assert_allclose(x_cotangent, expected_x, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(weights_cotangent['kernel'], expected_kernel, rtol=1e-5, atol=1e-5)


def test_bias_takes_the_output_split_dims_and_is_not_decayed():
  layer = Linear(output_dims=(3, 2), use_bias=True, split_dims=['embed', 'heads', 'head_dim'])
  specs = weight_specs(jax.eval_shape(layer.init, jax.random.key(0), np.zeros((1, 6), np.float32))['params'])
  assert specs['kernel'].split_dims == ('embed', 'heads', 'head_dim')
  assert specs['kernel'].tags == ('linear',)
  assert specs['bias'].split_dims == ('heads', 'head_dim')
  assert specs['bias'].tags == ('no_decay',)


B, T, D, F = 4, 6, 7, 9  # no axis of 2 divides D or F; rows and tokens that it does not divide are not split


def gradients(is_scattered: bool, split_dims=('embed', 'mlp')):
  """Returns a function (x, weight) -> the product, and the gradients of a function of it."""

  def product_of(x, weight):
    with layer_scope(scatters_gradients=is_scattered):
      return multiply_gathered(jnp.matmul, x, weight, 'float32', split_dims, ('batch', 'seq'))

  def of(x, weight):
    y, transpose = jax.vjp(product_of, x, weight)
    return y, *transpose(jnp.cos(y))

  return of


@pytest.mark.parametrize(
  'names, shape, rules, split_dims',
  [
    (('replica', 'data', 'mdl'), (2, 2, 2), DEFAULT_AXIS_RULES, ('embed', 'mlp')),
    (('replica', 'data', 'context', 'mdl'), (1, 2, 2, 2), context_axis_rules(DEFAULT_AXIS_RULES), ('mlp', 'embed')),
  ],
)
def test_scattered_gradients_are_the_same(names, shape, rules, split_dims):
  rng = np.random.default_rng(0)
  x, weight = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((B, T, D), (D, F)))
  mesh = MeshSpec(axis_names=names, ici_mesh_shape=shape).build()
  expected = gradients(True)(x, weight)  # without a scope nothing is gathered
  with sharding_scope(mesh, rules):
    scattered, plain = (jax.jit(gradients(is_on, split_dims)).trace(x, weight) for is_on in (True, False))
    found = scattered.lower().compile()(x, weight)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
  assert 'reduce_scatter' in str(scattered.jaxpr)
  assert 'reduce_scatter' not in str(plain.jaxpr)
