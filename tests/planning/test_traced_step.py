"""What one device does in a step: FLOPs, bytes of collectives, of memory and of copies to the host, counted by hand."""

import dataclasses

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.layers.moe import CapacityGather, Dropless, ExpertWeights, RouterOutput
from spmd_tasks.planning import parse_target
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.networks import Networks
from spmd_tasks.planning.operations import memory_passes
from spmd_tasks.planning.roofline import roofline_terms
from spmd_tasks.planning.traced_step import trace_step, walk_jaxpr
from spmd_tasks.runtime.parameter_table import bytes_per_device
from spmd_tasks.sharding import MeshSpec, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope
from tests.planning.compiled_steps import Mixture, Pipelined

MESH = AbstractMesh((4, 2), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)


def spec(*shape, split=(), dtype='bfloat16'):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*split)))


def walked(function, *arguments, weight_axes=None):
  jaxpr = jax.jit(function).trace(*arguments).jaxpr
  return walk_jaxpr(jaxpr, arguments, dict(MESH.shape), weight_axes)


def constrain(x, *split):
  return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*split)))


def communication(step):
  """{(kind, axes): bytes that one device sends}."""
  found = {}
  for operation, count in step.walk():
    if operation.kind == 'collective':
      key = operation.collective, ' '.join(operation.group)
      found[key] = found.get(key, 0) + count * operation.bytes
  return found


def flops(step):
  return sum(count * operation.flops for operation, count in step.walk())


X, W = spec(64, 32, split=('data',)), spec(32, 16, split=('data', 'mdl'))


def test_a_weight_is_gathered_over_the_axis_that_splits_the_rows():
  step = walked(lambda x, w: x @ w, X, W)
  assert flops(step) == 2 * 16 * 32 * 8
  assert communication(step) == {('all_gather', 'data'): 32 * 8 * 2 * 3 / 4}


def test_a_contraction_over_a_split_dim_is_summed():
  """Row-parallel: reduced whole, or scattered to the dim that is split next; in float32 twice the bytes."""
  x, w = spec(64, 32, split=('data', 'mdl')), spec(32, 16, split=('mdl',))
  nbytes = 16 * 16 * 2
  summed = walked(lambda x, w: jnp.tanh(constrain(x @ w, 'data', None)), x, w)
  assert communication(summed) == {('all_reduce', 'mdl'): 2 * nbytes / 2}
  scattered = walked(lambda x, w: constrain(x @ w, 'data', 'mdl'), x, w)
  assert communication(scattered) == {('reduce_scatter', 'mdl'): nbytes / 2}
  residual = walked(lambda x, w: x @ w + x @ w, x, w)  # one product, added to itself, summed once at most
  assert flops(residual) == 2 * 16 * 16 * 16


def test_the_gradient_of_a_weight_is_scattered_to_its_own_axes():
  """In the dtype in which it was summed, before the optimizer reads it in float32."""

  def update(x, w):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.square((x @ w.astype(x.dtype)).astype(jnp.float32))))(w)

  weight = spec(32, 16, split=('data', 'mdl'), dtype='float32')
  step = walked(update, X, weight, weight_axes={(32, 16): (('data',), ('mdl',))})
  found = communication(step)
  assert found['reduce_scatter', 'data'] == 32 * 8 * 2 * 3 / 4
  assert ('all_reduce', 'data') not in found


def test_axes_that_move_are_exchanged_and_those_that_go_are_gathered():
  x = spec(64, 32, split=('data',))
  nbytes = 16 * 32 * 2
  moved = walked(lambda x: constrain(jnp.tanh(x), None, 'data'), x)
  assert communication(moved) == {('all_to_all', 'data'): nbytes * 3 / 4}
  gathered = walked(lambda x: constrain(jnp.tanh(x), None, None), x)
  assert communication(gathered) == {('all_gather', 'data'): 4 * nbytes * 3 / 4}
  reshaped = walked(lambda x: constrain(x.reshape(8, 8, 32), 'data', None, None), x)
  assert communication(reshaped) == {}


def test_loops_count_and_what_is_computed_twice_counts_once():
  def layers(x, stack):
    def layer(x, w):
      return jnp.tanh(x @ w + x @ w), None

    return jax.lax.scan(layer, x, stack)[0]

  step = walked(layers, spec(64, 32, split=('data',)), spec(5, 32, 32, split=(None, 'data')))
  assert flops(step) == 5 * 2 * 16 * 32 * 32
  assert communication(step) == {('all_gather', 'data'): 5 * 32 * 32 * 2 * 3 / 4}


