"""The meshes and rules of expert parallelism: T5X's two forms, as its own tests have them, and MegaBlocks' degrees."""

import re

from jax.sharding import PartitionSpec as P
import pytest

from spmd_tasks.sharding import (
  DEFAULT_AXIS_RULES,
  MeshSpec,
  check_axis_rules,
  data_expert_model_axes,
  data_model_axes,
  expert_parallel_degrees,
  hidden_sharding_axes,
  split_dims_to_partition_spec,
  standard_logical_axis_rules,
)

# T5X's standard rules for one-dimensional parameter and activation partitioning, with `mdl` for its `model`.
T5X_RULES = (
  ('batch', 'data'),
  ('vocab', 'mdl'),
  ('embed', None),
  ('mlp', 'mdl'),
  ('heads', 'mdl'),
  ('kv', None),
  ('joined_kv', 'mdl'),
)
EXTRAS = (('additional', 'mdl'), ('expert_magic', 'data'))


def spec_of(axes, split_dims):
  return split_dims_to_partition_spec(split_dims, axes.mesh_axis_names, axes.axis_rules)


@pytest.mark.parametrize(
  'num_devices, num_experts, model, two_data_axes, data_and_model',
  [
    (4, 8, {'num_partitions': 1}, False, (4, 1)),  # more experts than devices
    (4, 4, {'num_partitions': 1}, False, (4, 1)),
    (4, 1, {'num_partitions': 1}, True, (1, 4)),  # fewer
    (8, 4, {'num_partitions': 1}, True, (4, 2)),
    (8, 2, {'model_parallel_submesh': (1, 1, 1, 1)}, True, (2, 4)),
    (4, 1, {'num_partitions': 2}, False, (2, 2)),  # model parallelism
    (8, 4, {'model_parallel_submesh': (1, 2, 1, 2)}, False, (2, 4)),
    (4, 0, {'num_partitions': 1}, False, (4, 1)),  # no experts
    (6, 4, {'num_partitions': 2}, False, (3, 2)),
  ],
)
def test_when_mdl_becomes_a_second_data_axis(num_devices, num_experts, model, two_data_axes, data_and_model):
  axes = data_model_axes(num_devices=num_devices, num_experts=num_experts, base_rules=T5X_RULES, **model)
  assert axes.two_data_axes == two_data_axes
  assert axes.mesh_axis_names == ('replica', 'data', 'mdl')
  assert axes.ici_mesh_shape == (1, *data_and_model)


def test_rules_with_one_data_axis():
  axes = data_model_axes(num_devices=4, num_experts=1, num_partitions=2, base_rules=T5X_RULES, additional_rules=EXTRAS)
  assert axes.axis_rules == (
    *T5X_RULES,
    ('expert', 'data'),
    ('expert_mlp', 'mdl'),
    ('expert_group', None),
    ('expert_replicas', None),
    ('unmodeled', None),
    ('additional', 'mdl'),
    ('expert_magic', 'data'),
  )
  assert (axes.data_axes, axes.batch_axes) == (('data',), ('data',))


def test_rules_with_two_data_axes():
  axes = data_model_axes(num_devices=4, num_experts=1, num_partitions=1, base_rules=T5X_RULES, additional_rules=EXTRAS)
  assert axes.axis_rules == (
    ('batch', ('data', 'mdl')),
    *((name, None) for name, _ in T5X_RULES[1:]),
    ('expert', 'data'),
    ('expert_mlp', None),
    ('expert_group', None),
    ('expert_replicas', 'mdl'),
    ('unmodeled', None),
    ('additional', None),
    ('expert_magic', 'data'),
  )
  assert axes.data_axes == axes.batch_axes == ('data', 'mdl')


