import math

import jax
import numpy as np
import pytest
from tiny_model import random_weights
import transformer_reference as reference

from spmd_tasks.layers import FeedForward, GatedFeedForward
from spmd_tasks.sharding.weights import unbox_weights

REFERENCES = {
  'gelu': reference.gelu_tanh,
  'gelu_exact': reference.gelu_erf,
  'relu': lambda x: np.maximum(x, 0.0),
  'silu': reference.silu,
}


@pytest.mark.parametrize('activation', REFERENCES)
def test_gated(rng, activation):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = GatedFeedForward(hidden_dim=9, activation=activation)
  weights = random_weights(layer, x)
  y, aux = layer.apply({'params': weights}, x)
  expected = reference.gated_feed_forward(x.astype(np.float64), reference.to_float64(weights), REFERENCES[activation])
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  assert aux == {}


def test_most_gates_of_a_sparse_layer_are_zero(rng):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = GatedFeedForward(hidden_dim=400, activation='gelu', sparsity=0.9)
  weights = random_weights(layer, x)
  kernels = {name: weight['kernel'] for name, weight in reference.to_float64(weights).items()}
  gate = x @ kernels['gate']
  gate = np.maximum(gate - gate.mean(-1, keepdims=True) - 1.2815515655446004 * gate.std(-1, keepdims=True), 0.0)
  assert 0.85 < np.mean(gate == 0) < 0.95
  expected = reference.gelu_tanh(gate) * (x @ kernels['up']) @ kernels['down']
  np.testing.assert_allclose(layer.apply({'params': weights}, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('activation', REFERENCES)
def test_plain(rng, activation):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = FeedForward(hidden_dim=9, activation=activation, use_bias=True)
  weights = random_weights(layer, x)
  up, down = reference.to_float64(weights)['up'], reference.to_float64(weights)['down']
  expected = REFERENCES[activation](x.astype(np.float64) @ up['kernel'] + up['bias']) @ down['kernel'] + down['bias']
  np.testing.assert_allclose(layer.apply({'params': weights}, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_an_activation_with_learned_scalars(rng):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = FeedForward(hidden_dim=9, activation='xielu')
  weights = reference.to_float64(random_weights(layer, x))
  positive, negative = (math.log1p(math.exp(weights[name][0])) for name in ('alpha_p', 'alpha_n'))
  up = x.astype(np.float64) @ weights['up']['kernel']
  hidden = np.where(up > 0, positive * up**2, (0.5 + negative) * (np.exp(np.minimum(up, 0)) - 1 - up)) + 0.5 * up
  np.testing.assert_allclose(layer.apply({'params': weights}, x)[0], hidden @ weights['down']['kernel'], atol=1e-5)
  drawn = unbox_weights(layer.init(jax.random.key(0), x))['params']
  assert math.log1p(math.exp(drawn['alpha_p'][0])) == pytest.approx(0.8)
  assert math.log1p(math.exp(drawn['alpha_n'][0])) == pytest.approx(0.3)


def test_unknown_activation_lists_the_names():
  with pytest.raises(ValueError, match=r"'no_such' is unknown: choose one of \[.*'gelu', 'gelu_exact', .*'relu', "):
    FeedForward(hidden_dim=9, activation='no_such').init(jax.random.key(0), np.zeros((2, 3, 6), np.float32))
