"""Collectives of compiled programs: bytes per axis against formulas, and every form in which compilers write groups.

Shapes: B rows of a batch, T sequence, D model, F ffn, V vocab, L layers, E experts (one per device), P stages, M
microbatches; n devices of an axis. Tiny's numbers are float32.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.implementations import attend
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.planning.collectives import collectives, replica_groups
from spmd_tasks.planning.program import read_program
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights
from tests.planning.compiled_steps import Dense, Pipelined, compiled_step, program_of

B, T, D, F, V, L = 8, 16, 32, 64, 64, 2
BYTES = 4


def measured(experiment: type, kind: str, axis: str) -> float:
  """Bytes that a device sends per step, in collectives of a kind along one axis alone."""
  step = compiled_step(experiment)
  found = collectives(step.program, step.model.mesh)
  return sum(each.bytes_per_step for each in found if (each.kind, each.axes) == (kind, (axis,)))


def test_fully_sharded_data_parallelism():
  """Each matrix is gathered for the forward and for the backward pass, and its gradient is summed once."""
  data, mdl = 4, 2
  matrices = L * (4 * D * D + 3 * D * F) / mdl
  table = V * D / mdl  # gathered once; its gradient is that of the lookup and that of the logits
  norms = (2 * L + 1) * D
  gathered = (data - 1) / data * (2 * matrices + table) * BYTES
  # XLA's CPU compiler sums the whole gradient and then takes a slice; a reduce scatter would send half.
  summed = 2 * (data - 1) / data * (matrices + 2 * table + norms) * BYTES
  assert measured(Dense, 'all_gather', 'data') == pytest.approx(gathered, rel=0.05)
  assert measured(Dense, 'all_reduce', 'data') == pytest.approx(summed, rel=0.05)


def test_tensor_parallelism():
  """Activations [B, T, D] are summed after attention and ffn; their gradients before q, k, v, and up and gate."""
  data, mdl = 4, 2
  activation = B / data * T * D * BYTES
  num_sums = L * (2 + 3 + 2) + 2  # a lookup in a split table, and the gradient of the logits
  assert measured(Dense, 'all_reduce', 'mdl') == pytest.approx(2 * (mdl - 1) / mdl * num_sums * activation, rel=0.05)


def test_expert_parallelism():
  """Tokens go to their experts and come back, and so do their gradients; each device has room for all of its tokens."""
  n = 8
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=n, num_selected=2),
    experts=Experts(num_experts=n, hidden_dim=F),
    computation=Dropless(dispatch='padded_all_to_all'),
  )
  mesh = MeshSpec(axis_names=('expert',), ici_mesh_shape=(n,)).build()
  others = tuple((name, None) for name, _ in DEFAULT_AXIS_RULES if name not in ('batch', 'expert'))

  def loss(weights, x):
    with sharding_scope(mesh, (('batch', 'expert'), *others)):
      return jnp.sum(jnp.sin(layer.apply({'params': weights}, x)[0]))

  x = jax.ShapeDtypeStruct((B, T, D), 'float32', sharding=jax.NamedSharding(mesh, jax.P('expert')))
  weights = jax.tree.map(
    lambda w: jax.ShapeDtypeStruct(
      w.shape, w.dtype, sharding=jax.NamedSharding(mesh, jax.P(*['expert'] * (w.ndim > 2)))
    ),
    unbox_weights(jax.eval_shape(layer.init, jax.random.key(0), x)['params']),
  )
  found = collectives(read_program(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile()), mesh)
  sent = sum(each.bytes_per_step for each in found if (each.kind, each.axes) == ('all_to_all', ('expert',)))
  exchanged = n * (B / n * T) * D * BYTES
  assert sent == pytest.approx(4 * (n - 1) / n * exchanged, rel=0.05)


def test_pipeline_parallelism():
  """In each tick two microbatches move on, one between layers and one in the ring of slots; so do their gradients."""
  data, num_stages, num_microbatches = 2, 4, 4
  tokens = B / num_microbatches / data * T
  activation, positions = tokens * D * BYTES, tokens * 2 * BYTES  # segment ids and positions have no gradients
  num_ticks = num_microbatches + num_stages - 1
  expected = num_ticks * (2 * (activation + positions) + 2 * activation)
  assert measured(Pipelined, 'collective_permute', 'stage') == pytest.approx(expected, rel=0.05)


def test_context_parallelism_with_a_ring():
  """Keys and values go n times to the neighbour, and their gradients back.

  Queries, keys and values go to the device whose turn they are, and results come back: 4 parts, and their gradients.
  """
  data, n = 2, 4
  mesh = MeshSpec(axis_names=('data', 'context'), ici_mesh_shape=(data, n)).build()
  split_dims = ('batch', 'seq', None, None)

  def loss(query, key, value, segment_ids):
    with sharding_scope(mesh, (('batch', 'data'), ('seq', 'context'))):
      return jnp.sum(jnp.sin(attend(query, key, value, segment_ids, split_dims=split_dims, implementation='ring')))

  like = lambda shape, dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=jax.NamedSharding(mesh, jax.P('data', 'context'))
  )
  arguments = (*[like((B, T, 2, D // 2), 'float32')] * 3, like((B, T), 'int32'))
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
  found = collectives(read_program(compiled), mesh)
  part, documents = B / data * T / n * D * BYTES, B / data * T / n * 4
  sent = sum(each.bytes_per_step for each in found if (each.kind, each.axes) == ('collective_permute', ('context',)))
  assert sent == pytest.approx(2 * (2 * n + 4) * part + (n + 1) * documents, rel=0.05)
  assert sum(each.bytes_per_step for each in found if each.kind == 'all_gather') < part  # documents only


ALL_REDUCE = """\
HloModule groups, replica_count=1, num_partitions=8

