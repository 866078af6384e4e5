"""Split dims and axis rules resolve to PartitionSpecs as in Flax, and misuse is refused."""

import itertools
import random

from flax.linen import logical_to_mesh_axes
import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.errors import UserError
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


# Rule lists as users write them, or as they are published; the mesh has the axes that they name.
LISTS = {
  'ours': RULES,
  't5x': (('batch', 'data'), ('vocab', 'mdl'), ('mlp', 'mdl'), ('heads', 'mdl'), ('embed', 'mdl'), ('embed', 'data')),
  'maxtext': (
    ('batch', ['data', 'fsdp', 'expert']),
    ('length', ['context', 'expert']),
    ('length', ['context']),
    ('mlp', ['fsdp_transpose', 'tensor']),
    ('embed', ['fsdp', 'fsdp_transpose', 'context']),
    ('embed', ['fsdp', 'context']),
    ('kv', []),
    ('exp', 'expert'),
  ),
  'after None': (('a', 'data'), ('b', None), ('b', 'mdl'), ('c', ('data', 'mdl')), ('c', 'mdl'), ('c', 'data')),
  'axes as names': (('batch', ('expert', 'data')), ('embed', 'data'), ('expert', 'expert'), ('data', 'data')),
}


@pytest.mark.parametrize('rules', LISTS.values(), ids=LISTS)
def test_rules_resolve_as_in_flax(rules):
  names = list(dict.fromkeys(name for name, _ in rules))
  axes = sorted({axis for _, target in rules for axis in specs.axes_of(target)})
  specs.check_axis_rules(rules, axes)
  for ndim in (1, 2, 3):
    for split_dims in itertools.permutations([*names, None], ndim):
      expected = logical_to_mesh_axes(split_dims, _without_minus_one(rules))
      assert specs.split_dims_to_partition_spec(split_dims, axes, rules) == expected, (split_dims, rules)


def test_random_rules_resolve_as_in_flax():
  rng = random.Random(0)
  axes, names = ('replica', 'data', 'expert', 'mdl'), ('a', 'b', 'c', 'd', 'e')
  targets = [None, *axes * 3, *itertools.permutations(axes, 2), ('data', 'expert', 'mdl')]
  for _ in range(500):
    rules = [(rng.choice(names), rng.choice(targets)) for _ in range(rng.randint(5, 12))]
    rules += [(name, None) for name in names]  # a name without any rule is refused here
    split_dims = rng.sample([*names, None], rng.randint(1, 5))
    expected = logical_to_mesh_axes(split_dims, rules)
    assert specs.split_dims_to_partition_spec(split_dims, axes, rules) == expected, (split_dims, rules)


def _without_minus_one(rules):
  """Flax has no -1 for unsharded."""
  return [(name, None if axes == -1 else axes) for name, axes in rules]


@pytest.mark.parametrize(
  'split_dims, expected',
  [
    # A mesh axis is assigned before all rules, even if it comes later in the tensor.
    (('embed', 'data'), P('replica', 'data')),
    (('mlp', 'mdl'), P(None, 'mdl')),
    # Several dims share a name: `embed` has two rules, data and replica; a rule of None leaves all of them unsharded.
    (('embed', 'embed', 'embed'), P('data', 'replica', None)),
    (('heads', 'mlp', 'heads'), P(None, 'mdl', None)),
    (('norm', 'norm'), P(None, None)),
    # Several names for one dim.
    ((('embed', 'mlp'), 'heads'), P(('data', 'mdl'), None)),
    (('heads', ('embed', 'mlp')), P(None, ('data', 'mdl'))),
  ],
)
def test_split_dims_beyond_flax(split_dims, expected):
  assert specs.split_dims_to_partition_spec(split_dims, AXES, RULES) == expected


@pytest.mark.parametrize(
  'split_dims, message',
  [
    (('data', 'data'), "'data' twice: split only one dim"),
    (('nowhere', None), "'nowhere', which is neither .*correct it or add a rule"),
    ((2, None), '2, which is neither .*correct it'),
  ],
)
def test_bad_split_dims_are_refused(split_dims, message):
  with pytest.raises(UserError, match=message):
    specs.split_dims_to_partition_spec(split_dims, AXES, RULES)


@pytest.mark.parametrize(
  'rules, message',
  [
    ((('data', 'mdl'),), r"\('data', 'mdl'\) .*rename"),
    ((('data', ('data', 'mdl')),), r"\('data', \('data', 'mdl'\)\) .*rename"),
    ((('mlp', 'model'),), "'model', .*correct the rule or add the axis"),
  ],
)
def test_bad_axis_rules_are_refused(rules, message):
  with pytest.raises(UserError, match=message):
    specs.check_axis_rules(rules, AXES)


MAPPING = {'map_1d': ('batch',), 'map_2d': ('batch', 'mdl'), 'map_3d': None}


@pytest.mark.parametrize(
  'ndim, mapping, expected', [(1, MAPPING, P(('replica', 'data'))), (3, MAPPING, None), (2, None, None)]
)
def test_inputs_are_split_by_rank(ndim, mapping, expected):
  assert specs.infer_partition_spec_based_on_rank(ndim, mapping, AXES, RULES) == expected


@pytest.mark.parametrize(
  'ndim, mapping, message',
  [
    (4, MAPPING, "'map_4d' .*'map_1d'.*: add .*4 split dims"),
    (2, {'map_2d': ('batch',)}, r"\['map_2d'\] = \('batch',\) must have 2 entries"),
  ],
)
def test_a_bad_input_mapping_is_refused(ndim, mapping, message):
  with pytest.raises(UserError, match=message):
    specs.infer_partition_spec_based_on_rank(ndim, mapping, AXES, RULES)


@pytest.fixture
def mesh():
  return jax.make_mesh((1, 4, 2), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
  'split_dims, shape, expected',
  [
    (('batch', 'mlp'), (8, 3), P(('replica', 'data'), 'mdl')),  # features may be uneven
    (('batch', 'mlp'), (4, 3), P('data', 'mdl')),  # replica 2 x data 4: the subset with the most parts
    (('batch', 'mlp'), (3, 4), P(None, 'mdl')),
    (('mlp', 'data'), (3, 6), P('mdl', None)),  # `data` splits rows elsewhere, so no dim over it is uneven
  ],
)
def test_rows_are_split_evenly_or_over_fewer_devices(split_dims, shape, expected):
  mesh = AbstractMesh((2, 4, 2), ('replica', 'data', 'mdl'))
  with specs.sharding_scope(mesh, (('batch', ('replica', 'data')), ('mlp', 'mdl'))) as scope:
    assert scope.activation_spec(split_dims, shape) == expected


def test_axes_that_split_inputs_split_rows_too():
  mesh = AbstractMesh((2, 4, 2), ('replica', 'data', 'mdl'))
  with specs.sharding_scope(mesh, (('mlp', 'mdl'),), {'map_2d': (('replica', 'data'), None)}) as scope:
    assert scope.row_axes == {'replica', 'data'}
    assert scope.activation_spec((('replica', 'data'), 'mlp'), (4, 3)) == P('data', 'mdl')


def test_constrain_accepts_uneven_dims(mesh):
  @jax.jit
  def step(x):
    with specs.sharding_scope(mesh, RULES):
      return specs.constrain(x * 2, ('batch', 'mlp')).sum(axis=0)

  x = np.arange(35, dtype=np.float32).reshape(7, 5)
  np.testing.assert_array_equal(step(x), 2 * x.sum(axis=0))
