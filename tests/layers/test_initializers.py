import jax
import numpy as np
import pytest

from spmd_tasks.layers.initializers import FanInNormal


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
