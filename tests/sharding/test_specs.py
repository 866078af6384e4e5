"""Split dims and axis rules resolve to the PartitionSpecs that the rules promise, and every misuse is named."""

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.sharding import specs

AXES = ('replica', 'data', 'mdl')
RULES = (
  ('batch', ('replica', 'data')),
  ('mlp', 'mdl'),
  ('embed', 'data'),
  ('embed', 'replica'),
  ('heads', 'mdl'),
  ('heads', None),
  ('wide', ('data', 'mdl')),
  ('norm', None),
  ('layers', -1),
)


@pytest.mark.parametrize(
  'split_dims, expected',
  [
    (None, P()),
    (('data',), P('data')),
    ((('replica', 'data'), 'mdl'), P(('replica', 'data'), 'mdl')),
    ((-1, 'mdl', None), P(None, 'mdl', None)),
    (('batch', None, 'mlp'), P(('replica', 'data'), None, 'mdl')),
    (('norm', 'layers'), P(None, None)),
    (('replica', ('data', 'mlp')), P('replica', ('data', 'mdl'))),
  ],
)
def test_entries_are_axes_several_logical_names_or_unsharded(split_dims, expected):
  assert specs.split_dims_to_partition_spec(split_dims, AXES, RULES) == expected


@pytest.mark.parametrize(
  'split_dims, expected',
  [
    # `embed` has two rules: data, else replica, else nothing.
    (('embed', 'embed', 'embed'), P('data', 'replica', None)),
    # A mesh axis named directly is taken, also where it comes later in the tensor.
    (('embed', 'data'), P('replica', 'data')),
    (('mlp', 'mdl'), P(None, 'mdl')),
    # The first dim that asks gets the axis.
    (('mlp', 'heads'), P('mdl', None)),
    # A rule of several axes needs all of them.
    (('embed', 'wide'), P('data', None)),
    (('mlp', 'batch'), P('mdl', ('replica', 'data'))),
  ],
)
def test_the_first_rule_whose_axes_are_free_wins(split_dims, expected):
  assert specs.split_dims_to_partition_spec(split_dims, AXES, RULES) == expected


@pytest.mark.parametrize(
  'split_dims, words',
  [
    (('data', 'data'), ["('data', 'data')", "'data' twice", 'one dim of a tensor only']),
    (('nowhere', None), ["'nowhere'", 'neither a mesh axis', str(AXES), "'batch'", 'correct it or add a rule']),
    ((2, None), ['split dim 2', 'axis name', 'None or -1']),
  ],
)
def test_a_bad_entry_is_refused_with_value_constraint_and_remedy(split_dims, words):
  with pytest.raises(ValueError) as error:
    specs.split_dims_to_partition_spec(split_dims, AXES, RULES)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'rules, words',
  [
    ((('data', 'mdl'),), ["'data'", 'name of a mesh axis', 'rename the rule']),
    ((('mlp', 'model'),), ["('mlp', 'model')", "'model'", str(AXES), 'correct the rule or add the axis']),
    ((('mlp', ('mdl', 'mdl')),), ["('mlp', ('mdl', 'mdl'))", "'mdl' twice"]),
  ],
)
def test_bad_axis_rules_are_refused(rules, words):
  with pytest.raises(ValueError) as error:
    specs.check_axis_rules(rules, AXES)
  for word in words:
    assert word in str(error.value)


MAPPING = {'map_1d': ('batch',), 'map_2d': ('batch', 'mdl'), 'map_3d': None}


@pytest.mark.parametrize(
  'ndim, mapping, expected', [(1, MAPPING, P(('replica', 'data'))), (3, MAPPING, None), (2, None, None)]
)
def test_input_specs_go_by_rank(ndim, mapping, expected):
  assert specs.infer_partition_spec_based_on_rank(ndim, mapping, AXES, RULES) == expected


@pytest.mark.parametrize(
  'ndim, mapping, words',
  [
    (4, MAPPING, ["'map_4d'", 'rank 4', "'map_1d'", 'add', '4 split dims', 'None']),
    (2, {'map_2d': ('batch',)}, ["['map_2d']", "('batch',)", '2 entries']),
  ],
)
def test_a_bad_input_mapping_names_the_key(ndim, mapping, words):
  with pytest.raises(ValueError) as error:
    specs.infer_partition_spec_based_on_rank(ndim, mapping, AXES, RULES)
  for word in words:
    assert word in str(error.value)


@pytest.fixture
def mesh():
  return jax.make_mesh((1, 4, 2), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
  'split_dims, shape, expected',
  [
    (('batch', 'mlp'), (8, 3), P(('replica', 'data'), 'mdl')),  # features may be uneven
    (('batch', 'mlp'), (4, 3), P('data', 'mdl')),  # replica 2 x data 4: those that make the most parts
    (('batch', 'mlp'), (3, 4), P(None, 'mdl')),
    (('mlp', 'data'), (3, 6), P('mdl', None)),  # by the axis, whatever dim it splits
  ],
)
def test_rows_are_split_evenly_or_over_fewer_devices(split_dims, shape, expected):
  mesh = AbstractMesh((2, 4, 2), ('replica', 'data', 'mdl'))
  with specs.sharding_scope(mesh, (('batch', ('replica', 'data')), ('mlp', 'mdl'))) as scope:
    assert scope.activation_spec(split_dims, shape) == expected


def test_constrain_takes_dims_that_the_mesh_does_not_divide(mesh):
  @jax.jit
  def step(x):
    with specs.sharding_scope(mesh, RULES):
      return specs.constrain(x * 2, ('batch', 'mlp')).sum(axis=0)

  x = np.arange(35, dtype=np.float32).reshape(7, 5)
  np.testing.assert_array_equal(step(x), 2 * x.sum(axis=0))
