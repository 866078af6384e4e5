"""Long activities are printed to stderr periodically, unless the process is silent."""

import time

import pytest

from spmd_tasks import activity


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.delenv('SPMD_TASKS_QUIET', raising=False)
  for name, value in {'_FIRST_S': 0.05, '_PERIOD_S': 0.1, '_POLL_S': 0.01, '_last_s': None, '_thread': None}.items():
    monkeypatch.setattr(activity, name, value)
  yield
  activity.set_activity(None)


def test_a_long_activity_is_printed_until_it_ends(capsys):
  with activity.doing('compiling'):
    time.sleep(0.5)
  time.sleep(0.05)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) >= 2
  assert all('compiling ... 0 s' in line for line in lines)
  time.sleep(0.3)
  assert capsys.readouterr().err == ''


def test_an_activity_tells_how_far_it_is(capsys):
  batches = []
  with activity.doing(lambda: f'evaluating, {len(batches)} batches'):
    for number in range(5):
      time.sleep(0.1)
      batches.append(number)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) >= 2
  assert lines[0] != lines[-1]


def test_short_activities_in_a_row_are_not_silent(capsys):
  for _ in range(30):
    with activity.doing('importing'):
      activity.set_activity('preparing')
      time.sleep(0.01)
  assert 'importing' in capsys.readouterr().err


def test_a_silent_process_prints_nothing(capsys, monkeypatch):
  monkeypatch.setenv('SPMD_TASKS_QUIET', '1')
  activity.set_activity('importing', say_now=True)
  with activity.doing('compiling'):
    time.sleep(0.1)
  assert capsys.readouterr().err == ''
