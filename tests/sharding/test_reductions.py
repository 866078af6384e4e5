"""The sum of squares of a sharded tree is correct on every layout and needs one all-reduce."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.sharding import MeshSpec, WeightSpec
from spmd_tasks.sharding.reductions import sum_of_squares, sums_of_squares
from spmd_tasks.sharding.specs import sharding_scope

AXES = ('replica', 'data', 'mdl')
RULES = (('embed', 'data'), ('mlp', 'mdl'), ('layers', None))
# Evenly split, unevenly split in one dim and in two, split over two axes at once, and not at all.
SPECS = {
  'even': WeightSpec(shape=(8, 4), init=None, split_dims=('embed', 'mlp')),
  'uneven': WeightSpec(shape=(3, 7, 5), init=None, split_dims=('layers', 'embed', 'mlp'), stacked=1),
  'one axis': WeightSpec(shape=(6, 9), init=None, split_dims=(None, 'mlp')),
  'both axes': WeightSpec(shape=(11,), init=None, split_dims=(('data', 'mdl'),)),
  'replicated': WeightSpec(shape=(5,), init=None, split_dims=(None,)),
}


def random_tree(rng):
  return {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in SPECS.items()}


def compiled_sum(mesh, specs, sum_squares=sum_of_squares):
  def sum_in_scope(tree):
    with sharding_scope(mesh, RULES):
      return sum_squares(tree, specs)

  return jax.jit(sum_in_scope)


@pytest.mark.parametrize('shape', [(1, 2, 4), (2, 2, 2)])
def test_the_sum_is_correct_on_every_mesh(shape, rng):
  tree = random_tree(rng)
  mesh = MeshSpec(axis_names=AXES, ici_mesh_shape=shape).build(jax.devices()[: np.prod(shape)])
  expected = sum(np.sum(np.square(x.astype(np.float64))) for x in tree.values())
  np.testing.assert_allclose(compiled_sum(mesh, SPECS)(tree), expected, rtol=1e-6)
  np.testing.assert_allclose(sum_of_squares(tree, SPECS), expected, rtol=1e-6)
  for name, leaf_sum in compiled_sum(mesh, SPECS, sums_of_squares)(tree).items():
    np.testing.assert_allclose(leaf_sum, np.sum(np.square(tree[name].astype(np.float64))), rtol=1e-6)


def test_replicated_leaves_need_no_all_reduce_and_sharded_leaves_one():
  mesh = MeshSpec(axis_names=AXES, ici_mesh_shape=(1, 4, 2)).build()

  def num_all_reduces(*names, sum_squares=sum_of_squares):
    specs = {name: SPECS[name] for name in names}
    tree = {name: jnp.zeros(spec.shape) for name, spec in specs.items()}
    return compiled_sum(mesh, specs, sum_squares).lower(tree).compile().as_text().count(' all-reduce(')

  assert num_all_reduces('replicated') == 0
  assert num_all_reduces(*SPECS) == num_all_reduces(*SPECS, sum_squares=sums_of_squares) == 1
