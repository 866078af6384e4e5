"""Every test process gets 8 fake CPU devices; implicit rank promotion raises."""

import jax
import numpy as np
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture
def rng() -> np.random.Generator:
  return np.random.default_rng(0)
