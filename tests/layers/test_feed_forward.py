import jax
import numpy as np
import pytest
import transformer_reference as reference

from spmd_tasks.layers import FeedForward, GatedFeedForward
from spmd_tasks.sharding.weights import unbox_weights

REFERENCES = {
  'gelu': reference.gelu_tanh,
  'gelu_exact': reference.gelu_erf,
  'relu': lambda x: np.maximum(x, 0.0),
  'silu': reference.silu,
}


def _weights(layer, x, rng):
  abstract = jax.eval_shape(layer.init, jax.random.key(0), x)['params']
  return jax.tree.map(lambda w: (0.3 * rng.normal(size=w.shape)).astype(np.float32), unbox_weights(abstract))


@pytest.mark.parametrize('activation', REFERENCES)
def test_gated(rng, activation):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = GatedFeedForward(hidden_dim=9, activation=activation)
  weights = _weights(layer, x, rng)
  y, aux = layer.apply({'params': weights}, x)
  expected = reference.gated_feed_forward(x.astype(np.float64), reference.to_float64(weights), REFERENCES[activation])
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  assert aux == {}


@pytest.mark.parametrize('activation', REFERENCES)
def test_plain(rng, activation):
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  layer = FeedForward(hidden_dim=9, activation=activation, use_bias=True)
  weights = _weights(layer, x, rng)
  up, down = reference.to_float64(weights)['up'], reference.to_float64(weights)['down']
  expected = REFERENCES[activation](x.astype(np.float64) @ up['kernel'] + up['bias']) @ down['kernel'] + down['bias']
  np.testing.assert_allclose(layer.apply({'params': weights}, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_unknown_activation_lists_the_names():
  with pytest.raises(ValueError, match=r"'mish' is unknown: choose one of \['gelu', 'gelu_exact', 'linear', 'relu', "):
    FeedForward(hidden_dim=9, activation='mish').init(jax.random.key(0), np.zeros((2, 3, 6), np.float32))
