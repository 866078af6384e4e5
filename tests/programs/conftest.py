"""One finished job that the tests of this directory look at."""

import pytest

from tests import binary
from tests.programs.small_jobs import SMALL


@pytest.fixture(scope='package')
def finished_job(tmp_path_factory):
  """The directory of an undisturbed job of Small: 20 steps, all checkpoints kept. Not to be written to."""
  directory = tmp_path_factory.mktemp('finished') / 'job'
  assert binary.run_in_process('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory) == 0
  return directory
