"""Schedules have the values of their definitions, at and around their boundaries."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import Constant, LinearWarmupCosine, LinearWarmupRsqrt, ProductOfFactors

COSINE = LinearWarmupCosine(peak=2.0, warmup_steps=4, total_steps=12, final_fraction=0.1)
DELAYED = LinearWarmupCosine(peak=2.0, warmup_steps=4, decay_start=8, total_steps=16, final_fraction=0.1)
RSQRT = LinearWarmupRsqrt(peak=2.0, warmup_steps=4)
FACTORS = ProductOfFactors(base=2.0, warmup_steps=4)
FLAT_FIRST = ProductOfFactors(factors='constant * rsqrt_decay', base=2.0, warmup_steps=4, step_offset=3)
OTHERS = ProductOfFactors(
  factors='rsqrt_normalized_decay * decay_every * cosine_decay', warmup_steps=4, steps_per_decay=4, steps_per_cycle=10
)
NO_WARMUP = LinearWarmupCosine(peak=2.0, warmup_steps=0, total_steps=8)


@pytest.mark.parametrize(
  'schedule, step, expected',
  [
    (Constant(value=0.5), 10**6, 0.5),
    (COSINE, 1, 0.5),
    (COSINE, 4, 2.0),
    (COSINE, 8, 2.0 * (0.1 + 0.9 * 0.5)),
    (COSINE, 13, 0.2),
    (DELAYED, 8, 2.0),
    (DELAYED, 17, 0.2),
    (RSQRT, 2, 1.0),
    (RSQRT, 16, 1.0),
    (FACTORS, 2, 0.5),
    (FACTORS, 16, 0.5),
    (FLAT_FIRST, 7, 1.0),
    (FLAT_FIRST, 19, 0.5),
    (OTHERS, 3, 1.0),
    (OTHERS, 9, (4 / 9) ** 0.5 * 0.25 * 0.5),
    (OTHERS, 14, (4 / 14) ** 0.5 * 0.125),
    (ProductOfFactors(factors='linear_decay', base=2.0, warmup_steps=4, decay_factor=0.1), 2, 1.0),
    (ProductOfFactors(factors='linear_decay', base=2.0, warmup_steps=4, decay_factor=0.1), 9, 1.0),
    (NO_WARMUP, 0, 2.0),
    (NO_WARMUP, 8, 0.0),
  ],
)
def test_value_at_step(schedule, step, expected):
  for value in (schedule(step), schedule(jnp.int32(step))):
    assert value.dtype == jnp.float32
    assert value.shape == ()
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: LinearWarmupCosine(peak=1.0, warmup_steps=5, total_steps=5), 'total_steps 5 must be larger'),
    (lambda: LinearWarmupCosine(peak=1.0, warmup_steps=5, decay_start=4, total_steps=9), 'decay_start is 4; .*None'),
    (lambda: LinearWarmupRsqrt(peak=1.0, warmup_steps=0), 'warmup_steps is 0; .*1 or more'),
    (lambda: ProductOfFactors(factors='constant * rsqrt'), "'rsqrt'; .*rsqrt_decay"),
  ],
)
def test_impossible_settings_are_refused(build, message):
  with pytest.raises(UserError, match=message):
    build()
