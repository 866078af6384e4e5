"""Balance losses and statistics against float64 references; test_flaxformer.py has the gradients of the losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.base import BatchPart, layer_scope
from spmd_tasks.layers.moe import RouterOutput
from spmd_tasks.layers.moe import _balance as balance
from spmd_tasks.sharding import MeshSpec

B, T, E, K = 4, 5, 6, 2


@functools.partial(jax.jit, static_argnames=('num_shards', 'divide_by_k'))
def load_balance_loss(routing, num_shards=1, divide_by_k=False):
  return balance.load_balance_loss(balance.routing_sums(routing, num_shards=num_shards, divide_by_k=divide_by_k))


@jax.jit
def router_z_loss(routing):
  return balance.router_z_loss(balance.routing_sums(routing))


@jax.jit
def routing_statistics(routing):
  return balance.routing_statistics(balance.routing_sums(routing))


def draw(rng, mask=None):
  """A routing of random logits and, apart from them, random choices."""
  logits = rng.normal(scale=2.0, size=(B, T, E)).astype(np.float32)
  expert_ids = np.argsort(rng.random((B, T, E)) * np.arange(1, E + 1))[..., :K].astype(np.int32)  # uneven
  if mask is not None:
    expert_ids = np.where(mask[..., None], expert_ids, E)
  return RouterOutput(
    logits=jnp.asarray(logits),
    scores=jax.nn.softmax(logits),
    token_mask=mask,
    expert_ids=jnp.asarray(expert_ids),
    gates=jnp.ones((B, T, K)),
  )


def sum_trees(trees):
  return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def real_tokens(routing):
  """The real tokens' scores [n, E], in float64, and expert ids [n, k]."""
  mask = np.ones((B, T), bool) if routing.token_mask is None else routing.token_mask
  return np.asarray(routing.scores, np.float64)[mask], np.asarray(routing.expert_ids)[mask]


@pytest.mark.parametrize(('num_shards', 'num_parts'), [(20, 1), (10, 2)])
def test_shards_may_be_smaller_than_a_row_or_cross_rows(num_shards, num_parts, rng):
  """Of 4 rows of 5 tokens, in one part or in two microbatches of a pipeline: 20 shards of 1 token, 10 of 2."""
  routing = draw(rng, rng.random((B, T)) < 0.6)
  scores, ids = (np.asarray(x, np.float64) for x in (routing.scores, routing.expert_ids))
  scores = np.where(np.asarray(routing.token_mask)[..., None], scores, 0).reshape(num_shards, -1, E)
  counts = (ids.reshape(num_shards, -1)[..., None] == np.arange(E)).sum(axis=1)
  sizes = np.maximum(np.asarray(routing.token_mask).reshape(num_shards, -1).sum(axis=1), 1)[:, None]
  expected = E * np.mean(np.sum(counts / sizes * scores.sum(axis=1) / sizes, axis=1))

  def sums(m):
    rows = slice(m * B // num_parts, (m + 1) * B // num_parts)
    with layer_scope(part=BatchPart(index=jnp.int32(m), count=num_parts)):
      return balance.routing_sums(jax.tree.map(lambda x: x[rows], routing), num_shards=num_shards)

  added = jax.jit(lambda: sum_trees(map(sums, range(num_parts))))()
  np.testing.assert_allclose(balance.load_balance_loss(added), expected, rtol=1e-5)


@pytest.mark.parametrize('padded', [False, True])
def test_statistics_are_those_of_the_real_tokens(padded, rng):
  routing = draw(rng, rng.random((B, T)) < 0.6 if padded else None)
  scores, ids = real_tokens(routing)
  counts = np.array([(ids == e).sum() for e in range(E)])
  expected = {
    'expert_load': counts / counts.sum(),
    'max_expert_load': E * counts.max() / counts.sum(),
    'router_entropy': -np.sum(scores * np.log(scores), axis=-1).mean(),
    'router_confidence': np.mean([scores[i, e] for i, chosen in enumerate(ids) for e in chosen]),
  }
  statistics = routing_statistics(routing)
  assert statistics.keys() == expected.keys()
  for name, value in expected.items():
    assert statistics[name].dtype == np.float32
    np.testing.assert_allclose(statistics[name], value, rtol=1e-5, err_msg=name)


def test_padding_only_gives_zeros_and_no_gradient(rng):
  routing = draw(rng, np.zeros((B, T), bool))

  def loss(routing):
    statistics = sum(jnp.sum(x) for x in routing_statistics(routing).values())
    return load_balance_loss(routing, divide_by_k=True) + router_z_loss(routing) + statistics

  value, grads = jax.jit(jax.value_and_grad(loss, allow_int=True))(routing)
  assert value == 0.0
  np.testing.assert_array_equal(grads.scores, 0)
  np.testing.assert_array_equal(grads.logits, 0)


def test_losses_and_statistics_of_a_sharded_batch_take_one_all_reduce(rng):
  routing = draw(rng, rng.random((B, T)) < 0.6)
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(4,)).build(jax.devices()[:4])
  sharded = jax.device_put(routing, jax.NamedSharding(mesh, jax.P('data')))

  @jax.jit
  def reduce(routing):
    return balance.routing_sums(routing).values()

  hlo = reduce.lower(sharded).compile().as_text()
  assert hlo.count(' all-reduce(') == 1, hlo
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), reduce(sharded), reduce(routing))


@pytest.mark.parametrize('num_shards', [0, 3])
def test_parts_that_do_not_divide_the_batch_are_refused(num_shards, rng):
  with pytest.raises(ValueError, match=f'load_balance_shards={num_shards} must divide the tokens of the batch'):
    load_balance_loss(draw(rng), num_shards=num_shards)


@pytest.mark.parametrize('scale', [0.0, 1.0, -3.0])
def test_a_balance_bias_gets_the_violation_of_the_load_whatever_the_cotangent(scale, rng):
  routing = draw(rng, rng.random((B, T)) < 0.7)
  x, bias = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in (5, E))

  def loss(x, bias):
    return scale * jnp.sum(jnp.sin(balance.attach_balance_gradient(x, bias, balance.routing_sums(routing))))

  gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, bias)
  np.testing.assert_allclose(gradients[0], scale * np.cos(x), rtol=1e-5)
  counts = np.array([(np.asarray(routing.expert_ids) == e).sum() for e in range(E)])
  assert np.ptp(counts) > 2
  np.testing.assert_array_equal(gradients[1], E * counts - counts.sum())
