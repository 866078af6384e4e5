"""The order of rows, sums in float32, and rows that nobody chose; test_dropless.py has the values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import _permutation
from spmd_tasks.layers.moe._permutation import (
  combine_rows,
  gather_rows,
  sort_by_expert,
)

E, D = 3, 5
UNROUTED = E

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


def test_the_gradient_of_bfloat16_tokens_is_summed_in_float32():
  permutation = sort_by_expert(jnp.asarray([[0, 1, 2]], jnp.int32), E)
  d_rows = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)  # 256 + 1 rounds to 256 in bfloat16
  _, vjp = jax.vjp(lambda x: gather_rows(x, permutation), jnp.zeros((1, 1), jnp.bfloat16))
  assert vjp(d_rows)[0].tolist() == [[258.0]]


ASSIGNMENTS = np.array([[2, 0], [1, 2], [UNROUTED, UNROUTED], [0, 1], [2, UNROUTED], [1, 2]], np.int32)


@pytest.fixture
def case(rng):
  permutation = sort_by_expert(jnp.asarray(ASSIGNMENTS), E)
  rows = rng.normal(size=(ASSIGNMENTS.size, D)).astype(np.float32)
  gates = np.where(ASSIGNMENTS == UNROUTED, 0.0, rng.uniform(0.1, 1.0, ASSIGNMENTS.shape)).astype(np.float32)
  d_result = rng.normal(size=(len(ASSIGNMENTS), D)).astype(np.float32)
  return rows, gates, permutation, d_result


def combine(rows, gates, permutation, d_result):
  arrays = [jnp.asarray(x) for x in (rows, gates)]
  result, vjp = jax.vjp(lambda r, g: combine_rows(r, g, permutation), *arrays)
  return result, *vjp(jnp.asarray(d_result))


def test_rows_of_no_assignment_spread_no_nan(case):
  rows, gates, permutation, d_result = case
  expected = combine(*case)
  is_unrouted = np.arange(len(rows)) >= np.sum(permutation.group_sizes)
  spoilt = np.where(is_unrouted[:, None], np.nan, rows)
  for actual, clean in zip(combine(spoilt, gates, permutation, d_result), expected, strict=True):
    np.testing.assert_array_equal(actual, clean)