def test_rows_that_are_gathered_from_a_split_batch_stay_split():
  def choose(x, indices):
    return jax.vmap(lambda row, index: row[index])(x, indices)

  for split in (('data',), ()):
    step = walked(choose, spec(64, 512, 256, split=('data',)), spec(64, 128, split=split, dtype='int32'))
    assert sum(op.bytes for op, _ in step.walk() if op.kind == 'gather') == 2 * 16 * 128 * 256 * 2
    assert communication(step) == {}


def test_inside_a_shard_map_collectives_are_written_out():
  def local(x, w):
    return jax.lax.psum_scatter(x @ jax.lax.all_gather(w, 'data', tiled=True), 'mdl', scatter_dimension=1, tiled=True)

  specs = P('data', 'mdl'), P(('mdl', 'data'), None)
  mapped = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P('data', 'mdl'), check_vma=False)
  step = walked(mapped, spec(64, 32, split=('data', 'mdl')), spec(32, 16, split=(('mdl', 'data'),)))
  assert flops(step) == 2 * 16 * 16 * 16
  assert communication(step) == {
    ('all_gather', 'data'): 16 * 16 * 2 * 3 / 4,
    ('reduce_scatter', 'mdl'): 16 * 16 * 2 / 2,
  }


IMAGES, KERNEL = spec(8, 16, 16, 32, split=('data',)), spec(3, 3, 32, 64, split=(None, None, None, 'mdl'))
CONVOLVED = 2 * (2 * 16 * 16 * 32) * (3 * 3 * 32)


def convolve(kernel, images):
  return jax.lax.conv_general_dilated(images, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def test_convolutions_are_products():
  """By output elements, window and input features of one device; so is the kernel's gradient."""
  assert flops(walked(convolve, KERNEL, IMAGES)) == CONVOLVED
  loss = lambda *arguments: jnp.sum(jnp.square(convolve(*arguments)).astype(jnp.float32))
  assert flops(walked(jax.value_and_grad(loss), KERNEL, IMAGES)) == 2 * CONVOLVED
  depthwise = lambda x, kernel: jax.lax.conv_general_dilated(
    x, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=32
  )
  assert flops(walked(depthwise, spec(8, 16, 32, split=('data',)), spec(3, 1, 32))) == 2 * (2 * 16 * 32) * 3


def copy_kernel(x_ref, scale_ref, out_ref):
  out_ref[...] = x_ref[...] * scale_ref[...]


def product_kernel(x_ref, w_ref, out_ref):
  out_ref[...] = x_ref[...] @ w_ref[...]


def call_kernel(kernel, shape, dtype='bfloat16'):
  return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize(
  'function, arguments, num_flops',
  [
    (call_kernel(copy_kernel, (64, 32)), (spec(64, 32), spec(1, 32)), 0),
    (call_kernel(copy_kernel, (64, 32), 'int32'), (spec(64, 32, dtype='int32'), spec(1, 32, dtype='int32')), 0),
    (call_kernel(product_kernel, (64, 16)), (spec(64, 32), spec(32, 16)), 2 * 64 * 32 * 16),
    (lambda table, ids, rows: table.at[ids].min(rows), (spec(64, 32), spec(8, dtype='int32'), spec(8, 32)), 0),
    (lambda x: (jax.debug.print('{}', x[0, 0]), x @ x.T)[1], (X,), 2 * 16 * 64 * 32),
    (lambda x: jax.lax.reduce(x, jnp.bfloat16(1), lambda a, b: a * b, (1,)), (X,), 0),
    (lambda x: jax.nn.relu(jax.nn.silu(x)), (X,), 0),
    (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), (X, spec(32, 32)), 2 * 16 * 32 * 32),
    (lambda x, w: x @ w, (spec(63, 32, split=('data',)), spec(32, 15, split=(None, 'mdl'))), 2 * 16 * 32 * 8),
    (lambda x, w: x @ w, (X, spec(32, 16, split=(None, 'data'))), 2 * 16 * 32 * 16),  # gathers the smaller operand
  ],
)
def test_other_primitives(function, arguments, num_flops):
  """FLOPs of one device; a Pallas kernel counts if it multiplies matrices."""
  assert flops(walked(function, *arguments)) == num_flops


def test_elementwise_operations_are_one_pass():
  """X is read once, and the result written once, however many operations are in between."""
  x = spec(64, 32, split=('data',), dtype='float32')
  nbytes = 16 * 32 * 4
  assert memory_passes(walked(lambda x: jnp.tanh(jnp.exp(x) * 2 + x), x)) == pytest.approx(2 * nbytes, rel=0.01)
  # A norm's mean and result share a read of x; the mean itself is small.
  norm = walked(lambda x: x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True)), x)
  assert 2 * nbytes <= memory_passes(norm) <= 2.2 * nbytes


