"""Meshes and axis rules of expert parallelism agree with T5X's two meshes and MegaBlocks' degrees."""

import itertools

from flax.linen import logical_to_mesh_axes
from jax.sharding import PartitionSpec as P
import pytest

from spmd_tasks.bridges.t5x import t5x_axis_rules
from spmd_tasks.errors import UserError
from spmd_tasks.sharding import (
  DEFAULT_AXIS_RULES,
  DataExpertModelMesh,
  DataModelMesh,
  HiddenShardingMesh,
  MeshAxes,
  MeshSpec,
  split_dims_to_partition_spec,
  stage_axis_rules,
)
from spmd_tasks.sharding.specs import check_axis_rules

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


def t5x_rules(activations, parameters, form):
  """The `standard_logical_axis_rules` of t5x/partitioning.py and of contrib/moe, with our mesh axes.

  T5X's mesh has no `replica`; its PjitPartitioner with slices adds the axis to the batch in the same way.
  """
  rules = [('batch', ('replica', 'data')), ('vocab', 'mdl'), ('mlp', 'mdl'), ('heads', 'mdl'), ('kv', None)]
  rules += [('joined_kv', 'mdl')]
  rules += [('embed', axis) for axis, dims in (('mdl', activations), ('data', parameters)) if dims == 2]
  rules += [('embed', None)] if activations == parameters == 1 else []
  rules += [(name, None) for name in ('relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack')]
  rules += [('mlp_activations', None)]
  if form == 'data, expert and model':
    rules[0] = ('batch', ('replica', 'expert', 'data'))
    rules += [('expert', 'expert'), ('expert_mlp', 'mdl'), ('expert_replicas', 'data'), ('unmodeled', None)]
  elif form != 'dense':
    rules += [('expert', 'data'), ('expert_mlp', 'mdl'), ('expert_group', None), ('expert_replicas', None)]
    rules += [('unmodeled', None)]
  rules += additional_rules(form)
  if form == 'two data axes':  # `model` splits rows and replicas of experts, but no weights
    rules = [(name, None if axes == 'mdl' else axes) for name, axes in rules if name != 'expert_replicas']
    rules[0] = ('batch', ('replica', 'data', 'mdl'))
    rules += [('expert_replicas', 'mdl')]
  return rules


ADDITIONAL = (
  ('additional', 'mdl'),
  ('expert_magic', 'data'),
  ('embed', 'replica'),
)
ADDITIONAL_FOR_EXPERTS = (  # the meshes have their own rules for these names
  ('expert', 'mdl'),
  ('expert_mlp', 'data'),
  ('expert_replicas', 'replica'),
)


def additional_rules(form):
  # Without experts, DEFAULT_AXIS_RULES has rules for these names and T5X has not.
  return ADDITIONAL + (ADDITIONAL_FOR_EXPERTS if form != 'dense' else ())


