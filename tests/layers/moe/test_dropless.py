"""Dropless on one device and on every kind of mesh: a loop over assignments in float64, whatever the layout.

Each case is one compiled program, run with three routings.
"""

import dataclasses
import functools
import re

from dropless_reference import (
  assert_is_reference,
  compute,
  draw_expert_ids,
  draw_inputs,
  expert_weights,
  mesh_and_rules,
  routing_of,
  value_and_gradients,
)
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.layers import remat_policy
from spmd_tasks.layers.base import BatchPart, layer_scope
from spmd_tasks.layers.moe import Dropless, _permutation
from spmd_tasks.layers.moe._permutation import sort_by_expert
from spmd_tasks.sharding.specs import sharding_scope

# Mesh, axis rules, dims.
LAYOUTS = {
  'expert 4': ({'expert': 4}, {'batch': 'expert'}, {}),
  'data 4 (experts too) x mdl 2': ({'data': 4, 'mdl': 2}, {'batch': 'data', 'expert': 'data', 'expert_mlp': 'mdl'}, {}),
  'data 2 (FSDP) x expert 2 x mdl 2, biases': (
    {'data': 2, 'expert': 2, 'mdl': 2},
    {'batch': ('data', 'expert'), 'expert_embed': 'data', 'expert_mlp': 'mdl'},
    {'bias': True},
  ),
  'hidden sharding, 4 experts on 8 devices, biases': (
    {'expert': 4, 'hidden': 2},
    {'batch': ('expert', 'hidden'), 'expert_mlp': 'hidden'},
    {'bias': True},
  ),
  'experts over two axes, one without tokens': (
    {'a': 2, 'b': 2, 'c': 2},
    {'batch': ('b', 'c'), 'expert': ('a', 'b'), 'expert_embed': 'c'},
    {'E': 8},
  ),
  'the sequence is split too': ({'data': 2, 'seq': 4}, {'batch': 'data', 'expert': ('data', 'seq')}, {'E': 8}),
  '6 experts on 4 devices, and nothing divides': (
    {'data': 2, 'expert': 4},
    {'batch': ('data', 'expert'), 'expert_embed': 'data'},
    {'E': 6, 'B': 5, 'D': 5, 'F': 7},
  ),
  'uneven in all of batch, sequence and hidden layer, biases': (
    {'a': 2, 'b': 2, 'mdl': 2},
    {'batch': 'a', 'seq': 'b', 'expert': 'a', 'expert_mlp': ('b', 'mdl')},
    {'E': 3, 'B': 3, 'T': 5, 'F': 5, 'bias': True},
  ),
}
# These have no tokens to exchange: one program for all dispatches.
ONE_DEVICE = [{'gated': False}, {'E': 16, 'k': 4, 'D': 5, 'F': 3}, {'B': 1, 'T': 1}]  # one expert: test_layer.py
LAYOUTS_WITHOUT_EXCHANGE = {str(dims): ({}, {}, dims) for dims in ONE_DEVICE} | {
  'experts on an axis without tokens': (
    {'data': 4, 'mdl': 2},
    {'batch': 'data', 'expert': 'mdl', 'expert_embed': 'data'},
    {'E': 5},
  )
}
# By default each layout has one of the dispatches, in turns. test_dispatch.py has the first; the third is more than
# the second; the fifth is gathered.
CASES = [
  pytest.param(name, dispatch, marks=[pytest.mark.exhaustive] * (j in (0, 1, 4) or (i + j) % 2))
  for i, dispatch in enumerate(('ring', 'padded_all_to_all'))
  for j, name in enumerate(LAYOUTS)
]
CASES += [
  pytest.param(name, 'ring', marks=[pytest.mark.exhaustive] * (j < 2))
  for j, name in enumerate(LAYOUTS_WITHOUT_EXCHANGE)
]
# Weights that are gathered along E, along D first, and beside an axis that splits experts only.
CASES += [pytest.param(list(LAYOUTS)[j], 'gather', marks=[pytest.mark.exhaustive] * (j != 4)) for j in (2, 4, 6)]


