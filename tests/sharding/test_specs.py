"""Split dims and axis rules resolve to the PartitionSpecs that the rules promise, and every misuse is named."""

import threading

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
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
    ((), P()),
    (('data',), P('data')),
    (['data', 'mdl'], P('data', 'mdl')),
    ((('replica', 'data'), 'mdl'), P(('replica', 'data'), 'mdl')),
    ((['replica', 'data'], None), P(('replica', 'data'), None)),
    ((('data',), None), P('data', None)),
    (((), 'data'), P(None, 'data')),
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
    (('embed',), P('data')),
    (('embed', 'embed'), P('data', 'replica')),
    (('embed', 'embed', 'embed'), P('data', 'replica', None)),
    # A mesh axis named directly is taken, also where it comes later in the tensor.
    (('embed', 'data'), P('replica', 'data')),
    (('mlp', 'mdl'), P(None, 'mdl')),
    # The first dim that asks gets the axis.
    (('mlp', 'heads'), P('mdl', None)),
    (('heads', 'mlp'), P('mdl', None)),
    # A rule of several axes needs all of them.
    (('wide', 'embed'), P(('data', 'mdl'), 'replica')),
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
    ((('data', 'data'),), ["'data' twice"]),
    ((('replica', 'data'), 'data'), ["'data' twice"]),
    (('nowhere', None), ["'nowhere'", 'neither a mesh axis', str(AXES), "'batch'", 'correct it or add a rule']),
    ((('data', None),), ['None', 'neither a mesh axis']),
    ((2, None), ['split dim 2', 'axis name', 'None or -1']),
  ],
)
def test_a_bad_entry_is_refused_with_value_constraint_and_remedy(split_dims, words):
  with pytest.raises(ValueError) as error:
    specs.split_dims_to_partition_spec(split_dims, AXES, RULES)
  for word in words:
    assert word in str(error.value)


def test_no_resolved_spec_names_an_axis_twice(rng):
  # At most one entry names mesh axes directly, so that every draw is valid.
  logical = [*{name for name, _ in RULES}, None, -1]
  for _ in range(500):
    split_dims = [logical[i] for i in rng.integers(len(logical), size=rng.integers(1, 5))]
    split_dims[0] = [*AXES, split_dims[0]][rng.integers(4)]
    split_dims = [split_dims[i] for i in rng.permutation(len(split_dims))]
    spec = specs.split_dims_to_partition_spec(split_dims, AXES, RULES)
    used = [axis for axes in specs.spec_axes(spec, len(split_dims)) for axis in axes]
    assert len(used) == len(set(used)), split_dims
    assert len(spec) == len(split_dims)


@pytest.mark.parametrize(
  'rules, words',
  [
    ((('data', 'mdl'),), ["'data'", 'name of a mesh axis', 'rename the rule']),
    ((('mlp', 'model'),), ["('mlp', 'model')", "'model'", str(AXES), 'correct the rule or add the axis']),
    ((('batch', ('data', 'slice')),), ["'slice'"]),
    ((('mlp', 3),), ['3', 'not a mesh axis']),
    ((('mlp', ('mdl', 'mdl')),), ["('mlp', ('mdl', 'mdl'))", "'mdl' twice"]),
  ],
)
def test_bad_axis_rules_are_refused(rules, words):
  with pytest.raises(ValueError) as error:
    specs.check_axis_rules(rules, AXES)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'spec, ndim, expected',
  [
    (P(), 2, [(), ()]),
    (P('data'), 2, [('data',), ()]),
    (P(None, ('replica', 'data')), 3, [(), ('replica', 'data'), ()]),
  ],
)
def test_spec_axes_has_one_entry_per_dim(spec, ndim, expected):
  assert specs.spec_axes(spec, ndim) == expected


def test_num_parts_is_the_product_of_the_axes():
  sizes = {'replica': 2, 'data': 3, 'mdl': 5}
  assert [specs.num_parts(axes, sizes) for axes in [(), ('data',), ('replica', 'mdl')]] == [1, 3, 10]


@pytest.mark.parametrize('ndim, expected', [(0, P()), (1, P(AXES)), (2, P(AXES, None)), (3, P(AXES, None, None))])
def test_inputs_enter_with_their_batch_dim_over_the_whole_mesh(ndim, expected):
  assert specs.shard_on_batch_dim_partition_spec(AXES, ndim) == expected


MAPPING = {'map_1d': ('batch',), 'map_2d': ('batch', 'mdl'), 'map_3d': None}


