"""The padded all-to-all: what a capacity drops, by counting; and which collectives its program has."""

from absl import logging
from dropless_collectives import compile_gradient, count_collectives
from dropless_reference import (
  assert_is_reference,
  draw_expert_ids,
  draw_inputs,
  mesh_and_rules,
  value_and_gradients,
)
import numpy as np
import pytest

from spmd_tasks.layers.moe.dropless import Dropless
from spmd_tasks.layers.moe.padded_all_to_all import _log_capacity

SCOPE = ({'expert': 4}, {'batch': 'expert'})


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


@pytest.mark.parametrize('capacity_factor, capacity', [(None, 12), (1.0, 3), (1.5, 5), (0.1, 1), (100.0, 12)])
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


def test_padding_takes_no_room(rng):
  """6 experts as 8 on 4 devices, and 5 rows of tokens as 8: padding goes nowhere, and none of it is counted."""
  inputs, d_y = draw_inputs(rng, B=5, E=6)
  run = value_and_gradients(Dropless(dispatch='padded_all_to_all', capacity_factor=1.0), *mesh_and_rules(*SCOPE))
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, B=5, E=6)
    padded = np.full((8, 3, 2), 8, np.int32)
    padded[:5] = np.where(expert_ids == 6, 8, expert_ids)
    kept = drop_overflow(padded, 8, 3)[:5]
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, np.where(kept == 8, 6, kept), d_y)
    num_assigned = np.sum(expert_ids < 6)
    expected = (num_assigned - np.sum(kept < 6)) / max(num_assigned, 1)
    np.testing.assert_allclose(result[2]['fraction_dropped'], expected, rtol=1e-6)


def test_the_capacity_is_logged_once(monkeypatch):
  messages = []
  monkeypatch.setattr(logging, 'info', lambda message, *args: messages.append(message % args))
  _log_capacity.cache_clear()
  for capacity in (4, 4, 5):
    _log_capacity(capacity, 12, 4)
  assert [message.split(';')[0] for message in messages] == [
    f'padded_all_to_all: room for {capacity} rows from each of 4 devices to each other' for capacity in (4, 5)
  ]


# Of a gradient's program, float32 only. Tokens travel there and back, forward and backward.
PROGRAMS = {
  # Nothing else: the experts' weights and their gradients stay where they are.
  'expert 4': (*SCOPE, {('all-to-all', 'f32[16,10]'): 4}),
  # Gradients of one expert's three matrices are summed over `data`.
  'data 2 x expert 4': (
    {'data': 2, 'expert': 4},
    {'batch': ('data', 'expert')},
    {('all-to-all', 'f32[8,10]'): 4, ('all-reduce', 'f32[1,10,14]'): 2, ('all-reduce', 'f32[1,14,10]'): 1},
  ),
  # One expert's matrices are gathered over `data`, and their gradients scattered.
  'FSDP': (
    {'data': 2, 'expert': 4},
    {'batch': ('data', 'expert'), 'expert_embed': 'data'},
    {
      ('all-to-all', 'f32[8,10]'): 4,
      ('all-gather', 'f32[1,10,14]'): 2,
      ('all-gather', 'f32[1,14,10]'): 1,
      ('reduce-scatter', 'f32[1,5,14]'): 2,
      ('reduce-scatter', 'f32[1,14,5]'): 1,
    },
  ),
  # y forward, the gradients of x and of the gates backward.
  'tensor parallel': (
    {'expert': 2, 'mdl': 2},
    {'batch': 'expert', 'expert_mlp': 'mdl'},
    {
      ('all-to-all', 'f32[64,10]'): 4,
      ('all-reduce', 'f32[32,10]'): 1,
      ('all-reduce', 'f32[8,4,10]'): 1,
      ('all-reduce', 'f32[8,4,2]'): 1,
    },
  ),
}


@pytest.mark.parametrize('axis_sizes, rules, expected', PROGRAMS.values(), ids=PROGRAMS)
def test_what_travels(axis_sizes, rules, expected):
  found = count_collectives(compile_gradient(Dropless(dispatch='padded_all_to_all'), axis_sizes, rules))
  assert {key: count for key, count in found.items() if key[1].startswith('f32')} == expected
  assert {kind for kind, _ in found} == {kind for kind, _ in expected}
