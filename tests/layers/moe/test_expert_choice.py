"""Expert choice against a float64 reference that goes group by group and expert by expert."""

import jax
import numpy as np
import pytest

from spmd_tasks.layers.moe import ExpertChoiceRouter

B, T, D, E = 4, 6, 5, 3


def draw(rng):
  x, kernel = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, E)).astype(np.float32)
  mask = rng.random((B, T)) < 0.7
  mask[1] = False  # a row without tokens
  return x, kernel, mask


def route(x, kernel, mask, **settings):
  router = ExpertChoiceRouter(num_experts=E, **settings)
  return jax.jit(router.apply)({'params': {'kernel': kernel}}, x, mask)


def reference(x, kernel, mask, *, group_size, capacity):
  exps = np.exp(x.astype(np.float64) @ kernel)
  scores = (exps / exps.sum(-1, keepdims=True)).reshape(-1, group_size, E)
  mask = mask.reshape(-1, group_size)
  ids = np.full((len(scores), E, capacity), group_size)
  gates = np.zeros(ids.shape)
  for g, e in np.ndindex(len(scores), E):
    best = [s for s in np.argsort(-scores[g, :, e], kind='stable') if mask[g, s]][:capacity]
    ids[g, e, : len(best)] = best
    gates[g, e, : len(best)] = scores[g, best, e]
  return ids, gates


@pytest.mark.parametrize(
  'capacity_factor, group_size, capacity',
  [
    (1.0, None, 2),
    (0.01, None, 1),  # at least one slot
    (99.0, None, 6),  # at most the whole group
    (1.6, 3, 2),  # half a row; 1.6 is rounded
    (1.0, 2 * T, 4),  # two rows
  ],
)
def test_is_the_reference(capacity_factor, group_size, capacity, rng):
  x, kernel, mask = draw(rng)
  routing = route(x, kernel, mask, capacity_factor=capacity_factor, group_size=group_size)
  ids, gates = reference(x, kernel, mask, group_size=group_size or T, capacity=capacity)
  assert (routing.expert_ids, routing.gates) == (None, None)
  assert (routing.slots.token_ids.dtype, routing.slots.gates.dtype) == ('int32', 'float32')
  np.testing.assert_array_equal(routing.slots.token_ids, ids)
  np.testing.assert_allclose(routing.slots.gates, gates, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'group_size': 5}, 'group_size=5 does not fit a batch of 4 rows of 6 tokens'),
    ({'capacity_factor': 0.0}, 'capacity_factor=0.0 must be positive'),
  ],
)
def test_settings_that_make_no_sense_are_refused(settings, message, rng):
  with pytest.raises(ValueError, match=message):
    route(*draw(rng), **settings)
