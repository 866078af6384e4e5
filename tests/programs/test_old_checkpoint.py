"""A checkpoint that version e2bba1f (November 2026) wrote is restored by the version of today.

data/e2bba1f/uneven_half is the directory of a real job, synthetic.Uneven, stopped at step 10 of 20. Its config.json is
not read: the experiment is named.
"""

from pathlib import Path
import shutil

import pytest

from tests import binary
from tests.programs.small_runs import train

OLD = Path(__file__).parents[1] / 'data' / 'e2bba1f' / 'uneven_half'


def test_an_old_job_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
  shutil.copytree(OLD, tmp_path / 'resumed')
  for name in ('resumed', 'whole'):
    flags = ('--set', 'tensorboard=false', '--accept_config_changes')
    assert train(tmp_path / name, *flags, exp='synthetic.Uneven') == 0
  losses, undisturbed = (binary.column(tmp_path / name, 'loss') for name in ('resumed', 'whole'))
  assert list(losses) == list(range(1, 21))
  assert losses == pytest.approx(undisturbed, rel=2e-6)  # compiled for another processor, at another level
