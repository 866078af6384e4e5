"""A checkpoint that version e2bba1f (November 2026) wrote is restored by the version of today.

data/e2bba1f/uneven_half is the directory of a real job, synthetic.Uneven, stopped at step 10 of 20. Its config.json is
not read: the experiment is named.
"""

from pathlib import Path
import shutil

import pytest

from spmd_tasks import exit_codes
from tests import binary

DATA = Path(__file__).parents[1] / 'data' / 'e2bba1f'


@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
  """The old job, finished by the code of today."""
  directory = tmp_path_factory.mktemp('old') / 'job'
  shutil.copytree(DATA / 'uneven_half', directory)
  flags = ('--exp', 'synthetic.Uneven', '--set', 'tensorboard=false', '--accept_config_changes')
  assert binary.run_in_process(*flags, '--mode', 'train', '--job_log_dir', directory) == exit_codes.OK
  return directory


def test_an_old_job_goes_on_as_if_it_had_not_been_interrupted(resumed, tmp_path):
  flags = ('--exp', 'synthetic.Uneven', '--set', 'tensorboard=false', '--mode', 'train')
  assert binary.run_in_process(*flags, '--job_log_dir', tmp_path / 'job') == exit_codes.OK
  losses, undisturbed = binary.column(resumed, 'loss'), binary.column(tmp_path / 'job', 'loss')
  assert list(losses) == list(range(1, 21))
  assert losses == pytest.approx(undisturbed, rel=2e-6)  # compiled for another processor, at another level