@pytest.mark.parametrize('name, dispatch', CASES)
def test_is_the_loop_over_assignments(name, dispatch, rng):
  axis_sizes, rules, dims = (LAYOUTS | LAYOUTS_WITHOUT_EXCHANGE)[name]
  layout = mesh_and_rules(axis_sizes, rules) if axis_sizes else ()
  run = value_and_gradients(Dropless(dispatch=dispatch), *layout)
  inputs, d_y = draw_inputs(rng, **dims)
  id_dims = {dim: size for dim, size in dims.items() if dim in 'BTEk'}
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, **id_dims)
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, expert_ids, d_y)
    assert result[2]['fraction_dropped'] == 0


@pytest.mark.parametrize('dispatch, model_dim', [('ring', 7), ('padded_all_to_all', 8), ('gather', 8)])
def test_fsdp_keeps_no_gathered_weights(dispatch, model_dim, rng):
  """What a layer keeps for its backward pass is one device's part of the weights, here half of an expert's."""
  mesh, rules = mesh_and_rules({'data': 2, 'expert': 4}, {'batch': ('expert', 'data'), 'expert_embed': 'data'})
  inputs, _ = draw_inputs(rng, D=model_dim, F=30)
  expert_ids = draw_expert_ids(rng, 'mixed')

  def layer(inputs):
    with sharding_scope(mesh, rules):
      return compute(Dropless(dispatch=dispatch), inputs, expert_ids)[0]

  kept = jax.tree.leaves(jax.eval_shape(lambda inputs: jax.vjp(layer, inputs)[1], inputs))
  weights = [array.shape for array in kept if array.ndim == 3 and 30 in array.shape]
  assert sorted(weights) == [(4, 8, 30), (4, 8, 30), (4, 30, 8)]  # of all 8 devices together


def under_stages(form, mesh, computation):
  """`compute` for inputs with a leading dim of 2 stages, as pipelining calls a layer."""

  def one_stage(inputs, expert_ids):
    return compute(computation, inputs, expert_ids)[0]

  if form == 'vmap':
    return jax.vmap(one_stage, spmd_axis_name='stage')

  def stage_on_device(inputs, expert_ids):
    return one_stage(*jax.tree.map(lambda array: array[0], (inputs, expert_ids)))[None]

  return functools.partial(
    jax.shard_map(
      stage_on_device,
      mesh=mesh,
      in_specs=(P('stage'), P('stage')),
      out_specs=P('stage'),
      axis_names={'stage'},
      check_vma=form == 'checked shard_map',
    )
  )


@pytest.mark.parametrize(  # a PipelinedStack calls its stages by a shard_map
  'form, dispatch',
  [pytest.param('vmap', 'padded_all_to_all', marks=pytest.mark.exhaustive), ('shard_map', 'ring')],
)
def test_under_pipeline_stages(form, dispatch, rng):
  mesh, rules = mesh_and_rules(
    {'stage': 2, 'data': 2, 'mdl': 2}, {'batch': 'data', 'expert': 'data', 'expert_mlp': 'mdl'}
  )
  computation = Dropless(dispatch=dispatch)
  stages = [(*draw_inputs(rng), draw_expert_ids(rng, 'mixed')) for _ in range(2)]
  inputs, d_y, expert_ids = jax.tree.map(lambda *arrays: np.stack(arrays), *stages)

  def loss(inputs):
    with sharding_scope(mesh, rules):
      y = under_stages(form, mesh, computation)(inputs, expert_ids)
    return jnp.sum(y * d_y.astype(np.float32)), y

  gradients, y = jax.jit(jax.grad(loss, has_aux=True))(inputs)
  for i, (stage_inputs, stage_d_y, stage_ids) in enumerate(stages):
    stage_result = (y[i], jax.tree.map(lambda array, i=i: array[i], gradients), None)
    assert_is_reference(stage_result, stage_inputs, stage_ids, stage_d_y)


