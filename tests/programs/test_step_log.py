"""StepLog brings metrics to the host and counts rates from the last logged step."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.programs.step_log import StepLog


@pytest.fixture
def clock(monkeypatch):
  """Seconds that pass when the test says so."""
  now = [100.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  return now


def test_metrics_are_exact_and_rates_count_from_the_last_logged_step(clock):
  waited = [0.0]
  log = StepLog(tokens_per_step=64, peak_steps_per_second=8.0, seconds_waited=lambda: waited[0])
  load = jnp.array([1 / 3, 2 / 3])
  metrics = {'loss': jnp.float32(0.1), 'cross_entropy': jnp.float32(0), 'expert_load': load}
  log.start(1)
  clock[0] += 10
  waited[0] = 4.0
  with log.pause():
    clock[0] += 1000
  assert log.finish(21, metrics) == {
    'loss': float(np.float32(0.1)),
    'cross_entropy': 0.0,
    'perplexity': 1.0,
    'expert_load': [float(x) for x in np.asarray(load)],
    'steps_per_second': 2.0,
    'tokens_per_second': 128.0,
    'host_wait_fraction': 0.4,
    'mfu': 0.25,
  }
  assert 'steps_per_second' not in log.finish(21, metrics)  # no step between
