"""Steps are profiled that the experiment names, or that a file in the directory of a running job asks for."""

from types import SimpleNamespace

from etils import epath
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.programs.hooks import take_request
from tests.programs.small_runs import train


def sizes_of_traces(directory):
  return [path.stat().st_size for path in directory.glob('profile/plugins/profile/*/*.xplane.pb')]


def test_the_steps_that_the_experiment_names_are_profiled(tmp_path):
  assert train(tmp_path / 'job', '--num_train_steps', 4, '--set', 'profile_steps=1,3') == exit_codes.OK
  [size] = sizes_of_traces(tmp_path / 'job')
  assert size > 1000


@pytest.mark.parametrize(
  'asked, message',
  [
    ('3', 'profiling 3 steps of process 0'),
    pytest.param('', 'profiling 5 steps of process 0', marks=pytest.mark.exhaustive),
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
  assert len(sizes_of_traces(tmp_path / 'job')) == ('profiling' in message)


@pytest.mark.parametrize('asked', ['many', '0', '-1', '1' * 5000, '3 some'])
def test_what_is_no_number_of_steps_is_said_and_removed(tmp_path, asked):
  request, said = tmp_path / 'profile_now', []
  request.write_text(asked)
  assert take_request(SimpleNamespace(message=said.append), epath.Path(request), 1) is None
  assert f"asks for '{asked}" in said[0]
  assert not request.exists()
