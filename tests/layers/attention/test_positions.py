import dataclasses

import jax
import numpy as np
import pytest

from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.layers.attention import (
  LearnedPositions,
  LinearScaling,
  Llama3Scaling,
  LongRopeScaling,
  Rotary,
  SinusoidalPositions,
  YarnScaling,
)
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.sharding.weights import unbox_weights, weight_specs
import tests.layers.transformer_reference as reference

POSITIONS = np.array([[0, 1, 2, 0], [0, 1, 700, 5]])


def test_rotary_turns_halves(rng):
  x = rng.normal(size=(2, 4, 3, 10)).astype(np.float32)
  expected = np.array(
    [[[reference.rotate(v, p, 500.0) for v in token] for token, p in zip(*row)] for row in zip(x, POSITIONS)]
  )
  np.testing.assert_allclose(Rotary(max_wavelength=500.0)(x, POSITIONS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  'rotary, head_dim, message',
  [
    (Rotary(), 5, 'num_features=5 must be even'),
    (Rotary(num_features=6), 4, 'num_features=6 must be even.* head_dim=4'),
    (
      Rotary(scaling=LongRopeScaling(factor=2.0, original_length=8, short_factors=(1.0,), long_factors=(2.0, 3.0))),
      4,
      'short_factors has 1 factors for 2 pairs',
    ),
  ],
)
def test_features_that_are_not_pairs_are_errors(rotary, head_dim, message):
  with pytest.raises(ValueError, match=message):
    rotary(np.zeros((1, 1, 1, head_dim), np.float32), np.zeros((1, 1), np.int32))


def test_the_first_features_rotate_by_scaled_frequencies_and_grow_by_the_amplitude(rng):
  x = rng.normal(size=(2, 4, 3, 10)).astype(np.float32)
  frequencies = 500.0 ** (-np.arange(3) / 3) / (2.0, 3.0, 5.0)
  scaling = LongRopeScaling(
    factor=4.0, original_length=16, short_factors=(1.0,) * 3, long_factors=(2.0, 3.0, 5.0), is_long=True
  )
  settings = {'num_features': 6, 'frequencies': frequencies, 'amplitude': 1.5**0.5}  # 1 + ln 4 / ln 16
  expected = np.array(
    [[[reference.rotate(v, p, **settings) for v in token] for token, p in zip(*row)] for row in zip(x, POSITIONS)]
  )
  actual = Rotary(max_wavelength=500.0, num_features=6, scaling=scaling)(x, POSITIONS)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  'num_columns, text, is_long', [(4, None, False), (17, None, True), (4, 17, True), (17, 16, False)]
)
def test_long_factors_are_those_of_long_texts(num_columns, text, is_long, rng):
  x = rng.normal(size=(1, num_columns, 1, 6)).astype(np.float32)
  positions = np.arange(num_columns)[None]
  scaling = LongRopeScaling(factor=4.0, original_length=16, short_factors=(1.0,) * 3, long_factors=(2.0, 3.0, 5.0))
  expected = Rotary(scaling=dataclasses.replace(scaling, is_long=is_long))(x, positions)
  with layer_scope(cache=None if text is None else KvCache(max_len=text)):
    np.testing.assert_array_equal(Rotary(scaling=scaling)(x, positions), expected)


def test_scaled_frequencies_and_amplitudes():
  """By hand from the papers' formulas; tests/bridges/huggingface compares whole models with transformers."""
  frequencies = np.array([1.0, 0.1, 0.01, 0.001])
  wavelengths = 2 * np.pi / frequencies  # 6.3, 63, 628 and 6283 tokens
  np.testing.assert_allclose(LinearScaling(factor=4.0).scale(frequencies, 1e4), frequencies / 4, rtol=1e-6)
  # 1024 tokens are 163, 16.3, 1.63 and 0.163 waves: kept, kept, (1.63 - 1) / (4 - 1) of the way, divided by 8.
  kept = (1024 / wavelengths[2] - 1) / 3
  expected = [1.0, 0.1, 0.01 * (kept + (1 - kept) / 8), 0.001 / 8]
  np.testing.assert_allclose(
    Llama3Scaling(factor=8.0, original_length=1024).scale(frequencies, 1e4), expected, rtol=1e-6
  )
  # 32 waves fit at pair 4 ln(1024 / (64 pi)) / ln 10000 = 0.71, 1 wave at 2.21: a ramp from pair 0 to pair 3.
  yarn = YarnScaling(factor=8.0, original_length=1024)
  expected = [1.0, 0.1 * (2 / 3 + 1 / 3 / 8), 0.01 * (1 / 3 + 2 / 3 / 8), 0.001 / 8]
  np.testing.assert_allclose(yarn.scale(frequencies, 1e4), expected, rtol=1e-5)
  assert yarn.amplitude() == pytest.approx(1 + 0.1 * np.log(8))
  both = YarnScaling(factor=8.0, original_length=1024, mscale=1.0, mscale_all_dim=0.5)
  assert both.amplitude() == pytest.approx((1 + 0.1 * np.log(8)) / (1 + 0.05 * np.log(8)))


def test_learned_positions_are_added(rng):
  x = rng.normal(size=(2, 4, 6)).astype(np.float32)
  positions = np.array([[0, 1, 2, 0], [3, 2, 1, 0]])
  layer = LearnedPositions(max_len=4)
  boxed = layer.init(jax.random.key(0), x, positions)['params']
  assert weight_specs(boxed)['table'].split_dims == (None, 'embed')
  table = np.asarray(unbox_weights(boxed)['table'])
  expected = np.stack([[v + table[p] for v, p in zip(*row)] for row in zip(x, positions)])
  np.testing.assert_allclose(layer.apply({'params': {'table': table}}, x, positions), expected, rtol=1e-6)


def test_learned_positions_reject_a_longer_sequence():
  with pytest.raises(ValueError, match='length 5 exceeds the max_len=4'):
    LearnedPositions(max_len=4).init(jax.random.key(0), np.zeros((1, 5, 6), np.float32), np.zeros((1, 5), np.int32))


def test_sinusoidal_positions_are_added(rng):
  x = rng.normal(size=(2, 4, 7)).astype(np.float32)
  positions = np.array([[0, 1, 2, 0], [300, 2, 1, 0]])
  expected = x.astype(np.float64)
  for i in range(3):
    angles = positions / 500.0 ** (i / 2)
    expected[..., i] += np.sin(angles)
    expected[..., 3 + i] += np.cos(angles)
  layer = SinusoidalPositions(max_timescale=500.0)
  np.testing.assert_allclose(layer.apply({}, x, positions), expected, rtol=1e-4, atol=1e-4)  # angles up to 300