@pytest.mark.parametrize(
  'num_devices, num_expert_partitions, model, sizes',
  [
    (8, 16, {'num_partitions': 1}, (1, 8, 1)),
    (8, 8, {'num_partitions': 1}, (1, 8, 1)),
    (8, 4, {'num_partitions': 1}, (2, 4, 1)),
    (8, 8, {'num_partitions': 4}, (1, 2, 4)),
    (8, 8, {'model_parallel_submesh': (1, 1, 1, 2)}, (1, 4, 2)),
    (6, 4, {'num_partitions': 1}, (2, 3, 1)),  # the largest divisor, not 4
    (8, 1, {'num_partitions': 1}, (8, 1, 1)),
  ],
)
def test_sizes_with_an_axis_for_experts(num_devices, num_expert_partitions, model, sizes):
  axes = data_expert_model_axes(
    num_devices=num_devices, num_expert_partitions=num_expert_partitions, base_rules=T5X_RULES, **model
  )
  assert axes.mesh_axis_names == ('replica', 'data', 'expert', 'mdl')
  assert axes.ici_mesh_shape == (1, *sizes)


def test_rules_with_an_axis_for_experts():
  axes = data_expert_model_axes(
    num_devices=8, num_expert_partitions=4, num_partitions=2, base_rules=T5X_RULES, additional_rules=EXTRAS
  )
  assert axes.axis_rules == (
    ('batch', ('expert', 'data')),
    *T5X_RULES[1:],
    ('expert_mlp', 'mdl'),
    ('expert_group', None),
    ('expert_replicas', 'data'),
    ('unmodeled', None),
    ('additional', 'mdl'),
    ('expert_magic', 'data'),
  )
  assert spec_of(axes, ('expert',)) == P('expert')
  assert axes.data_axes == axes.batch_axes == ('expert', 'data')


FORMS = {
  'one data axis': data_model_axes(num_devices=8, num_experts=4, num_partitions=2, base_rules=DEFAULT_AXIS_RULES),
  'two data axes': data_model_axes(num_devices=8, num_experts=4, num_partitions=1, base_rules=DEFAULT_AXIS_RULES),
  'three axes': data_expert_model_axes(
    num_devices=8, num_expert_partitions=2, num_partitions=2, base_rules=DEFAULT_AXIS_RULES
  ),
  'hidden sharding': hidden_sharding_axes(
    num_devices=8, num_experts=2, hidden_dim=12, num_partitions=2, base_rules=DEFAULT_AXIS_RULES
  ),
}


@pytest.mark.parametrize(
  'form, batch, up, kernel',
  [
    ('one data axis', ('replica', 'data'), P('data', None, 'mdl'), P('data', 'mdl')),
    ('two data axes', ('replica', 'data', 'mdl'), P('data', None, None), P('data', None)),
    ('three axes', ('replica', 'expert', 'data'), P('expert', 'data', 'mdl'), P('data', 'mdl')),
    ('hidden sharding', ('replica', 'data', 'expert'), P('expert', None, ('data', 'mdl')), P('data', 'mdl')),
  ],
)
def test_what_the_forms_make_of_our_own_rules(form, batch, up, kernel):
  axes = FORMS[form]
  check_axis_rules(axes.axis_rules, axes.mesh_axis_names)
  mesh = MeshSpec(axis_names=axes.mesh_axis_names, ici_mesh_shape=axes.ici_mesh_shape)
  assert list(mesh.sizes(8).values()) == list(axes.ici_mesh_shape)
  assert axes.batch_axes == batch
  assert spec_of(axes, ('expert', 'expert_embed', 'expert_mlp')) == up
  assert spec_of(axes, ('embed', 'mlp')) == kernel


def test_standard_rules_have_all_names_and_split_weights_over_mdl_only():
  rules = dict(standard_logical_axis_rules())
  ours = {name for name, _ in DEFAULT_AXIS_RULES}
  assert set(rules) == ours - {'expert', 'expert_mlp'}  # which the forms add
  assert [name for name, axes in rules.items() if axes == 'data'] == ['batch']
  mdl = {name for name, axes in DEFAULT_AXIS_RULES if axes == 'mdl'}
  assert {name for name, axes in rules.items() if axes == 'mdl'} == mdl - {'expert_mlp'}


