"""A pipelined stack of experts is the stack of experts on one device, whatever is taken over parts of the batch.

Which rows meet in a group of an expert's capacity or in a shard of the balance loss, where the balance biases go, what
the metrics say: all of it is a function of the batch alone. Rows are padded, the first half of the batch more. The
numbers of the one device are compared with numpy's in float64.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers import TransformerStack
from spmd_tasks.layers.moe import (
  CapacityGather,
  Dropless,
  ExpertChoiceRouter,
  Experts,
  MixtureOfExperts,
  TopKRouter,
)
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, stage_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights
from tests.layers.moe.capacity_reference import kept_choices
from tests.layers.tiny_model import FfnBlock, assert_close

B, T, D, E, K = 16, 6, 8, 6, 2
# 'layers' is named in the mesh, and so holds the stages without a rule.
LAYOUTS = {
  'stage 2 x data 4': {'stage': 2, 'data': 4},
  'stage 2 x data 2 x expert 2': {'stage': 2, 'data': 2, 'expert': 2},
  'layers 2 x data 2': {'layers': 2, 'data': 2},
}
CIRCULAR = {'schedule': 'circular', 'num_repeats': 2}
ONE_F_ONE_B = {'schedule': 'one_forward_one_backward'}
TOP_K = TopKRouter(num_experts=E, num_selected=K, normalize_gates=1.0)
BIASED = TopKRouter(num_experts=E, num_selected=K, score_function='sigmoid', balance_bias=True)
BY_EXPERTS = ExpertChoiceRouter(num_experts=E, group_size=2 * T)


def groups_of(num_rows, form, **settings):
  return form(capacity_factor=1.0, min_capacity=1, group_size=num_rows * T, **settings)


BY_SCORE = groups_of(4, CapacityGather, priority='score')

# name: layers, layout, the pipeline, router, computation, shards of the balance loss
CASES = {
  'circular, groups of 2 rows, two shards in a microbatch': (
    4, 'layers 2 x data 2', {'num_microbatches': 2, **CIRCULAR}, BIASED, groups_of(2, CapacityGather), 4
  ),
  'gpipe, groups of 2 rows': (
    2, 'stage 2 x data 4', {'num_microbatches': 4}, BIASED, groups_of(2, CapacityGather), 2
  ),
  'circular, four shards in a microbatch': (
    4, 'layers 2 x data 2', {'num_microbatches': 2, **CIRCULAR}, TOP_K, BY_SCORE, 8
  ),
  'one forward, one backward, uneven layers, dropless': (
    3, 'stage 2 x data 2 x expert 2', {'num_microbatches': 4, **ONE_F_ONE_B}, BIASED, Dropless(), 2
  ),
  'experts choose from groups of 2 rows': (
    2, 'stage 2 x data 4', {'num_microbatches': 4}, BY_EXPERTS, CapacityGather(), 4
  ),
}  # fmt: skip


def make_block(router, computation, num_shards):
  experts = Experts(num_experts=E, hidden_dim=10)
  return FfnBlock(
    ffn=MixtureOfExperts(router=router, experts=experts, computation=computation, load_balance_shards=num_shards)
  )


@functools.cache
def inputs(batch_size=B):
  rng = np.random.default_rng(0)
  lengths = np.where(np.arange(B) < B // 2, rng.integers(0, 4, B), rng.integers(4, T + 1, B))
  segment_ids = (np.arange(T)[None] < lengths[:, None]).astype('int32')
  x = rng.normal(size=(B, T, D)).astype('float32')
  segment_pos = np.broadcast_to(np.arange(T, dtype='int32'), (B, T))
  return tuple(jnp.asarray(array[:batch_size]) for array in (x, segment_ids, segment_pos))


def make_weights(stack):
  """Away from the initial values, where mistakes hide."""
  abstract, rng = jax.eval_shape(stack.init, jax.random.key(0), *inputs())['params'], np.random.default_rng(1)
  scale = lambda path: {'kernel': 1.0, 'balance_bias': 0.05}.get(path[-1].key, 0.4)
  draw = lambda path, leaf: jnp.asarray(scale(path) * rng.normal(size=leaf.shape), 'float32')
  return jax.tree_util.tree_map_with_path(draw, unbox_weights(abstract))


def loss_fn(stack, weights, x, segment_ids, segment_pos, train):
  y, aux = stack.apply({'params': weights}, x, segment_ids, segment_pos, train=train)
  is_real = (segment_ids != 0)[..., None]
  y = jnp.where(is_real, y, 0.0)  # nobody reads the rest
  loss = jnp.sum(jnp.square(y) * jnp.cos(jnp.arange(D, dtype='float32'))[None, None]) / B
  return loss + jnp.sum(aux['load_balance_loss']) + 0.1 * jnp.sum(aux['router_z_loss']), (y, aux)


def run(stack, weights, layout=None, *, batch_size=B, train=True):
  """Loss, result, statistics and gradients, and the compiled program; on one device without a layout."""
  function = functools.partial(loss_fn, stack, train=train)
  function = jax.value_and_grad(function, argnums=(0, 1), has_aux=True) if train else function
  if layout is None:
    return jax.device_get(jax.jit(function)(weights, *inputs(batch_size))), ''
  sizes = LAYOUTS[layout]
  mesh = MeshSpec(axis_names=tuple(sizes), ici_mesh_shape=tuple(sizes.values())).build(
    jax.devices()[: int(np.prod(list(sizes.values())))]
  )
  base = [(name, None) for name, _ in DEFAULT_AXIS_RULES if name not in ('batch', 'layers', 'expert')]
  rules = stage_axis_rules((('batch', tuple(sizes)[1:]), *base), next(iter(sizes)))

  def scoped(*args):
    with sharding_scope(mesh, rules if 'expert' in sizes else (*rules, ('expert', 'data'))):
      return function(*args)

  rows = NamedSharding(mesh, jax.P(tuple(sizes) if batch_size % mesh.size == 0 else None))
  jitted = jax.jit(scoped, in_shardings=(NamedSharding(mesh, jax.P()), rows, rows, rows))
  compiled = jitted.lower(weights, *inputs(batch_size)).compile()
  return jax.device_get(compiled(weights, *jax.device_put(inputs(batch_size), rows))), compiled.as_text()


def stacks(num_layers, settings, block):
  plain = TransformerStack(block=block, num_layers=num_layers)
  return plain, PipelinedStack(block=block, num_layers=num_layers, **settings), make_weights(plain)


@functools.lru_cache(maxsize=1)
def pipelined_case(name):
  """The plain stack, its weights, and the pipeline's loss, result, statistics and gradients, these by layer."""
  num_layers, layout, settings, router, computation, num_shards = CASES[name]
  plain, pipelined, weights = stacks(num_layers, settings, make_block(router, computation, num_shards))
  repeats = settings.get('num_repeats', 1)
  split = (lambda w: w.reshape(repeats, -1, *w.shape[1:])) if repeats > 1 else lambda w: w
  (values, (weight_grads, x_grads)), _ = run(pipelined, jax.tree.map(split, weights), layout)
  merge = (lambda w: w.reshape(-1, *w.shape[2:])) if repeats > 1 else lambda w: w
  return plain, weights, (values, (jax.tree.map(merge, weight_grads), x_grads))


