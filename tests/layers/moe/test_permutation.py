"""Sorting by expert and gathering rows, against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import permutation as permutation_lib
from spmd_tasks.layers.moe.permutation import gather_rows, sort_by_expert

E, D = 3, 4

EXPERT_IDS = {
  'mixed': [[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]],
  'one choice': [[1], [0], [2], [1]],
  'one expert takes all': [[1, 1], [1, 1]],
  'an expert without rows': [[0, 2], [2, 0]],
  'some nowhere': [[3, 3], [1, 3], [0, 2]],
  'all nowhere': [[3, 3], [3, 3]],
}


@pytest.mark.parametrize('expert_ids', EXPERT_IDS.values(), ids=EXPERT_IDS)
@pytest.mark.parametrize('int32_max', [2**31 - 1, 3], ids=['one key', 'pairs'])
def test_rows_are_ordered_by_expert_then_token_then_choice(expert_ids, int32_max, monkeypatch):
  monkeypatch.setattr(permutation_lib, 'INT32_MAX', int32_max)
  assignments = sorted(
    (expert, token, choice) for token, experts in enumerate(expert_ids) for choice, expert in enumerate(experts)
  )
  permutation = jax.jit(lambda ids: sort_by_expert(ids, E))(jnp.asarray(expert_ids, jnp.int32))
  assert permutation.token_ids.tolist() == [token for _, token, _ in assignments]
  for row, (_, token, choice) in enumerate(assignments):
    assert permutation.positions[token, choice] == row
  assert permutation.group_sizes.tolist() == [sum(e == expert for e, _, _ in assignments) for expert in range(E)]
  assert {leaf.dtype for leaf in jax.tree.leaves(permutation)} == {jnp.dtype('int32')}


@pytest.mark.parametrize('expert_ids', EXPERT_IDS.values(), ids=EXPERT_IDS)
def test_gathered_rows_and_their_gradient(expert_ids, rng):
  permutation = sort_by_expert(jnp.asarray(expert_ids, jnp.int32), E)
  n, k = permutation.positions.shape
  x, d_rows = rng.normal(size=(n, D)).astype(np.float32), rng.normal(size=(n * k, D)).astype(np.float32)
  rows, vjp = jax.vjp(lambda x: gather_rows(x, permutation), jnp.asarray(x))
  expected = np.zeros((n, D))
  for row, token in enumerate(permutation.token_ids.tolist()):
    np.testing.assert_array_equal(rows[row], x[token])
    expected[token] += d_rows[row]
  np.testing.assert_allclose(vjp(jnp.asarray(d_rows))[0], expected, rtol=1e-6, atol=1e-6)


def test_neither_direction_scatters_rows(rng):
  permutation = sort_by_expert(jnp.asarray(EXPERT_IDS['mixed'], jnp.int32), E)
  x = jnp.asarray(rng.normal(size=(5, D)), jnp.float32)
  gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(gather_rows(x, permutation) ** 2)))(x)
  assert 'gather' in str(gradient)
  assert 'scatter' not in str(gradient)


def test_the_gradient_of_bfloat16_tokens_is_summed_in_float32():
  permutation = sort_by_expert(jnp.asarray([[0, 1, 2]], jnp.int32), E)
  d_rows = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)  # 256 + 1 rounds to 256 in bfloat16
  _, vjp = jax.vjp(lambda x: gather_rows(x, permutation), jnp.zeros((1, 1), jnp.bfloat16))
  assert vjp(d_rows)[0].tolist() == [[258.0]]