FORMS = {
  'dense': lambda rules: MeshAxes(
    mesh_axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 4, 2), axis_rules=rules
  ),
  'data, expert and model': lambda rules: DataExpertModelMesh(
    num_devices=8, num_expert_partitions=2, num_partitions=2, base_rules=rules
  ),
  'data and model': lambda rules: DataModelMesh(num_devices=8, num_experts=4, num_partitions=2, base_rules=rules),
  'two data axes': lambda rules: DataModelMesh(num_devices=8, num_experts=4, base_rules=rules),
}
# Weights and activations of T5X's and Flaxformer's models.
T5X_SPLIT_DIMS = [
  ('vocab', 'embed'),
  ('embed',),
  ('embed', 'mlp'),
  ('mlp', 'embed'),
  ('embed', 'stack', 'mlp'),
  ('embed', 'joined_kv'),
  ('joined_kv', 'embed'),
  ('embed', 'heads', 'kv'),
  ('heads', 'kv', 'embed'),
  ('heads', 'relpos_buckets'),
  ('layers', 'embed', 'mlp'),
  ('batch', 'length', 'embed'),
  ('batch', 'length', 'mlp'),
  ('batch', 'length', 'heads', 'kv'),
  ('batch', 'length', 'vocab'),
]
EXPERT_SPLIT_DIMS = [
  ('expert', 'embed', 'expert_mlp'),
  ('expert', 'expert_mlp', 'embed'),
  ('expert', 'unmodeled', 'expert_mlp'),
  ('embed', 'unmodeled'),
  ('batch', 'unmodeled', 'length', 'embed'),
  ('expert', 'expert_replicas', 'unmodeled', 'length', 'embed'),
  ('expert', 'expert_replicas', 'unmodeled'),
  ('expert_replicas', 'mlp'),
]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('activations, parameters', [*itertools.product((1, 2), repeat=2)])
def test_split_dims_of_t5x_resolve_as_in_t5x(activations, parameters, form):
  rules = t5x_axis_rules(
    DEFAULT_AXIS_RULES,
    activation_partitioning_dims=activations,
    parameter_partitioning_dims=parameters,
    additional_rules=additional_rules(form),
  )
  axes, expected_rules = FORMS[form](rules).axes(), t5x_rules(activations, parameters, form)
  names = dict.fromkeys(name for name, _ in expected_rules)
  check_axis_rules(axes.axis_rules, axes.mesh_axis_names)
  cases = T5X_SPLIT_DIMS + ([] if form == 'dense' else EXPERT_SPLIT_DIMS)
  for split_dims in [*cases, *itertools.permutations(names, 2)]:
    expected = logical_to_mesh_axes(split_dims, expected_rules)
    assert split_dims_to_partition_spec(split_dims, axes.mesh_axis_names, axes.axis_rules) == expected, split_dims


@pytest.mark.parametrize(
  'activations, parameters, kernel, embedding, norm, router, residual',
  [
    (1, 1, P(None, 'mdl'), P('mdl', None), P(None), P(None, None), None),
    (2, 1, P(None, 'mdl'), P('mdl', None), P('mdl'), P('mdl', None), 'mdl'),
    (1, 2, P('data', 'mdl'), P('mdl', 'data'), P('data'), P('data', None), None),
    (2, 2, P('data', 'mdl'), P('mdl', 'data'), P('mdl'), P('mdl', None), 'mdl'),
  ],
)
def test_partitioning_dims_of_t5x_split_our_layers(activations, parameters, kernel, embedding, norm, router, residual):
  dims = {'activation_partitioning_dims': activations, 'parameter_partitioning_dims': parameters}
  rules = t5x_axis_rules(DEFAULT_AXIS_RULES, **dims)

  def spec_of(*split_dims):
    return split_dims_to_partition_spec(split_dims, ('replica', 'data', 'mdl'), rules)

  assert (spec_of('embed', 'mlp'), spec_of('vocab', 'embed'), spec_of('norm')) == (kernel, embedding, norm)
  assert spec_of('kv_heads', 'head_dim', 'embed') == P('mdl', None, kernel[0])
  assert spec_of('embed', None) == router
  assert spec_of('batch', 'seq', 'act_embed') == P(('replica', 'data'), None, residual)
  assert spec_of('expert', 'expert_embed', 'expert_mlp') == P('data', None, 'mdl')
  with pytest.raises(ValueError, match='must be 1 or 2'):
    t5x_axis_rules(DEFAULT_AXIS_RULES, activation_partitioning_dims=3)


def test_t5x_rules_leave_the_stage_axis_alone():
  rules = t5x_axis_rules(stage_axis_rules(DEFAULT_AXIS_RULES), activation_partitioning_dims=2)
  spec = split_dims_to_partition_spec(('layers', 'embed', 'mlp'), ('replica', 'stage', 'data', 'mdl'), rules)
  assert spec == P('stage', None, 'mdl')