ENTRY %main (a: f32[64]) -> f32[64] {{
  %a = f32[64]{{0}} parameter(0)
  ROOT %r = f32[64]{{0}} all-reduce(%a), channel_id=1, use_global_device_ids=true, replica_groups={}, to_apply=%add
}}
"""


@pytest.mark.parametrize(
  'text, groups',
  [
    ('{{0,1},{2,3},{4,5},{6,7}}', [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ('{}', [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ('[2,4]<=[4,2]T(1,0)', [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    # A mesh whose devices are an iota array: arange(8).reshape(2, 4).T is [[0, 4], [1, 5], [2, 6], [3, 7]].
    ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(1,2,0)) {'a':(2)2,'b'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
  ],
)
def test_replica_groups(text, groups):
  found = replica_groups(program_of(ALL_REDUCE.format(text)).module.entry.root, 8)
  assert sorted(sorted(group.tolist()) for group in found) == groups


@pytest.mark.parametrize('text', ["mesh['a'=2,'b'=4] over {'b'}", '[2,4]<=[8] reversed', '{0,1},{2,3}'])
def test_groups_in_another_form_are_an_error_and_not_one_group_of_all(text):
  with pytest.raises(UserError, match='cannot be read'):
    replica_groups(program_of(ALL_REDUCE.format(text)).module.entry.root, 8)


def mesh_of(shape: dict[str, int], num_slices: int = 1) -> Any:
  num_devices = int(np.prod(list(shape.values())))
  devices = [SimpleNamespace(platform='tpu', slice_index=i * num_slices // num_devices) for i in range(num_devices)]
  return SimpleNamespace(devices=np.array(devices).reshape(list(shape.values())), shape=shape, size=num_devices)


FORMS = """\
HloModule forms, is_scheduled=true, num_partitions=8

