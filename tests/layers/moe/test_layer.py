"""MixtureOfExperts as a block's sublayer: one expert is the dense network, and what is shared comes on top."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import FeedForward, GatedFeedForward, RmsNorm
from spmd_tasks.layers.moe import CapacityGather, Dropless, Experts, MixtureOfExperts, TopKRouter
from tests.layers.tiny_model import random_weights
from tests.layers.transformer_reference import rms_norm, silu, to_float64

B, T, D, F, E = 2, 6, 8, 12, 4
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], jnp.int32)


def make_layer(num_experts=E, num_selected=2, gated=True, activation='silu', **fields):
  return MixtureOfExperts(
    router=TopKRouter(num_experts=num_experts, num_selected=num_selected, normalize_gates=1.0),
    experts=Experts(num_experts=num_experts, hidden_dim=F, gated=gated, activation=activation),
    **fields,
  )


def tokens(rng):
  return jnp.asarray(rng.normal(size=(B, T, D)).astype(np.float32))


@pytest.mark.parametrize(
  'computation, gated',
  [(Dropless(), True), (CapacityGather(capacity_factor=1.0), False), (CapacityGather(), True)],
  ids=str,
)
def test_one_expert_is_the_dense_network(computation, gated, rng):
  """Values and gradients, by x and by every weight of the network."""
  x, mask = tokens(rng), (SEGMENTS != 0)[..., None]
  layer = make_layer(num_experts=1, num_selected=1, gated=gated, activation='gelu', computation=computation)
  dense = (GatedFeedForward if gated else FeedForward)(hidden_dim=F, activation='gelu')
  weights = random_weights(layer, x)
  dense_weights = {name: {'kernel': weight[0]} for name, weight in weights['experts'].items()}

  def sparse_loss(x, experts):
    y, _ = layer.apply({'params': weights | {'experts': experts}}, x, SEGMENTS, train=True)
    return jnp.sum(jnp.sin(y)), y

  def dense_loss(x, weights):
    y, _ = dense.apply({'params': weights}, x)
    y = jnp.where(mask, y, 0.0)
    return jnp.sum(jnp.sin(y)), y

  @jax.jit
  def both(x, experts, dense_weights):
    return [
      jax.value_and_grad(loss, (0, 1), has_aux=True)(x, weights)
      for loss, weights in ((sparse_loss, experts), (dense_loss, dense_weights))
    ]

  sparse, expected = both(x, weights['experts'], dense_weights)
  (_, y), (d_x, d_experts) = sparse
  (_, expected), (d_x_expected, d_dense) = expected
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(d_x, d_x_expected, rtol=1e-5, atol=1e-6)
  for name, gradient in d_experts.items():
    np.testing.assert_allclose(gradient[0], d_dense[name]['kernel'], rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_shared_expert_comes_on_top(rng):
  x = tokens(rng)
  routed_only = make_layer()
  shared = GatedFeedForward(hidden_dim=F)
  layer = make_layer(shared_expert=shared)
  weights = random_weights(layer, x)

  @jax.jit
  def all_three(weights, x):
    y, _ = layer.apply({'params': weights}, x)
    routed, _ = routed_only.apply({'params': {name: weights[name] for name in ('router', 'experts')}}, x)
    return y, routed, shared.apply({'params': weights['shared_expert']}, x)[0]

  y, routed, dense = all_three(weights, x)
  np.testing.assert_allclose(y, dense + routed, rtol=1e-5, atol=1e-5)


def test_a_shared_expert_has_a_gate(rng):
  x = tokens(rng)
  shared = GatedFeedForward(hidden_dim=F)
  layer, ungated = (make_layer(shared_expert=shared, shared_gate=gated) for gated in (True, False))
  weights = random_weights(layer, x)
  others = {name: weight for name, weight in weights.items() if name != 'shared_gate'}

  @jax.jit
  def all_three(weights, others, x):
    y, _ = layer.apply({'params': weights}, x)
    both, _ = ungated.apply({'params': others}, x)
    return y, both, shared.apply({'params': weights['shared_expert']}, x)[0]

  y, both, dense = all_three(weights, others, x)
  gate = 1 / (1 + np.exp(-np.asarray(x) @ np.asarray(weights['shared_gate'])))
  np.testing.assert_allclose(y, both - (1 - gate[..., None]) * dense, atol=1e-5)
  with pytest.raises(ValueError, match='shared_gate=True needs a shared_expert'):
    make_layer(shared_gate=True)


@pytest.mark.parametrize('computation', [Dropless(), CapacityGather(capacity_factor=float(E))], ids=str)
def test_gates_multiply_inputs(computation, rng):
  x = tokens(rng)
  layer = make_layer(computation=computation)
  layer = layer.clone(experts=layer.experts.clone(gates_inputs=True))
  weights = random_weights(layer, x)
  w = jax.tree.map(lambda weight: np.asarray(weight, np.float64), weights)
  expected = np.zeros((B, T, D))
  for row, t in np.ndindex(B, T):
    token = np.asarray(x[row, t], np.float64)
    scores = np.exp(token @ w['router']['kernel'])
    chosen = np.argsort(-scores, kind='stable')[:2]
    for expert, gate in zip(chosen, scores[chosen] / scores[chosen].sum(), strict=True):
      first, up, down = (w['experts'][name][expert] for name in ('gate', 'up', 'down'))
      hidden = gate * token @ first
      expected[row, t] += (hidden / (1 + np.exp(-hidden)) * (gate * token @ up)) @ down
  actual, _ = jax.jit(layer.apply)({'params': weights}, x)
  np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_each_expert_computes_its_first_choices_of_a_row(rng):
  x, capacity = tokens(rng), 2
  layer = make_layer(row_capacity=capacity)
  weights = random_weights(layer, x)
  y, aux = jax.jit(layer.apply)({'params': weights}, x)
  w = jax.tree.map(lambda each: np.asarray(each, np.float64), weights)
  expected, num_dropped, num_first = np.zeros((B, T, D)), 0, 0
  for row in range(B):
    num_taken = np.zeros(E, int)
    for t, token in enumerate(np.asarray(x[row], np.float64)):
      scores = np.exp(token @ w['router']['kernel'])
      chosen = np.argsort(-scores, kind='stable')[:2]
      for expert in chosen:
        num_taken[expert] += 1
        if num_taken[expert] > capacity:
          num_dropped += 1
          continue
        gate, up, down = (w['experts'][name][expert] for name in ('gate', 'up', 'down'))
        hidden = token @ gate / (1 + np.exp(-token @ gate)) * (token @ up)
        expected[row, t] += scores[expert] / scores[chosen].sum() * (hidden @ down)
    num_first += np.count_nonzero(num_taken)
  assert num_dropped
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(aux['routing'].values()['fraction_dropped'], num_dropped / (2 * B * T), rtol=1e-6)
  layer = layer.clone(computation=CapacityGather(capacity_factor=0.01, min_capacity=1))  # which drops others, too
  aux = jax.jit(layer.apply)({'params': weights}, x)[1]
  np.testing.assert_allclose(aux['routing'].values()['fraction_dropped'], 1 - num_first / (2 * B * T), rtol=1e-6)
  with pytest.raises(ValueError, match='row_capacity=0 must be at least 1'):
    make_layer(row_capacity=0)


def test_a_router_of_another_number_of_experts_is_refused():
  with pytest.raises(ValueError, match=r'router\.num_experts=4 and experts\.num_experts=8 must be equal'):
    MixtureOfExperts(router=TopKRouter(num_experts=4, num_selected=1), experts=Experts(num_experts=8, hidden_dim=F))


def test_a_network_beside_experts_with_norms_of_their_own(rng):
  """The norms of Gemma 4, and its router, which reads x itself and weighs the experts."""
  x, norm = tokens(rng), RmsNorm()
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=E, num_selected=2, normalize_gates=1.0, input_norm=norm, expert_scales=True),
    experts=Experts(num_experts=E, hidden_dim=F, gated=True, activation='silu'),
    shared_expert=GatedFeedForward(hidden_dim=F, activation='silu'),
    branch_norm=norm,
  )
  weights = random_weights(layer, x)
  y, _ = jax.jit(layer.apply)({'params': weights}, x)
  exact, x = to_float64(weights), np.asarray(x, np.float64)
  normed = lambda name, x: rms_norm(x, exact[name]['scale'])
  network = lambda x, kernels: silu(x @ kernels['gate']) * (x @ kernels['up']) @ kernels['down']
  router = exact['router']
  inputs = rms_norm(x, router['norm_of_input']['scale']) / np.sqrt(D)
  scores = np.exp(inputs @ router['kernel'])
  chosen = np.argsort(-scores, axis=-1)[..., :2]
  gates = np.take_along_axis(scores, chosen, -1)
  gates = gates / gates.sum(-1, keepdims=True) * router['expert_scales'][chosen]
  each = np.stack([
    network(normed('experts_norm', x), {name: kernel[e] for name, kernel in exact['experts'].items()}) for e in range(E)
  ])  # fmt: skip
  routed = sum(np.take_along_axis(each, chosen[None, :, :, k, None], 0)[0] * gates[..., k : k + 1] for k in range(2))
  shared = network(
    normed('shared_norm', x), {name: weight['kernel'] for name, weight in exact['shared_expert'].items()}
  )
  expected = normed('shared_post_norm', shared) + normed('experts_post_norm', routed)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
