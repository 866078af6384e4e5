import jax
import numpy as np
import pytest

from spmd_tasks.layers.attention import LearnedPositions, Rotary, SinusoidalPositions
from spmd_tasks.sharding import unbox_weights, weight_specs
import tests.layers.transformer_reference as reference

POSITIONS = np.array([[0, 1, 2, 0], [0, 1, 700, 5]])


def test_rotary_turns_halves(rng):
  x = rng.normal(size=(2, 4, 3, 10)).astype(np.float32)
  expected = np.array(
    [[[reference.rotate(v, p, 500.0) for v in token] for token, p in zip(*row)] for row in zip(x, POSITIONS)]
  )
  np.testing.assert_allclose(Rotary(max_wavelength=500.0)(x, POSITIONS), expected, rtol=1e-4, atol=1e-4)


def test_rotary_products_depend_on_the_distance_only(rng):
  query, key = rng.normal(size=(2, 1, 1, 1, 10)).astype(np.float32)

  def product(i, j):
    rotary = Rotary()
    return np.sum(np.asarray(rotary(query, np.array([[i]]))) * np.asarray(rotary(key, np.array([[j]]))))

  np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
  assert abs(product(7, 3) - product(8, 3)) > 1e-3


def test_rotary_rejects_an_odd_head_dim():
  with pytest.raises(ValueError, match='head_dim is 5: choose an even'):
    Rotary()(np.zeros((1, 1, 1, 5), np.float32), np.zeros((1, 1), np.int32))


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
