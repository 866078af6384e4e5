"""What mesh axes are to experts, by the axis rules; and which assignments a device keeps."""

from dropless_reference import draw_inputs, expert_weights, mesh_and_rules
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.layers.moe._expert_parallel import ExpertLayout, expert_layout, select_assignments
from spmd_tasks.sharding import DataExpertModelMesh, DataModelMesh, HiddenShardingMesh, MeshSpec
from spmd_tasks.sharding.specs import ShardingScope

ACTIVATION_SPLIT_DIMS = ('batch', 'seq', 'act_embed')
TOKENS = (8, 4)
FORMS = {
  # T5X's two forms and MegaBlocks' on 8 devices; (exchange, gathered, summed, up_embed).
  'experts along data': (
    DataModelMesh(num_devices=8, num_experts=8, num_partitions=2),
    (('data',), (), ('mdl',), ()),
  ),
  'two data axes': (
    DataModelMesh(num_devices=8, num_experts=4),
    (('data',), (), (), ()),
  ),
  'experts on their own axis': (
    DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2),
    (('expert',), (), ('mdl',), ('data',)),
  ),
  'hidden sharding': (
    HiddenShardingMesh(num_devices=8, num_experts=4, hidden_dim=6),
    (('expert',), ('data',), (), ()),
  ),
}


@pytest.fixture
def weights(rng):
  return expert_weights(draw_inputs(rng)[0])


@pytest.mark.parametrize('form, expected', FORMS.values(), ids=FORMS)
def test_of_the_known_forms(form, expected, weights):
  axes = form.axes()
  mesh = MeshSpec(axis_names=axes.mesh_axis_names, ici_mesh_shape=axes.ici_mesh_shape).build()
  layout = expert_layout(ShardingScope(mesh, axes.axis_rules), weights, ACTIVATION_SPLIT_DIMS, TOKENS)
  assert (layout.exchange, layout.gathered, layout.summed, layout.up_embed) == expected
  assert layout.up_embed == layout.down_embed
  assert set(layout.tokens) == {axis for axis in dict(axes.axis_rules)['batch'] if mesh.shape[axis] > 1}
  assert set(layout.all_axes) == {axis for axis, size in mesh.shape.items() if size > 1}


def test_fsdp_over_an_axis_without_tokens_is_left_to_the_border(weights):
  scope = ShardingScope(*mesh_and_rules({'data': 4, 'mdl': 2}, {'batch': 'data', 'expert_embed': 'mdl'}))
  layout = expert_layout(scope, weights, ACTIVATION_SPLIT_DIMS, TOKENS)
  assert (layout.up_embed, layout.down_embed, layout.all_axes) == ((), (), ('data',))


def test_up_and_down_must_agree(weights):
  scope = ShardingScope(*mesh_and_rules({'data': 4, 'mdl': 2}, {'batch': 'data', 'expert': 'data'}))
  weights = weights.replace(down_split_dims=('mdl', None, None))
  with pytest.raises(ValueError, match=r"experts over \('data',\).*down_split_dims=.* over \('mdl',\).*the same"):
    expert_layout(scope, weights, ACTIVATION_SPLIT_DIMS, TOKENS)


@pytest.mark.parametrize(
  'expert, batch',
  [(('a', 'b'), ('a', 'b')), (('a', 'b'), ('b',)), (('b', 'a'), ('b',)), (('a', 'b'), ('a',)), (('b', 'a'), ())],
)
def test_every_assignment_is_kept_by_the_devices_that_share_its_expert(expert, batch):
  """By numbering: expert e is on the device with flat index e // 3 along `expert`, the first axis slowest."""
  sizes, num_experts = {'a': 2, 'b': 4}, 24
  mesh, _ = mesh_and_rules(sizes, {})
  layout = ExpertLayout(batch=batch, seq=(), expert=expert, hidden=(), up_embed=(), down_embed=())
  expert_ids = np.arange(num_experts + 1, dtype=np.int32)[:, None]
  gates = np.where(expert_ids == num_experts, 0, 1 + expert_ids).astype(np.float32)

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=(P(), P()), out_specs=P(('a', 'b')), check_vma=False)
  def select(expert_ids, gates):
    ids, gates = select_assignments(expert_ids, gates, num_experts=num_experts, layout=layout, axis_sizes=sizes)
    return ids[None], gates[None]

  ids_by_device, gates_by_device = select(expert_ids, gates)
  num_kept = 3 * int(np.prod([sizes[axis] for axis in expert if axis in batch]))
  for device, (a, b) in enumerate(np.ndindex(2, 4)):
    coordinates = {'a': a, 'b': b}
    kept = []
    for e in range(num_experts):
      place = dict(zip(expert, np.unravel_index(e // 3, [sizes[axis] for axis in expert])))
      if all(place[axis] == coordinates[axis] for axis in expert if axis not in batch):
        kept.append(e)
    # Those kept are numbered in their order.
    expected = np.full(num_experts + 1, num_kept)
    expected[kept] = np.arange(len(kept))
    np.testing.assert_array_equal(ids_by_device[device, :, 0], expected)
    np.testing.assert_array_equal(gates_by_device[device, :, 0], np.where(expected == num_kept, 0, gates[:, 0]))