def test_the_peak_is_what_is_needed_at_once():
  """Three products, of which two are alive at a time; the loop keeps one result for each iteration."""
  x, w = spec(64, 32, split=('data',)), spec(32, 32)
  nbytes = 16 * 32 * 2
  chain = walked(lambda x, w: jnp.tanh(x @ w) @ w @ w, x, w)
  assert sum(live.array.local_bytes for live in chain.peak) == 2 * nbytes

  def kept(x, w):
    return jax.lax.scan(lambda x, _: (x @ w, x @ w), x, length=7)[1]

  assert sum(live.array.local_bytes for live in walked(kept, x, w).peak) >= 7 * nbytes


def test_a_reshaped_elementwise_result_is_written_and_an_update_takes_the_place_of_its_argument():
  x, w = spec(64, 32, split=('data',)), spec(32, 32)
  nbytes = 16 * 32 * 2

  def reshaped(x, w):
    product = x @ w
    return (jnp.tanh(product).reshape(8, 8, 32) @ w).astype(jnp.float32), product @ w

  # The first product is needed to the end, beside what is written for the second.
  assert sum(live.array.local_bytes for live in walked(reshaped, x, w).peak) == 3 * nbytes
  assert not walked(lambda x: x - 0.1 * jnp.tanh(x), x).peak
  assert not walked(lambda x: (x - 0.1 * jnp.tanh(x))[None], x).peak


# --- whole steps ---


def step_of(experiment, target='cpu:8', **overrides):
  job = resolve(experiment, [f'{path}={value}' for path, value in overrides.items()]).build()
  mesh_spec = job.experiment.mesh_spec()
  return trace_step(partition_job(job, parse_target(target).abstract_mesh(mesh_spec)))


class Plain(Tiny):
  """Data 4 x mdl 2."""

  ici_mesh_shape = (1, 4, 2)


def products(step):
  return sum(count * operation.flops for operation, count in step.walk() if operation.kind in ('product', 'grouped'))


def test_microbatches_and_remat_of_a_whole_step():
  """Accumulation changes no FLOPs; remat computes the layers again, but not the logits."""
  whole = products(step_of(Plain))
  assert products(step_of(Plain, **{'task.learner.num_microbatches': 2})) == pytest.approx(whole, rel=1e-6)
  again = products(step_of(Plain, **{'task.model.stack.remat_policy': 'full'}))
  assert 1.15 * whole < again < 4 / 3 * whole


def test_experts_and_stages_are_walked():
  kinds = {operation.collective for operation, _ in step_of(Mixture).walk()}
  assert 'all_to_all' in kinds
  permutes = [operation for operation, _ in step_of(Pipelined).walk() if operation.collective == 'collective_permute']
  assert {operation.group for operation in permutes} == {('stage',)}


class Offloaded(Tiny):
  """Three layers of width 128 on rows of 256 tokens, data 4."""

  ici_mesh_shape = (1, 4, 1)
  num_layers = 3
  model_dims = 128
  hidden_dims = 128
  num_heads = 1
  seq_len = 256
  vocab_size = 256
  dtype = 'bfloat16'
  remat_policy = 'attention_offloaded'


def test_copies_to_the_host():
  """By layer: the input, queries, keys and values, and attention's results in bfloat16; its sums in float32."""
  step = step_of(Offloaded, 'v5e:2x2')
  tokens, width = 8 * 256 // 4, 128
  there, back = (
    sum(
      count * operation.bytes
      for operation, count in step.walk()
      if operation.kind == 'host' and operation.to_host is way
    )
    for way in (True, False)
  )
  assert there == back
  assert there >= 3 * tokens * 4 * width * 2
  named = step_of(Offloaded, 'v5e:2x2', **{'task.model.stack.remat_policy': "'save(query) offload(layer_input)'"})
  moved = sum(count * operation.bytes for operation, count in named.walk() if operation.kind == 'host')
  assert moved == 2 * 3 * tokens * width * 2


