"""Weights that are split over the devices of the tokens: products and gradients, whoever writes the collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.linear import multiply_gathered
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, context_axis_rules
from spmd_tasks.sharding.specs import sharding_scope

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
