"""Settings that differ between processes are refused; the coordination service is faked."""

import types

import jax
import pytest

from spmd_tasks.distributed import comparison
from spmd_tasks.distributed.comparison import code_digests, process_environment, refuse_differences
from spmd_tasks.distributed.environment import refuse_unusable_environment
from spmd_tasks.errors import UserError


class Service:
  """A key-value store whose barrier never waits."""

  def __init__(self):
    self._values = {}

  def key_value_set_bytes(self, key, value):
    self._values[key] = value

  def blocking_key_value_get_bytes(self, key, timeout_in_ms):
    return self._values[key]

  def wait_at_barrier(self, key, timeout_in_ms):
    pass


@pytest.fixture
def compare(monkeypatch):
  def compare(first, second, **options):
    job = types.SimpleNamespace(client=Service(), num_processes=2)
    monkeypatch.setattr(comparison, 'coordination', lambda: job)
    for job.process_id, values in enumerate((first, second)):
      refuse_differences('settings', values, limit_s=1, **options)

  return compare


@pytest.mark.parametrize(
  'first, second, sentence',
  [
    ({'lr': 0.001, 'seed': 0}, {'lr': 0.01, 'seed': 0}, 'lr=0.01, process 0 has 0.001'),
    ({'x': 1}, {'x': 1.0}, 'x=1.0, process 0 has 1'),
    ({}, {'x': None}, 'x=null, process 0 has nothing'),
  ],
)
def test_a_difference_is_named_with_both_values_and_the_process(compare, first, second, sentence):
  with pytest.raises(UserError, match=r'^process 1 has .* the same settings') as raised:
    compare(first, second)
  assert sentence in str(raised.value)


def test_equal_values_pass(compare):
  compare({'x': (1, 2)}, {'x': [1, 2]})
  compare({'a': 1, 'x': 1}, {'b': 2, 'x': 1}, must_have_all=False)


def test_code_and_environment_are_compared_as_far_as_they_change_numbers(monkeypatch, compare):
  monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_enable_fast_math=true --xla_dump_to=here')
  environment = process_environment()
  assert environment['XLA_FLAGS --xla_cpu_enable_fast_math'] == 'true'
  assert not any('dump' in name for name in environment)
  assert environment['jax_enable_x64'] is False
  assert environment['version of jax'] == jax.__version__
  digests = code_digests()
  assert f'the code of {__name__}' in digests
  with pytest.raises(UserError, match='has the code of spmd_tasks='):
    compare(digests, digests | {'the code of spmd_tasks': 'other'}, must_have_all=False)


def test_settings_of_jax_with_which_no_job_runs_are_refused():
  with jax.numpy_dtype_promotion('strict'), pytest.raises(UserError, match=r'PROMOTION=strict .* unset it'):
    refuse_unusable_environment()
