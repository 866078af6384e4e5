"""A file in the directory of a running job asks for a profile."""

import pytest

from spmd_tasks import exit_codes
from tests.programs.small_runs import train


@pytest.mark.parametrize(
  'asked, message, is_taken',
  [
    ('3', 'profiling 3 steps of process 0', True),
    pytest.param('', 'profiling 5 steps of process 0', True, marks=pytest.mark.exhaustive),
    ('many', "profile_now asks for 'many 0': write a number of steps", True),
    ('3 1', "profile_now asks for '3 1': write a number of steps and a process, if not 0, of 1", True),
    (b'\xff', 'profile_now cannot be read', False),
  ],
)
def test_a_profile_that_is_asked_for(tmp_path, capsys, asked, message, is_taken):
  request = tmp_path / 'job' / 'profile_now'
  request.parent.mkdir()
  request.write_bytes(asked if isinstance(asked, bytes) else asked.encode())
  assert train(tmp_path / 'job', '--num_train_steps', 8 if 'profiling' in message else 2) == exit_codes.OK
  assert message in capsys.readouterr().err
  assert request.exists() == (not is_taken)
  traces = list((tmp_path / 'job').glob('profile/plugins/profile/*/*.xplane.pb'))
  assert len(traces) == ('profiling' in message)
