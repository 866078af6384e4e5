"""One finished job that the tests of this directory look at, and programs that are compiled once for all of them."""

import jax
import pytest

from tests import binary
from tests.programs.small_jobs import SMALL

_MIN_COMPILE_TIME = 'jax_persistent_cache_min_compile_time_secs'


@pytest.fixture(scope='package', autouse=True)
def compiled_once():
  """Jobs of this process keep their small programs too in the cache that all tests share."""
  before = getattr(jax.config, _MIN_COMPILE_TIME)
  jax.config.update(_MIN_COMPILE_TIME, 0.0)
  yield
  jax.config.update(_MIN_COMPILE_TIME, before)


@pytest.fixture(scope='session')
def cache_environment():
  """The same for a process that is given this environment."""
  return {_MIN_COMPILE_TIME.upper(): '0'}


@pytest.fixture(scope='package')
def finished_job(tmp_path_factory, compiled_once):
  """The directory of an undisturbed job of Small: 20 steps, all checkpoints kept. Not to be written to."""
  directory = tmp_path_factory.mktemp('finished') / 'job'
  assert binary.run_in_process('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory) == 0
  return directory
