"""The load, and nothing else, is the bias's gradient, through every transformation that a step uses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import remat_policy
from spmd_tasks.layers.moe import TopKRouter
from spmd_tasks.layers.moe._balance import attach_balance_gradient, attach_gradient, routing_sums

L, B, T, D, E, K = 3, 8, 6, 5, 4, 2


@pytest.mark.parametrize('scale', [0.0, 1.0, -3.0])
def test_attached_gradient_does_not_depend_on_the_cotangent_and_changes_nothing_else(scale, rng):
  x, bias, gradient = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in (5, 3, 3))

  def loss(x, bias, gradient):
    return scale * jnp.sum(jnp.sin(attach_gradient(x, bias, gradient)))

  value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, bias, gradient)
  expected, grad = jax.value_and_grad(lambda x: scale * jnp.sum(jnp.sin(x)))(x)
  assert value == expected
  np.testing.assert_array_equal(grads[0], grad)
  np.testing.assert_array_equal(grads[1], gradient)
  np.testing.assert_array_equal(grads[2], 0)


class Layer(nn.Module):
  """A router, and gates in the place of experts."""

  @nn.compact
  def __call__(self, x, mask, *, train):
    router = TopKRouter(num_experts=E, num_selected=K, score_function='sigmoid', balance_bias=True, name='router')
    routing = router(x, mask, train=train)
    y = x * jnp.sum(routing.gates, axis=-1, keepdims=True)
    if train:
      y = attach_balance_gradient(y, routing.balance_bias, routing_sums(routing))
    return y, routing.expert_ids


class Stack(nn.Module):
  """L layers by scan, under remat where a policy is given."""

  policy: str = 'none'

  @nn.compact
  def __call__(self, x, mask, *, train=True):
    def layer(module, x, mask):
      return module(x, mask, train=train)

    if self.policy != 'none':
      layer = nn.remat(layer, policy=remat_policy(self.policy), prevent_cse=False)
    scanned = nn.scan(
      layer, variable_axes={'params': 0}, split_rngs={'params': True}, in_axes=(nn.broadcast,), length=L
    )
    return scanned(Layer(name='layers'), x, mask)


def draw(rng):
  weights = {
    'kernel': rng.normal(size=(L, D, E)).astype(np.float32),
    'balance_bias': 0.1 * rng.normal(size=(L, E)).astype(np.float32),
  }
  return {'layers': {'router': weights}}, rng.normal(size=(B, T, D)).astype(np.float32), rng.random((B, T)) < 0.7


@functools.partial(jax.jit, static_argnames=('policy', 'train'))
def gradients(weights, x, mask, *, policy='none', train=True):
  """Router gradients of a mean loss, and the experts chosen, [L, B, T, k]."""

  def loss(weights):
    y, ids = Stack(policy=policy).apply({'params': weights}, x, mask, train=train)
    return jnp.mean(jnp.square(y)), ids

  grads, ids = jax.grad(loss, has_aux=True)(weights)
  return grads['layers']['router'], ids


def violations(ids):
  """[L, E] for expert ids [L, B, T, k], E where padding is."""
  counts = np.array([[(layer == e).sum() for e in range(E)] for layer in np.asarray(ids)])
  return E * counts - counts.sum(axis=1, keepdims=True)


@pytest.mark.parametrize('policy', ['none', 'full'])
def test_each_scanned_layers_bias_gets_its_own_violation(policy, rng):
  weights, x, mask = draw(rng)
  grads, ids = gradients(weights, x, mask, policy=policy)
  expected = violations(ids)
  assert np.ptp(expected) > 10
  np.testing.assert_array_equal(grads['balance_bias'], expected)
