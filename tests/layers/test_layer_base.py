"""Kernels start with the variance that was asked for; templates of sublayers get weights of their own."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from spmd_tasks.layers import FanInNormal, Linear, WithSublayers
from spmd_tasks.layers.base import run_layer


@pytest.mark.parametrize(
  'shape, num_input_dims, scale, fan_in',
  [((64, 300), 1, 1.0, 64), ((8, 16, 100), 2, 1.0, 128), ((64, 300), 1, 0.25, 64)],
)
def test_variance_is_scale_over_the_contracted_dims(shape, num_input_dims, scale, fan_in):
  kernel = np.asarray(FanInNormal(scale=scale, num_input_dims=num_input_dims)(jax.random.key(0), shape, 'float32'))
  stddev = np.sqrt(scale / fan_in)
  np.testing.assert_allclose(kernel.std(), stddev, rtol=0.03)
  np.testing.assert_allclose(kernel.mean(), 0.0, atol=0.03 * stddev)
  assert np.abs(kernel).max() <= 2.0 / 0.8796 * stddev  # truncated


class Pair(WithSublayers):
  first: nn.Module
  second: nn.Module | None = None

  def __call__(self, x):
    x = self.first(x)
    return x if self.second is None else self.second(x)


def _weights(module):
  return jax.tree.map(np.asarray, nn.unbox(module.init(jax.random.key(0), np.ones((1, 3), np.float32))['params']))


def test_one_template_in_two_places_has_two_sets_of_weights():
  linear = Linear(output_dims=3)
  weights = _weights(Pair(first=linear, second=linear))
  assert set(weights) == {'first', 'second'}
  assert not np.array_equal(weights['first']['kernel'], weights['second']['kernel'])


class Scaled(nn.Module):
  """A layer with an argument of its own, which is not the segments that a stack would give."""

  def __call__(self, x, factor=2.0, *, train=False):
    return factor * x


def test_a_layer_gets_the_arguments_that_it_names():
  y, aux = run_layer('ffn', Scaled(), np.ones((2, 3)), segment_ids=np.zeros((2, 3), np.int32), train=True)
  np.testing.assert_array_equal(y, 2 * np.ones((2, 3)))
  assert aux == {}
