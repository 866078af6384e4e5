"""Rates count from the last logged step; what people see of metrics: single numbers, no vectors by expert."""

import io
import time

import jax
import pytest

from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.hooks import StepRates, count_batch
from spmd_tasks.programs.progress import Progress, format_metrics


@pytest.fixture
def clock(monkeypatch):
  """Seconds that pass when the test says so."""
  now = [100.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  return now


def test_rates_count_from_the_last_logged_step(clock):
  goodput = Goodput(None, begun=100.0, now=lambda: clock[0])
  rates = StepRates(unit='tokens', units_per_step=64, flops_per_step=50, peak_flops_per_second=400.0, goodput=goodput)
  goodput.switch('steps')
  clock[0] += 3
  goodput.step(1, is_skipped=False, seconds_waited=1.0)
  rates.start(1)
  clock[0] += 10
  with goodput.spend('evaluation'):
    clock[0] += 1000
  goodput.step(21, is_skipped=False, seconds_waited=5.0)
  assert rates.since_last(21) == {
    'steps_per_second': 2.0,
    'tokens_per_second': 128.0,
    'flops_per_second': 100.0,
    'host_wait_fraction': 0.4,
    'mfu': 0.25,
  }
  assert rates.since_last(21) == {}  # no step between


@pytest.mark.parametrize(
  'inputs, expected',
  [
    ({'ids': ((4, 16), 'int32'), 'weights': ((4, 16), 'float32')}, ('tokens', 64)),
    ({'image': ((4, 8, 8, 3), 'uint8'), 'label': ((4,), 'int32')}, ('examples', 4)),
  ],
)
def test_a_batch_has_tokens_or_examples(inputs, expected):
  spec = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in inputs.items()}
  assert count_batch(spec) == expected


METRICS = {'loss': 1.25, 'accuracy': 0.5, 'expert_load': [0.1, 0.9], 'max_expert_load': 1.8, 'num_batches': 3}


def test_a_logged_step_is_one_line_without_vectors():
  stream = io.StringIO()
  progress = Progress(10, 0, primary=True, stream=stream)
  progress.log(4, METRICS)
  progress.close()
  assert stream.getvalue().split(' ', 1)[1] == 'step 4/10  loss 1.2500  accuracy 0.500\n'


def test_eval_metrics_are_listed_without_vectors():
  assert format_metrics(METRICS) == 'loss 1.2500  accuracy 0.5000  max_expert_load 1.8000'


def test_metrics_of_an_own_loss_are_shown_the_first_four_that_are_one_number():
  stream = io.StringIO()
  own = {'a': 0.123456, 'b': 2.0, 'c': [1.0], 'd': 3.0, 'e': 4.0, 'f': 5.0}
  Progress(10, 0, primary=True, stream=stream).log(4, {'loss': 1.25} | own, list(own))
  assert stream.getvalue().split(' ', 1)[1] == 'step 4/10  loss 1.2500  a 0.1235  b 2  d 3  e 4\n'