@pytest.mark.parametrize(
  'ndim, mapping, expected',
  [
    (0, MAPPING, P()),
    (1, MAPPING, P(('replica', 'data'))),
    (2, MAPPING, P(('replica', 'data'), 'mdl')),
    (3, MAPPING, None),
    (2, None, None),
    (5, None, None),
  ],
)
def test_input_specs_go_by_rank(ndim, mapping, expected):
  assert specs.infer_partition_spec_based_on_rank(ndim, mapping, AXES, RULES) == expected


@pytest.mark.parametrize(
  'ndim, mapping, words',
  [
    (4, MAPPING, ["'map_4d'", 'rank 4', "'map_1d'", 'add', '4 split dims', 'None']),
    (1, {}, ["'map_1d'"]),
    (2, {'map_2d': ('batch',)}, ["['map_2d']", "('batch',)", '2 entries']),
    (1, {'map_1d': ('nowhere',)}, ["'nowhere'"]),
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


def test_constrain_is_the_identity_outside_a_scope():
  x = jnp.ones((3, 5))
  assert specs.current_sharding_scope() is None
  assert specs.constrain(x, ('nonsense', 'more', 'even longer')) is x


def test_constrain_shards_inside_a_scope(mesh):
  @jax.jit
  def step(x):
    with specs.sharding_scope(mesh, RULES):
      return specs.constrain(x * 2, ('batch', 'mlp'))

  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  y = step(x)
  assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'mdl')), 2)
  np.testing.assert_array_equal(y, x * 2)


@pytest.mark.parametrize(
  'split_dims, shape, expected',
  [
    (('batch', 'mlp'), (8, 3), P(('replica', 'data'), 'mdl')),  # features may be uneven
    (('batch', 'mlp'), (4, 3), P('data', 'mdl')),  # replica 2 x data 4: those that make the most parts
    (('batch', 'mlp'), (6, 4), P('replica', 'mdl')),
    (('batch', 'mlp'), (3, 4), P(None, 'mdl')),
    (('mlp', 'data'), (3, 6), P('mdl', None)),  # by the axis, whatever dim it splits
    (('batch',), (2, 5, 7), P('replica')),  # of the first dims only
  ],
)
def test_rows_are_split_evenly_or_over_fewer_devices(split_dims, shape, expected):
  mesh = AbstractMesh((2, 4, 2), ('replica', 'data', 'mdl'))
  with specs.sharding_scope(mesh, (('batch', ('replica', 'data')), ('mlp', 'mdl'))) as scope:
    assert scope.activation_spec(split_dims, shape) == expected


def test_the_axes_of_rows_are_those_of_batch_and_seq_and_of_the_inputs():
  names, rules = ('stage', 'data', 'context', 'mdl'), (('batch', ('stage', 'data')), ('seq', 'context'), ('x', 'mdl'))
  assert specs.row_axes(names, rules) == {'stage', 'data', 'context'}
  assert specs.row_axes(names, (), {'map_1d': ('data',), 'map_2d': (('data', 'mdl'), None), 'map_3d': None}) == {
    'data',
    'mdl',
  }
  assert specs.row_axes(names, ()) == set()


def test_constrain_takes_dims_that_the_mesh_does_not_divide(mesh):
  @jax.jit
  def step(x):
    with specs.sharding_scope(mesh, RULES):
      return specs.constrain(x * 2, ('batch', 'mlp')).sum(axis=0)

  x = np.arange(35, dtype=np.float32).reshape(7, 5)
  np.testing.assert_array_equal(step(x), 2 * x.sum(axis=0))


def test_constrain_wants_one_entry_per_dim(mesh):
  with specs.sharding_scope(mesh, RULES), pytest.raises(ValueError, match=r"\('batch',\).*\(2, 3\).*one entry per dim"):
    specs.constrain(jnp.ones((2, 3)), ('batch',))


def test_scopes_nest_and_belong_to_their_thread(mesh):
  seen_by_thread = []
  with specs.sharding_scope(mesh, RULES):
    with specs.sharding_scope(mesh, ()):
      assert specs.current_sharding_scope() == specs.ShardingScope(mesh, (), specs.row_axes(mesh.axis_names, RULES))
    assert specs.current_sharding_scope() == specs.ShardingScope(mesh, RULES, specs.row_axes(mesh.axis_names, RULES))
    thread = threading.Thread(target=lambda: seen_by_thread.append(specs.current_sharding_scope()))
    thread.start()
    thread.join()
  assert seen_by_thread == [None]
  assert specs.current_sharding_scope() is None
