"""A file in the directory of a running job asks for a profile."""

import pytest

from spmd_tasks import exit_codes
from tests.programs.small_runs import train


@pytest.mark.parametrize(
  'asked, message',
  [
    ('3', 'profiling 3 steps of process 0'),
    pytest.param('', 'profiling 5 steps of process 0', marks=pytest.mark.exhaustive),
    ('many', "profile_now asks for 'many 0': write a number of steps"),
    ('3 1', "profile_now asks for '3 1': write a number of steps and a process, if not 0, of 1"),
    (b'\xff', 'profile_now cannot be read'),
  ],
)
def test_a_profile_that_is_asked_for(tmp_path, capsys, asked, message):
  request = tmp_path / 'job' / 'profile_now'
  request.parent.mkdir()
  request.write_bytes(asked if isinstance(asked, bytes) else asked.encode())
  assert train(tmp_path / 'job', '--num_train_steps', 8 if 'profiling' in message else 2) == exit_codes.OK
  assert message in capsys.readouterr().err
  assert not request.exists()
  traces = list((tmp_path / 'job').glob('profile/plugins/profile/*/*.xplane.pb'))
  assert len(traces) == ('profiling' in message)
