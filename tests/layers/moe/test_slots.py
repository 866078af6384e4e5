"""How many slots there are and who gets them, against a loop in which tokens ask for slots one after the other."""

from capacity_reference import places_by_loop
import jax
import numpy as np
import pytest

from spmd_tasks.layers.moe._slots import DerivedGroupSize, assign_slots, expert_capacity, tokens_per_group


@pytest.mark.parametrize(
  ('group_size', 'num_experts', 'factor', 'min_capacity', 'expected'),
  [
    (64, 8, 1.0, 4, 8),
    (64, 8, 1.25, 4, 10),
    (64, 8, 1.3, 4, 10),  # 10.4
    (64, 8, 1.32, 4, 11),  # 10.56
    (64, 64, 1.0, 4, 4),  # the least
    (64, 64, 1.0, 1, 1),
    (64, 8, 0, 4, 64),  # never drop
    (64, 2, 3.0, 4, 64),  # a token takes one slot of an expert at most
    (1, 8, 1.0, 4, 1),  # one token being generated
  ],
)
def test_expert_capacity(group_size, num_experts, factor, min_capacity, expected):
  assert expert_capacity(group_size, num_experts, factor=factor, min_capacity=min_capacity) == expected


@pytest.mark.parametrize(
  ('factor', 'rounding', 'min_capacity', 'expected'),
  [(1.0, 'nearest', 4, 16), (1.1, 'nearest', 4, 18), (1.1, 'down', 4, 17), (0.01, 'down', 0, 64), (0.01, 'down', 1, 1)],
)
def test_expert_capacity_that_counts_choices(factor, rounding, min_capacity, expected):
  """As MegaBlocks': the factor is of the 2 * 64 choices, and a capacity of 0 drops nothing."""
  settings = {'factor': factor, 'rounding': rounding, 'min_capacity': min_capacity}
  assert expert_capacity(64, 8, num_choices=2, **settings) == expected


@pytest.mark.parametrize(
  ('num_tokens', 'max_size', 'multiple', 'expected'),
  [
    (192, 64, 8, 24),  # shared/t5x/moe: 8 groups of 24, though 3 of 64 would do
    (128, 64, 8, 16),
    (4096, 64, 8, 64),
    (4096, 60, 8, 32),  # 68 groups or more, of which 128 divide the tokens
    (100, 30, 4, 25),  # 100 // 30 = 3 groups or more
    (100, 24, 4, 25),  # larger than the largest, as there
    (8, 1, 8, 1),
  ],
)
def test_group_sizes_follow_from_the_tokens(num_tokens, max_size, multiple, expected):
  size = DerivedGroupSize(max_size=max_size, num_groups_multiple_of=multiple)
  assert size.tokens(num_tokens) == tokens_per_group(num_tokens, 1, size) == expected


def test_a_batch_without_such_groups_is_refused():
  size = DerivedGroupSize(max_size=4, num_groups_multiple_of=8)
  with pytest.raises(ValueError, match=r'12 tokens .* multiple of num_groups_multiple_of=8: choose a batch'):
    tokens_per_group(3, 4, size)


@pytest.mark.parametrize(('group_size', 'expected'), [(None, 6), (6, 6), (3, 3), (1, 1), (4, 4), (12, 12), (24, 24)])
def test_tokens_per_group(group_size, expected):
  assert tokens_per_group(4, 6, group_size) == expected


@pytest.mark.parametrize('group_size', [9, 18, 48, 0, -6])
def test_a_group_that_does_not_fit_is_refused(group_size):
  with pytest.raises(ValueError, match=rf'group_size={group_size} does not fit a batch of 4 rows of 6 tokens.*24'):
    tokens_per_group(4, 6, group_size)


def draw(rng, *, num_groups=3, group_size=8, num_experts=4, num_choices=2):
  """(expert_ids [G, S, k] without repetition within a token, some tokens not routed; gates; priorities with ties)."""
  shape = (num_groups, group_size)
  expert_ids = np.argsort(rng.random((*shape, num_experts)), axis=-1)[..., :num_choices]
  expert_ids[:, ::3] = np.minimum(expert_ids[:, ::3], 1)  # crowd two of them
  expert_ids[rng.random(shape) < 0.2] = num_experts
  gates = np.where(expert_ids < num_experts, rng.uniform(0.1, 1.0, expert_ids.shape), 0.0)
  priorities = rng.integers(0, 3, shape)
  return expert_ids.astype(np.int32), gates.astype(np.float32), priorities.astype(np.float32)


@pytest.mark.parametrize('capacity', [1, 2, 8])
@pytest.mark.parametrize('order', ['position', 'score', 'token'])
def test_slots_are_given_as_by_a_loop(order, capacity, rng):
  expert_ids, gates, priorities = draw(rng)
  num_groups, group_size, num_choices = expert_ids.shape
  priorities, is_by_token = priorities if order == 'score' else None, order == 'token'
  assign = jax.jit(lambda *args: assign_slots(*args, num_experts=4, capacity=capacity, is_by_token=is_by_token))
  assignment = assign(expert_ids, gates, priorities)
  token_ids = np.full((num_groups, 4, capacity), group_size)
  slot_gates = np.zeros((num_groups, 4, capacity), np.float32)
  positions = np.full(expert_ids.shape, 4 * capacity)
  kept_gates = np.zeros_like(gates)
  for group in range(num_groups):
    of_group = None if priorities is None else priorities[group]
    places = places_by_loop(expert_ids[group], of_group, capacity, is_by_token)
    for token, choice in np.ndindex(group_size, num_choices):
      expert, place = expert_ids[group, token, choice], places[token, choice]
      if expert < 4 and place >= 0:
        token_ids[group, expert, place] = token
        slot_gates[group, expert, place] = kept_gates[group, token, choice] = gates[group, token, choice]
        positions[group, token, choice] = expert * capacity + place
  assert (positions == 4 * capacity).any()
  np.testing.assert_array_equal(assignment.slots.token_ids, token_ids)
  np.testing.assert_array_equal(assignment.slots.gates, slot_gates)
  np.testing.assert_array_equal(assignment.positions, positions)
  np.testing.assert_array_equal(assignment.gates, kept_gates)