def test_a_rule_of_several_axes_keeps_those_that_are_not_mdl():
  base = (('batch', 'data'), ('vocab', ('data', 'mdl')), ('mlp', ('mdl',)), ('heads', -1))
  axes = data_model_axes(num_devices=4, num_experts=2, num_partitions=1, base_rules=base)
  assert dict(axes.axis_rules) | {'vocab': 'data', 'mlp': None, 'heads': None} == dict(axes.axis_rules)


@pytest.mark.parametrize(
  'form, expected',
  [
    ('one data axis', (P('data'), P('mdl'), None, P('other'))),
    ('two data axes', (P(('data', 'mdl')), None, None, P('other'))),
    ('three axes', (P(('expert', 'data')), P('mdl'), None, P('other'))),
  ],
)
def test_raw_specs_are_overridden_at_the_top_level_only(form, expected):
  axes = FORMS[form]
  specs = (P('data'), P('mdl'), None, P('other'))
  assert axes.override_partition_specs(specs) == expected
  assert axes.override_partition_specs(list(specs)) == expected
  assert [axes.override_partition_specs(spec) for spec in specs] == list(expected)
  tree = {'weights': P('data')}
  assert axes.override_partition_specs((tree, P('data'))) == (tree, expected[0])
  assert axes.override_partition_specs(tree) == tree
  assert axes.override_partition_specs(P('data', 'mdl')) == P('data', 'mdl')


@pytest.mark.parametrize(
  'world_size, num_experts, degrees',
  [(8, 8, (8, 1)), (8, 16, (8, 1)), (8, 4, (4, 2)), (8, 1, (1, 8)), (1, 4, (1, 1))],
)
def test_degrees_of_expert_and_hidden_sharding(world_size, num_experts, degrees):
  assert expert_parallel_degrees(world_size, num_experts=num_experts, hidden_dim=16) == degrees
  axes = hidden_sharding_axes(
    num_devices=world_size, num_experts=num_experts, hidden_dim=16, base_rules=DEFAULT_AXIS_RULES
  )
  assert axes.ici_mesh_shape == (1, degrees[1], degrees[0], 1)


@pytest.mark.parametrize(
  'make, message',
  [
    (
      lambda: data_model_axes(num_devices=6, num_experts=4, num_partitions=1, base_rules=()),
      '6 devices are not a multiple of 4 experts',
    ),
    (
      lambda: data_model_axes(num_devices=8, num_experts=4, base_rules=()),
      'num_partitions=None and model_parallel_submesh=None: give exactly one',
    ),
    (
      lambda: data_expert_model_axes(
        num_devices=8, num_expert_partitions=4, num_partitions=1, model_parallel_submesh=(1, 1, 1, 1), base_rules=()
      ),
      'give exactly one',
    ),
    (
      lambda: data_model_axes(num_devices=8, num_experts=4, num_partitions=3, base_rules=()),
      '8 devices are not a multiple of the model parallelism 3',
    ),
    (
      lambda: data_expert_model_axes(num_devices=8, num_expert_partitions=0, num_partitions=1, base_rules=()),
      'num_expert_partitions=0 must be at least 1',
    ),
    (
      lambda: standard_logical_axis_rules(parameter_partitioning_dims=2),
      'parameter_partitioning_dims=2 is not supported',
    ),
    (lambda: expert_parallel_degrees(4, num_experts=6, hidden_dim=16), 'num_experts=6 must be a multiple of 4'),
    (lambda: expert_parallel_degrees(6, num_experts=4, hidden_dim=16), '6 devices must be a multiple of 4'),
    (lambda: expert_parallel_degrees(8, num_experts=2, hidden_dim=18), 'hidden_dim=18 must be a multiple of 4'),
    (lambda: expert_parallel_degrees(8, num_experts=0, hidden_dim=18), 'must be at least 1'),
  ],
)
def test_what_does_not_fit_is_refused(make, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    make()