@pytest.mark.parametrize(
  'num_devices, num_experts, num_partitions, data_and_model',
  [
    (4, 8, 1, (4, 1)),  # more experts than devices
    (4, 1, 1, (1, 4)),  # fewer: `mdl` is a second data axis
    (8, 4, 1, (4, 2)),
    (4, 1, 2, (2, 2)),  # model parallelism
    (4, 0, 1, (4, 1)),  # no experts
  ],
)
def test_when_mdl_becomes_a_second_data_axis(num_devices, num_experts, num_partitions, data_and_model):
  axes = DataModelMesh(
    num_devices=num_devices, num_experts=num_experts, num_partitions=num_partitions, base_rules=T5X_RULES
  ).axes()
  assert axes.mesh_axis_names == ('replica', 'data', 'mdl')
  assert axes.ici_mesh_shape == (1, *data_and_model)
  two_data_axes = 0 < num_experts < num_devices and num_partitions == 1
  assert dict(axes.axis_rules)['batch'] == (('data', 'mdl') if two_data_axes else 'data')


@pytest.mark.parametrize(
  'form, batch, up, kernel',
  [
    (
      DataModelMesh(num_devices=8, num_experts=4, num_partitions=2),
      ('replica', 'data'),
      P('data', None, 'mdl'),
      P('data', 'mdl'),
    ),
    (DataModelMesh(num_devices=8, num_experts=4), ('replica', 'data', 'mdl'), P('data', None, None), P('data', None)),
    (
      DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2),
      ('replica', 'expert', 'data'),
      P('expert', 'data', 'mdl'),
      P('data', 'mdl'),
    ),
    (
      HiddenShardingMesh(num_devices=8, num_experts=2, hidden_dim=12, num_partitions=2),
      ('replica', 'data', 'expert'),
      P('expert', None, ('data', 'mdl')),
      P('data', 'mdl'),
    ),
  ],
  ids=['one data axis', 'two data axes', 'three axes', 'hidden sharding'],
)
def test_meshes_adapt_the_default_rules(form, batch, up, kernel):
  axes = form.axes()

  def spec_of(*split_dims):
    return split_dims_to_partition_spec(split_dims, axes.mesh_axis_names, axes.axis_rules)

  check_axis_rules(axes.axis_rules, axes.mesh_axis_names)
  mesh = MeshSpec(axis_names=axes.mesh_axis_names, ici_mesh_shape=axes.ici_mesh_shape)
  assert list(mesh.sizes(8).values()) == list(axes.ici_mesh_shape)
  assert spec_of('batch') == P(batch)
  assert spec_of('expert', 'expert_embed', 'expert_mlp') == up
  assert spec_of('embed', 'mlp') == kernel


@pytest.mark.parametrize('world_size, num_experts, degrees', [(8, 16, (8, 1)), (8, 4, (4, 2))])
def test_degrees_of_expert_and_hidden_sharding(world_size, num_experts, degrees):
  axes = HiddenShardingMesh(num_devices=world_size, num_experts=num_experts, hidden_dim=16).axes()
  assert axes.ici_mesh_shape == (1, degrees[1], degrees[0], 1)


@pytest.mark.parametrize(
  'form, message',
  [
    (DataModelMesh(num_devices=6, num_experts=4), 'num_devices=6 .* num_experts=4: choose'),
    (DataModelMesh(num_devices=8, num_experts=4, num_partitions=3), 'num_devices=8 .* num_partitions=3: choose'),
    (DataExpertModelMesh(num_devices=8, num_expert_partitions=3), 'num_expert_partitions=3 .*: choose 2'),
    (DataExpertModelMesh(num_devices=8, num_expert_partitions=0), 'num_expert_partitions=0 .*: choose 1'),
    (DataExpertModelMesh(num_devices=8, num_expert_partitions=1, num_stages=3), 'num_stages=3 .*8 devices: choose'),
    (HiddenShardingMesh(num_devices=8, num_experts=2, hidden_dim=18), 'hidden_dim=18 must be a multiple of 4'),
  ],
)
def test_sizes_that_do_not_divide_are_refused(form, message):
  with pytest.raises(UserError, match=message):
    form.axes()
