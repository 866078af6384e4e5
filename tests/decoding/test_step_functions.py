"""The pool of blocks, against arrays of each row's positions."""

import jax
import numpy as np

from spmd_tasks.decoding.step_functions import take_slots, write_tokens
from spmd_tasks.layers.attention.kv_cache import CachedArray

NUM_LAYERS = 2


def test_blocks_are_written_and_read_where_the_tables_say(rng):
  """Rows over two parts of five blocks, whose ids begin anew in each part, against what each row's positions hold."""
  tables = np.int32([[[3, 0, 4], [1, 2, 9]], [[2, 4, 0], [1, 9, 9]]])  # block 9 does not exist
  cache = rng.normal(size=(NUM_LAYERS, 10, 2, 4, 3)).astype(np.float32)
  expected, texts = cache.copy(), np.zeros((NUM_LAYERS, 3, 2, 12, 3), np.float32)
  write = jax.jit(lambda cache, new, starts, lengths: write_tokens(cache, new, starts, lengths, tables=tables))
  for starts, lengths in (((0, 0, 0), (6, 3, 5)), ((6, 3, 5), (2, 6, 0)), ((8, 9, 5), (1, 0, 6))):
    new = rng.normal(size=(NUM_LAYERS, 3, 2, 6, 3)).astype(np.float32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
      texts[:, row, :, start : start + length] = new[:, row, :, :length]
      for i in range(length):
        part, block = row // 2, tables.reshape(4, 3)[row, (start + i) // 4]
        if block < 5:
          expected[:, 5 * part + block, :, (start + i) % 4] = new[:, row, :, i]
    cache = write(cache, new, np.int32(starts), np.int32(lengths))
    np.testing.assert_array_equal(cache, expected)
  rows = take_slots(cache, np.arange(3), (tables + np.int32([[[0]], [[5]]])).reshape(1, 4, 3)[:, :3])
  held = CachedArray(cache, (np.int32(1),), tables, num_rows=3).entries(4, 4)
  for row, length in enumerate((9, 8, 11)):
    np.testing.assert_array_equal(rows[:, row, :, :length], texts[:, row, :, :length])
    np.testing.assert_array_equal(held[row], texts[1, row, :, 4:8])
