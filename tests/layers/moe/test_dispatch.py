"""The ring and the padded all-to-all: which collectives their programs have, and what a capacity drops, by counting."""

import collections
import re

from dropless_reference import (
  DOWN_SPLIT_DIMS,
  UP_SPLIT_DIMS,
  assert_is_reference,
  compute,
  draw_expert_ids,
  draw_inputs,
  mesh_and_rules,
  value_and_gradients,
)
import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers.moe import Dropless
from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope

SCOPE = ({'expert': 4}, {'batch': 'expert'})
KINDS = ('all-to-all', 'all-gather', 'all-reduce', 'reduce-scatter', 'collective-permute')
TOKENS_SPLIT_DIMS = ('batch', 'seq', 'act_embed')
SPLIT_DIMS = {
  'x': TOKENS_SPLIT_DIMS,
  'gates': TOKENS_SPLIT_DIMS,
  'up': UP_SPLIT_DIMS,
  'gate': UP_SPLIT_DIMS,
  'down': DOWN_SPLIT_DIMS,
}


def compile_gradient(computation, axis_sizes, rules):
  """The text of the program for the gradient of sum(y^2): B=16, T=4, D=10, F=14, E=4, k=2."""
  rng = np.random.default_rng(0)
  mesh, rules = mesh_and_rules(axis_sizes, rules)
  inputs, _ = draw_inputs(rng, B=16, T=4, D=10, F=14)
  expert_ids = draw_expert_ids(rng, 'mixed', B=16, T=4)

  def loss(inputs):
    with sharding_scope(mesh, rules):
      return (compute(computation, inputs, expert_ids)[0] ** 2).sum()

  shardings = {
    name: NamedSharding(mesh, split_dims_to_partition_spec(SPLIT_DIMS[name], mesh.axis_names, rules)) for name in inputs
  }
  return jax.jit(jax.grad(loss), in_shardings=(shardings,), out_shardings=shardings).lower(inputs).compile().as_text()


def count_collectives(program):
  """{(kind, type of one result): how many}; an all-to-all's results, one per device, count as one."""
  counts = collections.Counter()
  for line in program.splitlines():
    match = re.search(rf' = (.*?) ({"|".join(KINDS)})\(', line)
    if match:
      types = re.findall(r'\w+\[[\d,]*\]', match[1])
      counts.update((match[2], array) for array in (types[:1] if match[2] == 'all-to-all' else types))
  return dict(counts)


def drop_overflow(expert_ids, num_experts, capacity, num_devices=4):
  """expert_ids with E for what has no room: per pair of devices the first `capacity` by expert, token, choice stay."""
  kept = np.full_like(expert_ids, num_experts)
  rows_per_device, experts_per_device = expert_ids.shape[0] // num_devices, num_experts // num_devices
  for sender in range(num_devices):
    rows = slice(sender * rows_per_device, (sender + 1) * rows_per_device)
    by_expert = sorted((expert_ids[rows][place], place) for place in np.ndindex(*expert_ids[rows].shape))
    for receiver in range(num_devices):
      for e, place in [(e, place) for e, place in by_expert if e // experts_per_device == receiver][:capacity]:
        kept[rows][place] = e
  return kept


EXHAUSTIVE = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((None, 12), (0.1, 1), (float('inf'), 12))]


@pytest.mark.parametrize('capacity_factor, capacity', [(1.0, 3), *EXHAUSTIVE])
def test_what_has_no_room_is_dropped_and_counted(capacity_factor, capacity, rng):
  """Each of 4 devices has 2 x 3 tokens with 2 choices: 12 rows, 3 for each device if balanced."""
  inputs, d_y = draw_inputs(rng, E=8)
  run = value_and_gradients(
    Dropless(dispatch='padded_all_to_all', capacity_factor=capacity_factor), *mesh_and_rules(*SCOPE)
  )
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, E=8)
    kept = drop_overflow(expert_ids, 8, capacity)
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, kept, d_y)
    num_assigned, num_kept = np.sum(expert_ids < 8), np.sum(kept < 8)
    expected = (num_assigned - num_kept) / max(num_assigned, 1)
    np.testing.assert_allclose(result[2]['fraction_dropped'], expected, rtol=1e-6)
    assert result[2]['pair_capacity'] == capacity


def test_what_has_no_room_goes_in_a_further_pass(rng):
  inputs, d_y = draw_inputs(rng, E=8)
  computation = Dropless(dispatch='padded_all_to_all', capacity_factor=0.4, overflow='passes')
  run = value_and_gradients(computation, *mesh_and_rules(*SCOPE))
  num_passes = {}
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, E=8)
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, expert_ids, d_y)
    assert result[2]['fraction_dropped'] == 0
    num_passes[routing] = int(result[2].get('num_passes', 1))
  # Of 'one expert', each device sends its 6 tokens to the first one.
  assert (num_passes['no expert'], num_passes['one expert']) == (1, 6)


# Of a gradient's program, float32 only. Tokens travel there and back, forward and backward; gates there, and their
# gradients back.
PROGRAMS = {
  # Nothing else: the experts' weights and their gradients stay where they are.
  'expert 4': (*SCOPE, {('all-to-all', 'f32[16,10]'): 4, ('all-to-all', 'f32[16]'): 2}),
  # One expert's matrices are gathered over `data`, and their gradients scattered.
  'FSDP': (
    {'data': 2, 'expert': 4},
    {'batch': ('data', 'expert'), 'expert_embed': 'data'},
    {
      ('all-to-all', 'f32[8,10]'): 4,
      ('all-to-all', 'f32[8]'): 2,
      ('all-gather', 'f32[1,10,14]'): 2,
      ('all-gather', 'f32[1,14,10]'): 1,
      ('reduce-scatter', 'f32[1,5,14]'): 2,
      ('reduce-scatter', 'f32[1,14,5]'): 1,
    },
  ),
}


@pytest.mark.parametrize(
  'axis_sizes, rules, expected',
  [pytest.param(*PROGRAMS[name], id=name, marks=[pytest.mark.exhaustive] * (name != 'FSDP')) for name in PROGRAMS],
)
def test_collectives_of_the_padded_all_to_all(axis_sizes, rules, expected):
  found = count_collectives(compile_gradient(Dropless(dispatch='padded_all_to_all'), axis_sizes, rules))
  assert {key: count for key, count in found.items() if key[1].startswith('f32')} == expected
  assert {kind for kind, _ in found} == {kind for kind, _ in expected}
