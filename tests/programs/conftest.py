"""One finished job that the tests of this directory look at, and programs that are compiled once for all of them."""

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from tests import binary
from tests.programs.small_jobs import SMALL

_CACHE_SETTINGS = {
  'jax_compilation_cache_dir': None,
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': 0,
}


@pytest.fixture(scope='session')
def cache_directory(tmp_path_factory):
  return tmp_path_factory.mktemp('compilation_cache')


@pytest.fixture(scope='package', autouse=True)
def compiled_once(cache_directory):
  """Jobs of this process read programs that an earlier one compiled; what is run is the same."""
  before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
  for name, value in _CACHE_SETTINGS.items():
    jax.config.update(name, str(cache_directory) if value is None else value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope='session')
def cache_environment(cache_directory):
  """The same for a process that is given this environment."""
  settings = _CACHE_SETTINGS | {'jax_compilation_cache_dir': cache_directory}
  return {name.upper(): str(value) for name, value in settings.items()}


@pytest.fixture(scope='package')
def finished_job(tmp_path_factory, compiled_once):
  """The directory of an undisturbed job of Small: 20 steps, all checkpoints kept. Not to be written to."""
  directory = tmp_path_factory.mktemp('finished') / 'job'
  assert binary.run_in_process('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory) == 0
  return directory
