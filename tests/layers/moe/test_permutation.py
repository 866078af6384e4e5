"""The order of rows, sums in float32, and rows that nobody chose; test_dropless.py has the values and gradients."""

import jax
import jax.numpy as jnp
import pytest

from spmd_tasks.layers.moe import _permutation
from spmd_tasks.layers.moe._permutation import sort_by_expert

E = 3

EXPERT_IDS = {
  'mixed': [[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]],
  'one choice': [[1], [0], [2], [1]],
  'one expert takes all': [[1, 1], [1, 1]],
  'an expert without rows': [[0, 2], [2, 0]],
  'some not routed': [[3, 3], [1, 3], [0, 2]],
  'none routed': [[3, 3], [3, 3]],
}


@pytest.mark.parametrize('expert_ids', EXPERT_IDS.values(), ids=EXPERT_IDS)
@pytest.mark.parametrize('int32_max', [2**31 - 1, 3], ids=['one key', 'pairs'])
def test_rows_are_ordered_by_expert_then_token_then_choice(expert_ids, int32_max, monkeypatch):
  monkeypatch.setattr(_permutation, 'INT32_MAX', int32_max)
  assignments = sorted(
    (expert, token, choice) for token, experts in enumerate(expert_ids) for choice, expert in enumerate(experts)
  )
  permutation = jax.jit(lambda ids: sort_by_expert(ids, E))(jnp.asarray(expert_ids, jnp.int32))
  assert permutation.token_ids.tolist() == [token for _, token, _ in assignments]
  for row, (_, token, choice) in enumerate(assignments):
    assert permutation.positions[token, choice] == row
  assert permutation.group_sizes.tolist() == [sum(e == expert for e, _, _ in assignments) for expert in range(E)]
  assert {leaf.dtype for leaf in jax.tree.leaves(permutation)} == {jnp.dtype('int32')}
