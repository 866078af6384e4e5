"""Writing to the cache of slots, against dicts of positions."""

import jax
import numpy as np
import pytest

from spmd_tasks.decoding.step_functions import copy_slots, write_tokens

NUM_SLOTS, NUM_LAYERS = 4, 2
# Starts and lengths of three rows, and their slots: one behind the other, around a ring of 5, and nothing at all.
WRITES = [
  ((0, 0, 0), (3, 6, 1), (2, 0, 3)),
  ((3, 6, 1), (6, 2, 0), (2, 0, 4)),  # slot 4 does not exist
  ((9, 0, 1), (1, 4, 6), (2, 1, 3)),
]


@pytest.mark.parametrize('num_places', [12, 5], ids=['full', 'ring'])
def test_the_last_tokens_are_at_their_positions_modulo_the_size(rng, num_places):
  cache = rng.normal(size=(NUM_LAYERS, NUM_SLOTS, 2, num_places, 3)).astype(np.float32)
  expected = cache.copy()
  write = jax.jit(lambda cache, new, starts, lengths, slots: write_tokens(cache, new, starts, lengths, slots=slots))
  for write_numbers in WRITES:
    starts, lengths, slots = (np.array(x, np.int32) for x in write_numbers)
    tokens = rng.normal(size=(NUM_LAYERS, 3, 2, 6, 3)).astype(np.float32)
    first = np.maximum(lengths - num_places, 0)
    new = np.zeros((NUM_LAYERS, 3, 2, min(6, num_places), 3), np.float32)
    for row, (start, length, slot) in enumerate(zip(starts, lengths, slots, strict=True)):
      kept = tokens[:, row, :, first[row] : length]
      new[:, row, :, : kept.shape[2]] = kept
      for i in range(first[row], length):
        if slot < NUM_SLOTS:
          expected[:, slot, :, (start + i) % num_places] = tokens[:, row, :, i]
    cache = write(cache, new, starts, lengths, slots)
    np.testing.assert_array_equal(cache, expected)


def test_rows_are_slots_where_none_are_given():
  cache = {'ring': np.zeros((NUM_SLOTS, 1, 3, 1), np.int32), 'full': np.zeros((1, NUM_SLOTS, 1, 8, 1), np.int32)}
  new = {'ring': np.ones((NUM_SLOTS, 1, 1, 1), np.int32), 'full': np.ones((1, NUM_SLOTS, 1, 1, 1), np.int32)}
  written = write_tokens(cache, new, np.int32([0, 4, 5, 7]), np.int32([1, 1, 0, 1]))
  np.testing.assert_array_equal(np.argwhere(written['ring'][:, 0, :, 0]), [[0, 0], [1, 1], [3, 1]])
  np.testing.assert_array_equal(np.argwhere(written['full'][0, :, 0, :, 0]), [[0, 0], [1, 4], [3, 7]])


def test_copies_are_of_what_was_there_before(rng):
  cache = rng.normal(size=(NUM_LAYERS, NUM_SLOTS, 1, 3, 2)).astype(np.float32)
  copied = copy_slots(jax.numpy.asarray(cache), np.array([0, 2, 1]), np.array([2, 3, NUM_SLOTS]))
  np.testing.assert_array_equal(copied, cache[:, [0, 1, 0, 2]])