def test_the_optimizers_state_is_copied_by_layer():
  """Each moment once there and once back, and one layer of four twice; nothing hides it."""
  target = parse_target('v5e:2x4')
  job = resolve(Plain, ('num_layers=4', 'task.learner.state_on_host=True')).build()
  model = partition_job(job, target.abstract_mesh(job.experiment.mesh_spec()))
  assert bytes_per_device(model.padded_state.learner) < 100  # counts
  state = bytes_per_device(model.padded_state.learner, on_host=True)
  assert state == pytest.approx(2 * bytes_per_device(model.padded_state.weights), rel=0.01)
  step = trace_step(model)
  moved = [(op.to_host, count * op.bytes) for op, count in step.walk() if op.kind == 'host']
  for to_host in (True, False):
    assert state <= sum(size for way, size in moved if way is to_host) <= 1.25 * state
  [term] = [
    t for t in roofline_terms(step, target.chip, Networks(target, job.experiment.mesh_spec())) if t.name == 'host'
  ]
  assert term.seconds == pytest.approx(sum(size for _, size in moved) / target.chip.host_bandwidth)
  assert (
    max(x.size_bytes for op, _ in step.walk() if op.kind == 'host' for x in op.outputs if not x.on_host) < state / 8
  )


@pytest.mark.parametrize('window, num_pairs', [(None, 36), (1024, 15)])
def test_attention_counts_the_blocks_of_its_mask(window, num_pairs):
  """8 x 8 blocks of 1,024 tokens; products of scores: 2 forward, and 5 in one kernel for all gradients or 7 in two."""
  settings = {
    'seq_len': 8192,
    'remat_policy': 'none',
    'task.model.stack.block.attention.window': window,
  }
  for gradient_keys, products in ((1024, 7), (None, 9)):
    settings['task.model.stack.block.attention.gradient_keys'] = gradient_keys
    step = step_of(Offloaded, 'v5e:2x2', **settings)
    attention = sum(count * operation.flops for operation, count in step.walk() if operation.kind == 'attention')
    assert attention == 3 * products * 2 * 128 * num_pairs * 1024**2 * (8 // 4)


# --- experts ---

BATCH, LENGTH, CHOICES, EXPERTS, WIDTH, HIDDEN = 16, 512, 2, 8, 128, 256  # whole tiles of 512 rows
UP, DOWN = ('expert', 'expert_embed', 'expert_mlp'), ('expert', 'expert_mlp', 'expert_embed')
LAYOUTS = {
  'exchange': ({'expert': 8}, {'batch': 'expert'}),
  'tensor parallel': ({'expert': 4, 'mdl': 2}, {'batch': 'expert', 'expert_mlp': 'mdl'}),
  'FSDP': ({'data': 2, 'expert': 4}, {'batch': ('data', 'expert'), 'expert_embed': 'data'}),
  'sum': ({'data': 4, 'expert': 2}, {'batch': 'data', 'expert_embed': 'data'}),
  'sum and exchange': ({'a': 2, 'b': 2, 'c': 2}, {'batch': ('b', 'c'), 'expert': ('a', 'b')}),
  'hidden sharding': ({'expert': 4, 'hidden': 2}, {'batch': ('expert', 'hidden'), 'expert_mlp': 'hidden'}),
  'replicated': ({'data': 8}, {'batch': 'data'}),
}
WITHOUT_EXCHANGE = 'sum', 'replicated'
V5P, H200 = 'v5p:2x2x2', 'h200:8'
RING, GATHER, ALL_TO_ALL = (Dropless(dispatch=name) for name in ('ring', 'gather', 'padded_all_to_all'))
BOUNDED = dataclasses.replace(ALL_TO_ALL, capacity_factor=1.25)
SLOTS = CapacityGather(capacity_factor=1, capacity_counts_choices=True)
# 3 products forward, twice as many backward; a ring's backward pass computes two of the first again.
CASES = [
  ('hidden sharding', RING, V5P, EXPERTS, 11),
  ('sum', RING, V5P, EXPERTS, 9),
  ('sum and exchange', GATHER, V5P, EXPERTS, 9),
  ('sum and exchange', BOUNDED, V5P, EXPERTS, 9),
  ('tensor parallel', dataclasses.replace(BOUNDED, overflow='passes'), V5P, EXPERTS, 9),
  ('tensor parallel', RING, H200, EXPERTS, 11),
  ('sum and exchange', ALL_TO_ALL, H200, EXPERTS, 9),
  ('sum and exchange', dataclasses.replace(ALL_TO_ALL, backend='ragged_dot'), V5P, EXPERTS, 9),
  ('tensor parallel', ALL_TO_ALL, V5P, 4, 9),  # fewer experts on a device than choices
  ('exchange', RING, V5P, 12, 11 * 16 / 12),  # six devices have two experts, two have none: the time of the six
  ('tensor parallel', SLOTS, V5P, EXPERTS, 9),
]
CASES += [
  pytest.param(layout, computation, V5P, EXPERTS, num_products, marks=pytest.mark.exhaustive)
  for computation, recomputed in ((ALL_TO_ALL, 0), (RING, 2), (GATHER, 0))
  for layout in LAYOUTS
  for num_products in [9 + (0 if layout in WITHOUT_EXCHANGE else recomputed)]
]


@pytest.mark.parametrize('layout, computation, target, num_experts, num_products', CASES)
def test_experts_are_balanced(layout, computation, target, num_experts, num_products):
  """Each choice of each token has a row in every product, whatever the size of the buffers."""
  axis_sizes, rules = LAYOUTS[layout]
  names = 'batch', 'seq', 'act_embed', 'expert', 'expert_embed', 'expert_mlp'
  axis_rules = tuple((name, rules.get(name)) for name in names if name not in axis_sizes)
  mesh_spec = MeshSpec(axis_names=tuple(axis_sizes), ici_mesh_shape=tuple(axis_sizes.values()))
  mesh = parse_target(target).abstract_mesh(mesh_spec)

  def argument(*shape, split_dims, dtype='bfloat16'):
    sharding = NamedSharding(mesh, split_dims_to_partition_spec(split_dims, mesh.axis_names, axis_rules))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def loss(x, gates, up, gate, down, expert_ids):
    split_dims = {'up_split_dims': UP, 'down_split_dims': DOWN}
    experts = ExpertWeights(up=up, gate=gate, down=down, activation='silu', **split_dims)
    scores = jnp.zeros((BATCH, LENGTH, num_experts))
    routing = RouterOutput(logits=scores, scores=scores, token_mask=None, expert_ids=expert_ids, gates=gates)
    return jnp.sum(jnp.square(computation(x, routing, experts, train=True)[0].astype(jnp.float32)))

  tokens = 'batch', 'seq', None
  arguments = (
    argument(BATCH, LENGTH, WIDTH, split_dims=tokens),
    argument(BATCH, LENGTH, CHOICES, split_dims=tokens, dtype='float32'),
    *[argument(num_experts, WIDTH, HIDDEN, split_dims=UP)] * 2,
    argument(num_experts, HIDDEN, WIDTH, split_dims=DOWN),
    argument(BATCH, LENGTH, CHOICES, split_dims=tokens, dtype='int32'),
  )
  with sharding_scope(mesh, axis_rules):
    jaxpr = jax.jit(jax.grad(loss, argnums=range(5))).trace(*arguments).jaxpr
  step = walk_jaxpr(jaxpr, arguments, axis_sizes)
  rows = BATCH * LENGTH * CHOICES
  assert 8 * products(step) == pytest.approx(num_products * 2 * rows * WIDTH * HIDDEN, rel=1e-3)


# --- time ---


def test_time_is_work_over_rates():
  """v5p: 459 TFLOP/s and 2,765 GB/s, of which rates.toml says what is reached."""
  chip, big = CHIPS['v5p'], spec(4 * 8192, 8192, split=('data',))
  weight = spec(8192, 8192)
  target, mesh_spec = parse_target('v5p:2x2x2'), MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2))
  networks = Networks(target, mesh_spec)
  step = walked(lambda x, w: jnp.tanh(x @ w), big, weight)
  terms = {term.name: term for term in roofline_terms(step, chip, networks)}
  product = terms['products']
  assert (product.work, product.basis) == (2 * 8192**3, 'fitted')
  assert product.seconds == pytest.approx(product.work / (chip.peak_flops * 0.90))
  assert terms['memory'].seconds == pytest.approx(2 * 8192 * 8192 * 2 / (chip.hbm_bandwidth * 0.85))
  thin = walked(lambda x, w: x @ w, spec(4 * 8, 8192, split=('data',)), weight)  # bound by the weight's bytes
  (term,) = [term for term in roofline_terms(thin, chip, networks) if term.name == 'products']
  assert term.seconds == pytest.approx(8192 * 8192 * 2 / (chip.hbm_bandwidth * 0.85), rel=0.01)


def test_collectives_of_a_compiled_step_replace_the_traced_ones():
  target, mesh_spec = (
    parse_target('2x v5p:2x2x1'),
    MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1)),
  )
  networks = Networks(target, mesh_spec)
  terms = roofline_terms(walked(lambda x, w: x @ w, X, W), target.chip, networks, [('all_reduce', ('data',), 4.11e9)])
  network = [term for term in terms if term.name.startswith('network')]
  assert [(term.name, term.work) for term in network] == [('network data', 4.11e9)]
  assert network[0].seconds == pytest.approx(1)  # the data-center network hides nothing
