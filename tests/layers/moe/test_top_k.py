"""The same places as a sort finds, on one device and on many, where no device sees another's rows."""

import jax
import numpy as np
import pytest

from spmd_tasks.layers.moe.top_k import top_k_ids
from spmd_tasks.sharding.mesh import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope

RULES = (('batch', ('replica', 'data')), ('seq', 'mdl'))


def draw(rng, batch_size):
  return rng.integers(0, 5, size=(batch_size, 6, 7)).astype(np.float32)  # with ties


def expected(x, k):
  return np.argsort(-x, axis=-1, kind='stable')[..., :k]


def on_mesh(mesh_shape, split_dims):
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=mesh_shape).build()

  @jax.jit
  def search(x):
    with sharding_scope(mesh, RULES):
      return top_k_ids(x, 3, split_dims)

  return mesh, search


@pytest.mark.parametrize('k', [1, 3, 7])
def test_finds_the_greatest_and_of_equal_ones_the_first(k, rng):
  x = draw(rng, 4)
  ids = top_k_ids(x, k, ('batch', 'seq', None))
  assert ids.dtype == 'int32'
  np.testing.assert_array_equal(ids, expected(x, k))


@pytest.mark.parametrize('split_dims', [('batch', 'seq', None), ('batch', None, 'seq'), (None, None, None), None])
@pytest.mark.parametrize('mesh_shape', [(1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize('batch_size', [8, 3])
def test_any_layout_even_or_uneven_finds_the_same(split_dims, mesh_shape, batch_size, rng):
  x = draw(rng, batch_size)
  _, search = on_mesh(mesh_shape, split_dims)
  np.testing.assert_array_equal(search(x), expected(x, 3))


def test_no_device_sees_anothers_rows(rng):
  mesh, search = on_mesh((1, 8, 1), ('batch', 'seq', None))
  x = jax.device_put(draw(rng, 8), jax.NamedSharding(mesh, jax.P('data')))
  hlo = search.lower(x).compile().as_text()
  assert not any(name in hlo for name in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce'))


def test_rows_are_searched_and_not_sorted_whatever_reads_the_places(rng):
  hlo = jax.jit(lambda x: (top_k_ids(x, 3, None)[..., 0], top_k_ids(x, 3, None)[..., 2])).lower(draw(rng, 4))
  assert ' sort(' not in hlo.compile().as_text()


def test_goes_through_scan_remat_and_the_stages_of_a_pipeline(rng):
  """The transformations around a layer: vmap over stages, a loop over layers, remat, gradients."""
  mesh = MeshSpec(axis_names=('stage', 'data'), ici_mesh_shape=(2, 4)).build()
  x = rng.normal(size=(2, 8, 6, 7)).astype(np.float32)

  def layer(x, _):
    ids = top_k_ids(x, 3, ('batch', None, None))
    top = jax.numpy.take_along_axis(x, ids, axis=-1)
    return x * jax.numpy.sum(top, axis=-1, keepdims=True), ids

  def loss(x):
    y, ids = jax.vmap(
      lambda x: jax.lax.scan(jax.checkpoint(layer), x, length=2), spmd_axis_name='stage', in_axes=0, out_axes=0
    )(x)
    return jax.numpy.sum(y), ids

  def loss_in_scope(x):
    with sharding_scope(mesh, (('batch', 'data'),)):
      return loss(x)

  (value, ids), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
  x = jax.device_put(x, jax.NamedSharding(mesh, jax.P('stage', 'data')))
  (sharded_value, sharded_ids), sharded_grad = jax.jit(jax.value_and_grad(loss_in_scope, has_aux=True))(x)
  np.testing.assert_array_equal(sharded_ids, ids)
  np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
  np.testing.assert_allclose(sharded_grad, grad, rtol=1e-4, atol=1e-5)