DEFAULT = next(iter(CASES))


# By default, tests/layers/moe has other choices of experts, and test_pipeline.py other schedules.
@pytest.mark.parametrize(
  'name',  # the first, which another test reads, is the last to be run
  [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != DEFAULT)) for name in reversed(CASES)],
)
def test_losses_gradients_and_metrics_are_those_of_one_device(name):
  plain, weights, got = pipelined_case(name)
  expected, _ = run(plain, weights)
  assert_close(got, expected)
  if BIASED in CASES[name]:  # counts: an expert at the mean load must not move, on any mesh
    grads = [weight_grads['layers']['ffn']['router']['balance_bias'] for _, (weight_grads, _) in (got, expected)]
    np.testing.assert_array_equal(*grads)
    assert np.ptp(grads[0]) > E


def reference(weights, num_shards, group_size, capacity):
  """The statistics of a first layer of sigmoid scores and its bias's gradient, from the definitions, in float64."""
  x, segment_ids, _ = (np.asarray(array, 'float64') for array in inputs())
  weights = jax.tree.map(lambda w: np.asarray(w[0], 'float64'), weights['layers'])
  router, is_real = weights['ffn']['router'], segment_ids != 0
  x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * weights['norm']['scale']
  affinities = 1 / (1 + np.exp(-x @ router['kernel']))
  scores = affinities / affinities.sum(-1, keepdims=True)
  ids = np.argsort(-(affinities + router['balance_bias']), axis=-1, kind='stable')[..., :K]
  ids = np.where(is_real[..., None], ids, E)
  counts = np.stack([(ids == e).sum((1, 2)) for e in range(E)], axis=1)  # [B, E]
  losses = []
  for rows in np.split(np.arange(B), num_shards):
    num_tokens = is_real[rows].sum()
    f, p = counts[rows].sum(0) / num_tokens, scores[rows][is_real[rows]].mean(0)
    losses.append(E * np.sum(f * p))
  kept = kept_choices(ids, E, scores, group_size=group_size, capacity=capacity)
  total = counts.sum(0)
  return {
    'load_balance_loss': np.mean(losses),
    'fraction_dropped': 1 - kept.sum() / total.sum(),
    'expert_usage': kept.sum() / (B * T // group_size * E * capacity),
    'max_expert_load': E * total.max() / total.sum(),
  }, E * total - total.sum()


def test_balance_loss_usage_drops_and_bias_are_those_of_the_definitions():
  """The first of four layers on 2 stages x data 2: four shards of a balance loss in two microbatches."""
  _, weights, ((_, (_, aux)), (grads, _)) = pipelined_case(DEFAULT)
  expected, violation = reference(weights, 4, 2 * T, round(2 * T / E))
  for name, value in expected.items():
    np.testing.assert_allclose(aux[name][0], value, rtol=1e-5, err_msg=name)
  np.testing.assert_array_equal(grads['layers']['ffn']['router']['balance_bias'][0], violation)


def activation_collectives(text):
  """The kinds and result shapes of the collectives on activations outside of the loop over ticks."""
  entry = text[text.index('\nENTRY') :]
  found = re.findall(r'= (.*?) (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(', entry)
  return {kind for shape, kind in found if re.search(rf'\[[\d,]*{T},{D}\]', shape)}


@pytest.mark.parametrize('num_microbatches', [2, 4])
def test_rows_move_within_their_stage_and_are_not_gathered(num_microbatches):
  """On 2 stages x data 2: nothing moves for one microbatch in a stage; an all-to-all sorts the rows of several."""
  settings = {'num_microbatches': num_microbatches}
  _, pipelined, weights = stacks(2, settings, make_block(TOP_K, groups_of(1, CapacityGather), 1))
  _, text = run(pipelined, weights, 'layers 2 x data 2', train=False)
  assert activation_collectives(text) == ({'all-to-all'} if num_microbatches > 2 else set())


@pytest.mark.parametrize('batch_size', [12, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_evaluation_of_another_batch_size_has_the_numbers_of_one_device(batch_size):
  """Groups of 2 rows do not fit 8 microbatches of 12 rows, nor any of 2."""
  block = make_block(BIASED, groups_of(2, CapacityGather), 4)
  plain, pipelined, weights = stacks(2, {'num_microbatches': 8}, block)
  expected, _ = run(plain, weights, batch_size=batch_size, train=False)
  got, text = run(pipelined, weights, 'stage 2 x data 4', batch_size=batch_size, train=False)
  assert_close(got, expected)
  assert ('ppermute' in text) == (batch_size == 12)


@pytest.mark.parametrize(
  'num_microbatches, num_rows, num_shards, message',
  [
    (4, 8, 1, "group_size=48 makes groups of 48 tokens, but each of the pipeline's 4 microbatches has 24"),
    (4, 2, 5, 'load_balance_shards=5 must divide the tokens of the batch'),
    (4, 2, 0, 'load_balance_shards=0 must be at least 1'),
  ],
)
def test_parts_that_do_not_fit_the_training_batch_are_refused(num_microbatches, num_rows, num_shards, message):
  def train():
    block = make_block(TOP_K, groups_of(num_rows, CapacityGather), num_shards)
    _, pipelined, weights = stacks(2, {'num_microbatches': num_microbatches}, block)
    run(pipelined, weights, 'layers 2 x data 2')

  with pytest.raises(ValueError, match=message):
    train()
