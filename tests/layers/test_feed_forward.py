import jax
import numpy as np
import pytest
from tiny_model import random_weights
import transformer_reference as reference

from spmd_tasks.layers import FeedForward, GatedFeedForward

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


@pytest.mark.parametrize('activation', REFERENCES)
def test_plain(rng, activation):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = FeedForward(hidden_dim=9, activation=activation, use_bias=True)
  weights = random_weights(layer, x)
  up, down = reference.to_float64(weights)['up'], reference.to_float64(weights)['down']
  expected = REFERENCES[activation](x.astype(np.float64) @ up['kernel'] + up['bias']) @ down['kernel'] + down['bias']
  np.testing.assert_allclose(layer.apply({'params': weights}, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_unknown_activation_lists_the_names():
  with pytest.raises(ValueError, match=r"'no_such' is unknown: choose one of \[.*'gelu', 'gelu_exact', .*'relu', "):
    FeedForward(hidden_dim=9, activation='no_such').init(jax.random.key(0), np.zeros((2, 3, 6), np.float32))
