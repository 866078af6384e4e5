"""Dropless on one device: a loop over assignments in float64, its options, and what it refuses."""

import dataclasses
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
import numpy as np
import pytest

from spmd_tasks.layers import remat_policy
from spmd_tasks.layers.base import BatchPart, layer_scope
from spmd_tasks.layers.moe import Dropless
from spmd_tasks.sharding.specs import sharding_scope


@pytest.mark.parametrize(
  'dims', [{}, {'gated': False}, {'E': 1, 'k': 1}, {'E': 16, 'k': 4, 'D': 5, 'F': 3}, {'B': 1, 'T': 1}], ids=str
)
def test_is_the_loop_over_assignments(dims, rng):
  run = value_and_gradients(Dropless())
  inputs, d_y = draw_inputs(rng, **dims)
  id_dims = {dim: size for dim, size in dims.items() if dim in 'BTEk'}
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, **id_dims)
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, expert_ids, d_y)
    assert result[2]['fraction_dropped'] == 0


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
  with pytest.raises(ValueError, match='with this router experts choose: use CapacityGather or CapacityEinsum'):
    Dropless()(inputs['x'], routing, expert_weights(inputs), train=True)