%wrapped (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%scatter (p.1: f32[64]) -> f32[8] {
  %p.1 = f32[64]{0} parameter(0)
  %ar = f32[64]{0} all-reduce(%p.1), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %slice = f32[8]{0} dynamic-slice(%ar, %p.1), dynamic_slice_sizes={8}
}

%begin (p.2: f32[8]) -> (f32[8], f32[64]) {
  %p.2 = f32[8]{0} parameter(0)
  %ag = f32[64]{0} all-gather(%p.2), channel_id=3, replica_groups={}, dimensions={0}
  ROOT %s = (f32[8]{0}, f32[64]{0}) custom-call(%ag), custom_call_target="AsyncCollectiveStart"
}

%middle (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %ag.1 = f32[64]{0} all-gather(%p.3), channel_id=3, replica_groups={}, dimensions={0}
  ROOT %n = f32[8]{0} negate(%p.3)
}

%finish (p.4: f32[8]) -> f32[64] {
  %p.4 = f32[8]{0} parameter(0)
  %ag.2 = f32[64]{0} all-gather(%p.4), channel_id=3, replica_groups={}, dimensions={0}
  ROOT %d = f32[64]{0} custom-call(%ag.2), custom_call_target="AsyncCollectiveDone"
}

%called (p.5: f32[8]) -> f32[64] {
  %p.5 = f32[8]{0} parameter(0)
  ROOT %ag.5 = f32[64]{0} all-gather(%p.5), channel_id=7, replica_groups={}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[64], b: f32[8]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %rs-start = ((f32[64]), f32[8]) async-start(%a), calls=%wrapped
  %work = f32[64]{0} negate(%a)
  %rs-done = f32[8]{0} async-done(%rs-start), calls=%wrapped
  %ars = f32[8]{0} fusion(%work), kind=kCustom, calls=%scatter
  %begun = (f32[8]{0}, f32[64]{0}) fusion(%b), kind=kCustom, calls=%begin
  %moved = f32[8]{0} fusion(%b), kind=kCustom, calls=%middle
  %finished = f32[64]{0} fusion(%begun), kind=kCustom, calls=%finish
  %permute-start = (f32[64]{0}, f32[64]{0}) collective-permute-start(%a), source_target_pairs={{0,4},{4,0}}
  %permute-done = f32[64]{0} collective-permute-done(%permute-start)
  %t = token[] after-all()
  %send = (f32[64]{0}, u32[], token[]) send(%a, %t), channel_id=6, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="x_0",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[64]{0}, u32[], token[]) recv(%t), channel_id=5, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="x_0",_xla_megascale_transfer_type="ALL_REDUCE"}
  %more = f32[64]{0} negate(%a)
  %recv-done = (f32[64]{0}, token[]) recv-done(%recv), channel_id=5
  %sparse-start = ((f32[8]{0}), f32[64]{0}) call-start(%b), to_apply=%called
  %last = f32[64]{0} negate(%a)
  %sparse-done = f32[64]{0} call-done(%sparse-start)
  ROOT %alone = f32[64]{0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""


def test_every_form_of_a_collective_counts_once():
  found = collectives(program_of(FORMS), mesh_of({'data': 2, 'mdl': 4}, num_slices=2))
  shard, whole = 8 * BYTES, 64 * BYTES
  assert [(each.kind, each.axes, each.bytes_per_device, each.network, each.is_asynchronous) for each in found] == [
    ('reduce_scatter', ('data', 'mdl'), 7 / 8 * whole, 'dcn', True),
    ('reduce_scatter', ('data', 'mdl'), 7 / 8 * whole, 'dcn', False),
    ('all_gather', ('data', 'mdl'), 7 * shard, 'dcn', True),
    ('collective_permute', ('data',), whole, 'dcn', False),
    ('all_reduce', ('data',), 2 * 1 / 2 * whole, 'dcn', True),
    ('all_gather', ('data', 'mdl'), 7 * shard, 'dcn', True),
  ]
  assert {each.network for each in collectives(program_of(FORMS), mesh_of({'data': 2, 'mdl': 4}))} == {'ici'}
