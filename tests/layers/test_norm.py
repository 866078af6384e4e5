import jax
import numpy as np
import pytest
import transformer_reference as reference

from spmd_tasks.layers import LayerNorm, RmsNorm
from spmd_tasks.sharding.weights import unbox_weights


def test_rms_norm(rng):
  x, scale = rng.normal(size=(2, 3, 30)).astype(np.float32), rng.normal(size=30).astype(np.float32)
  expected = reference.rms_norm(x.astype(np.float64), scale, epsilon=1e-3)
  np.testing.assert_allclose(RmsNorm(epsilon=1e-3).apply({'params': {'scale': scale}}, x), expected, rtol=1e-5)


def test_rms_norm_of_all_heads_by_one_plus_scale(rng):
  x, scale = rng.normal(size=(2, 3, 6, 4)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)
  norm = RmsNorm(epsilon=1e-3, scale_plus_one=True, num_dims=2, split_dims=('heads', 'head_dim'))
  expected = reference.rms_norm(x.astype(np.float64), 1 + scale, epsilon=1e-3)
  np.testing.assert_allclose(norm.apply({'params': {'scale': scale}}, x), expected, rtol=1e-5)
  assert not np.any(unbox_weights(norm.init(jax.random.key(0), x))['params']['scale'])


@pytest.mark.parametrize('use_bias', [True, False])
def test_layer_norm(rng, use_bias):
  # A mean far from zero: the one-pass variance would lose all its digits here.
  x = (100.0 + 0.1 * rng.normal(size=(2, 3, 30))).astype(np.float32)
  scale, bias = (rng.normal(size=30).astype(np.float32) for _ in range(2))
  expected = reference.layer_norm(x.astype(np.float64), scale, bias if use_bias else 0.0)
  weights = {'scale': scale, 'bias': bias} if use_bias else {'scale': scale}
  np.testing.assert_allclose(LayerNorm(use_bias=use_bias).apply({'params': weights}, x), expected, rtol=1e-3, atol=1e-3)


def test_layer_norm_by_one_plus_scale_and_without_weights(rng):
  x, scale, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 30), 30, 30))
  actual = LayerNorm(scale_plus_one=True).apply({'params': {'scale': scale, 'bias': bias}}, x)
  np.testing.assert_allclose(actual, reference.layer_norm(x.astype(np.float64), 1 + scale, bias), atol=1e-5)
  actual = LayerNorm(use_scale=False, use_bias=False).apply({}, x)
  np.testing.assert_allclose(actual, reference.layer_norm(x.astype(np.float64), 1.0, 0.0), atol=1e-5)


def test_layer_norm_with_weights_of_each_head(rng):
  x, scale, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 6, 4), (6, 4), (6, 4)))
  norm = LayerNorm(num_weight_dims=2, split_dims=('heads', 'head_dim'))
  actual = norm.apply({'params': {'scale': scale, 'bias': bias}}, x)
  np.testing.assert_allclose(actual, reference.layer_norm(x.astype(np.float64), scale, bias), atol=1e-5)


@pytest.mark.parametrize('norm', [RmsNorm(dtype='bfloat16'), LayerNorm(dtype='bfloat16')])
def test_bfloat16_inputs_are_normalized_in_float32(rng, norm):
  x = jax.numpy.asarray(rng.normal(size=(2, 512)), 'bfloat16')
  y, variables = norm.init_with_output(jax.random.key(0), x)
  exact = type(norm)().apply(variables, np.asarray(x, np.float32))
  # One rounding of the exact result, not an accumulation of them.
  np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(exact.astype('bfloat16'), np.float32))