def test_in_a_bubble_of_a_pipeline_no_expert_has_work(rng):
  inputs, _ = draw_inputs(rng)
  inputs |= {name: np.full_like(inputs[name], np.nan) for name in ('up', 'gate', 'down')}
  expert_ids = draw_expert_ids(rng, 'mixed')

  @jax.jit
  def results(is_work):
    with layer_scope(part=BatchPart(is_work=is_work)):
      return compute(Dropless(), inputs, expert_ids)[0]

  np.testing.assert_array_equal(results(False), 0)  # a product with NaN would be NaN
  assert np.isnan(results(True)).any()


@pytest.mark.parametrize('policy', ['full', 'dots'])
@pytest.mark.parametrize('dispatch', [None, 'padded_all_to_all'])
def test_no_remat_policy_sorts_twice(dispatch, policy, rng):
  """A second routing could differ from the first. The padded all-to-all sorts the rows to send, then those received."""
  mesh, rules = mesh_and_rules({'expert': 4}, {'batch': 'expert'})
  inputs, _ = draw_inputs(rng)
  expert_ids = draw_expert_ids(rng, 'mixed')

  def num_sorts(policy):
    def layer(inputs):
      if dispatch is None:
        return compute(Dropless(), inputs, expert_ids)[0]
      with sharding_scope(mesh, rules):
        return compute(Dropless(dispatch=dispatch), inputs, expert_ids)[0]

    gradient = jax.grad(lambda inputs: jnp.sum(jax.checkpoint(layer, policy=policy)(inputs)))
    sorted_sizes = re.findall(r'i32\[(\d+)\] = sort\[', str(jax.make_jaxpr(gradient)(inputs)))
    return sum(int(size) in num_rows for size in sorted_sizes)

  num_rows = [48] if dispatch is None else [12, 24]
  assert num_sorts(remat_policy(policy)) == len(num_rows)
  assert num_sorts(jax.checkpoint_policies.nothing_saveable) == 2 * len(num_rows)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'dispatch': 'rings'}, r"dispatch 'rings' is unknown: choose one of \['ring', 'padded_all_to_all'"),
    ({'capacity_factor': 2.0}, r"capacity_factor=2.0 has no effect with dispatch='ring'"),
    ({'dispatch': 'gather', 'capacity_factor': 2.0}, r"capacity_factor=2.0 has no effect with dispatch='gather'"),
    ({'overflow': 'passes'}, "overflow='passes' with capacity_factor=None has no effect"),
    ({'dispatch': 'padded_all_to_all', 'capacity_factor': float('nan')}, 'capacity_factor=nan must be positive'),
  ],
)
def test_settings_that_make_no_sense(settings, message):
  with pytest.raises(ValueError, match=message):
    Dropless(**settings)


def test_a_router_by_which_experts_choose(rng):
  inputs, _ = draw_inputs(rng)
  routing = dataclasses.replace(routing_of(draw_expert_ids(rng, 'mixed'), None), expert_ids=None)
  with pytest.raises(ValueError, match='with this router experts choose: use CapacityGather'):
    Dropless()(inputs['x'], routing, expert_weights(inputs), train=True)


# Of 5 tokens with 2 choices among 3 experts; 3 is none of them.
EXPERT_IDS = (
  [[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]],
  [[1, 1], [1, 1], [1, 1], [3, 3], [3, 3]],
  [[0, 2], [2, 0], [3, 1], [3, 3], [0, 2]],
  [[3, 3]] * 5,
)


@pytest.mark.parametrize('int32_max', [2**31 - 1, 3], ids=['one key', 'pairs'])
def test_rows_are_ordered_by_expert_then_token_then_choice(int32_max, monkeypatch):
  monkeypatch.setattr(_permutation, 'INT32_MAX', int32_max)
  sort = jax.jit(lambda ids: sort_by_expert(ids, 3))
  for expert_ids in EXPERT_IDS:
    assignments = sorted(
      (expert, token, choice) for token, experts in enumerate(expert_ids) for choice, expert in enumerate(experts)
    )
    permutation = sort(jnp.asarray(expert_ids, jnp.int32))
    assert permutation.token_ids.tolist() == [token for _, token, _ in assignments]
    for row, (_, token, choice) in enumerate(assignments):
      assert permutation.positions[token, choice] == row
    assert permutation.group_sizes.tolist() == [sum(e == expert for e, _, _ in assignments) for expert in range(3)]
