"""The meshes and rules of expert parallelism: T5X's two forms, as its own tests have them, and MegaBlocks' degrees."""

import re

from jax.sharding import PartitionSpec as P
import pytest

from spmd_tasks.bridges.t5x import t5x_axis_rules
from spmd_tasks.sharding import (
  DEFAULT_AXIS_RULES,
  DataExpertModelMesh,
  DataModelMesh,
  HiddenShardingMesh,
  MeshSpec,
  split_dims_to_partition_spec,
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


@pytest.mark.parametrize(
  'activations, parameters, kernel, embedding, norm, residual',
  [
    (1, 1, P(None, 'mdl'), P('mdl', None), P(None), None),
    (2, 1, P(None, 'mdl'), P('mdl', None), P('mdl'), 'mdl'),
    (1, 2, P('data', 'mdl'), P('mdl', 'data'), P('data'), None),
    (2, 2, P('data', 'mdl'), P('mdl', 'data'), P('mdl'), 'mdl'),
  ],
)
def test_the_dims_of_t5x_standard_rules(activations, parameters, kernel, embedding, norm, residual):
  """What T5X's standard_logical_axis_rules make of its weights and of the residual stream."""
  dims = {'activation_partitioning_dims': activations, 'parameter_partitioning_dims': parameters}
  rules = t5x_axis_rules(DEFAULT_AXIS_RULES, **dims)

  def spec_of(*split_dims):
    return split_dims_to_partition_spec(split_dims, ('replica', 'data', 'mdl'), rules)

  assert (spec_of('embed', 'mlp'), spec_of('vocab', 'embed'), spec_of('norm')) == (kernel, embedding, norm)
  assert spec_of('batch', 'seq', 'act_embed') == P(('replica', 'data'), None, residual)
  assert spec_of('expert', 'expert_embed', 'expert_mlp') == P('data', None, 'mdl')
  with pytest.raises(ValueError, match='must be 1 or 2'):
    t5x_axis_rules(DEFAULT_AXIS_RULES, activation_partitioning_dims=3)


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
def test_what_the_forms_make_of_our_own_rules(form, batch, up, kernel):
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
    (DataModelMesh(num_devices=6, num_experts=4), '6 devices are not a multiple of 4 experts'),
    (
      DataModelMesh(num_devices=8, num_experts=4, num_partitions=3),
      '8 devices are not a multiple of the model parallelism 3',
    ),
    (DataExpertModelMesh(num_devices=8, num_expert_partitions=3), 'over num_partitions=1, 8: choose 2'),
    (DataExpertModelMesh(num_devices=8, num_expert_partitions=0), 'over num_partitions=1, 8: choose 1'),
    (HiddenShardingMesh(num_devices=8, num_experts=2, hidden_dim=18), 'hidden_dim=18 must be a multiple of 4'),
  ],
)
def test_what_does_not_fit_is_refused(form, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    form.axes()
