"""Row blocks stand for every row of every group once, and there are not many more of their rows than of the groups'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe._row_blocks import block_sizes, locate_blocks

CASES = {
  'balanced': (512, [64] * 8),
  'around the mean': (512, [60, 69, 71, 57, 66, 63, 68, 58]),
  'skewed': (512, [300, 1, 0, 129, 2, 50, 30, 0]),
  'one has all': (512, [0, 0, 0, 512, 0, 0, 0, 0]),
  'rows past the end': (512, [3, 17, 0, 40, 1, 0, 0, 9]),
  'no rows in groups': (512, [0] * 8),
  'one group': (100, [97]),
  'fewer rows than a block': (5, [2, 0, 3]),
  'no rows': (0, [0, 0]),
}


def visit(num_rows, group_sizes):
  """How often each row of each group was a block's [E, R], and the number of rows in blocks altogether."""

  def body(block, counts):
    visits, num_block_rows = counts
    ones = jnp.broadcast_to(block.mask, (block.mask.shape[0], 1)).astype(jnp.int32)
    row_of_group = jax.lax.dynamic_index_in_dim(visits, block.group, keepdims=False)[:, None]
    added = block.write(row_of_group, block.read(row_of_group) + ones)
    visits = jax.lax.dynamic_update_index_in_dim(visits, added[:, 0], block.group, axis=0)
    return visits, num_block_rows + block.mask.shape[0]

  counts = jnp.zeros((group_sizes.shape[0], num_rows), jnp.int32), jnp.int32(0)
  return locate_blocks(num_rows, group_sizes).for_each(body, counts)


@pytest.mark.parametrize('name', CASES)
def test_every_row_of_every_group_is_visited_once(name):
  num_rows, sizes = CASES[name]
  visits, _ = jax.jit(visit, static_argnums=0)(num_rows, jnp.array(sizes, jnp.int32))
  starts = np.cumsum(sizes) - sizes
  for group, (start, size) in enumerate(zip(starts, sizes)):
    expected = (np.arange(num_rows) >= start) & (np.arange(num_rows) < start + size)
    np.testing.assert_array_equal(visits[group], expected.astype(np.int32))


@pytest.mark.parametrize('name', ['balanced', 'around the mean', 'skewed', 'one has all', 'rows past the end'])
def test_work_follows_the_groups_not_the_rows(name):
  num_rows, sizes = CASES[name]
  _, num_block_rows = jax.jit(visit, static_argnums=0)(num_rows, jnp.array(sizes, jnp.int32))
  assert num_block_rows <= 1.1 * sum(sizes) + 16 * np.count_nonzero(sizes)


def test_sizes_are_few_and_around_the_mean_group():
  assert block_sizes(4096, 64) == (16, 24, 40, 72, 144)
  assert block_sizes(4096, 8) == (72, 144, 288, 576)
  assert block_sizes(4096, 1) == block_sizes(4096, 8)  # larger ones would only take memory
  assert block_sizes(64, 8) == (8, 16, 24)
  assert block_sizes(5, 1) == (5,)
