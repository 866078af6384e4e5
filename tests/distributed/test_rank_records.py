"""What the processes learn of each other from their records."""

import json
import time

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from spmd_tasks.distributed import rank_records
from spmd_tasks.distributed.departures import Departure
from spmd_tasks.distributed.emergency_exit import Position
from spmd_tasks.distributed.rank_records import RankRecords, open_rank_records


def open_all(directory, num_processes=3):
  return [RankRecords(directory, process_index=i, num_processes=num_processes) for i in range(num_processes)]


def test_the_process_that_is_behind_is_named(tmp_path):
  records = open_all(tmp_path)
  for index, position in enumerate(
    [Position(step=7, beat=1), Position(step=7, activity='input'), Position(step=7, beat=1)]
  ):
    records[index].write_progress(position, since=time.time())
  table, culprits = records[0].describe(Position(step=7, beat=1), is_waiting=True)
  assert culprits == "process 1 is behind: 'input' of step 7"
  assert table.count('\n') == 3
  # The one behind does not blame those that wait for it; and nobody compares positions that are not settled.
  assert records[1].describe(Position(step=7, activity='input'), is_waiting=True)[1] == ''
  assert records[0].describe(Position(step=7, beat=1), is_waiting=False)[1] == ''


def test_a_stated_reason_is_the_culprit_and_its_consequences_are_not(tmp_path):
  records = open_all(tmp_path)
  for record in records:
    record.write_progress(Position(step=3), since=time.time())
  said = {'host': 'a', 'pid': 1, 'step': 3, 'code': 1}
  departures = [
    Departure(process_index=2, reason='out of luck', is_own=True, **said),
    Departure(process_index=0, reason='process 2 left', is_own=False, **said),
  ]
  assert records[1].describe(Position(step=4), departures, is_waiting=True)[1] == 'process 2: out of luck'
  # The reason may be how the end of another process looks from there, one that could tell nothing.
  departures = [Departure(process_index=2, reason='Connection closed', is_own=True, **said)]
  path = tmp_path / 'ranks' / 'progress' / '0.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'pid': 2**22 + 1}))  # above Linux's greatest
  culprits = records[1].describe(Position(step=4), departures, is_waiting=True)[1]
  assert culprits == 'process 2: Connection closed, process 0 is gone from this host'


def test_records_that_are_damaged_are_passed_over(tmp_path):
  records = open_all(tmp_path, num_processes=2)
  for content in ('', '{', '[]', '{"process_index": 1}', '{"process_index": "1; rm -rf", "host": 1}', '\udc80'):
    (tmp_path / 'ranks' / 'progress' / '1.json').write_text(content, errors='surrogateescape')
    assert records[0].describe(Position(step=1), is_waiting=False)[1] == 'process 1 has left no record'


@pytest.fixture
def process_1(monkeypatch):
  """open_rank_records as process 1 of 2; the list is of what is done at each meeting with process 0."""
  meetings = []

  def broadcast(token):
    meetings.pop(0)()
    return np.arange(8, dtype=np.uint8)

  def gather(flag):
    meetings.pop(0)()
    return np.stack([np.array(True), flag])

  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', broadcast)
  monkeypatch.setattr(multihost_utils, 'process_allgather', gather)
  monkeypatch.setattr(rank_records, '_VISIBLE_PERIOD_S', 0.01)
  return meetings


def test_a_running_jobs_records_stay_until_process_0_owns_the_directory(tmp_path, process_1):
  open_all(tmp_path, num_processes=2)[1].write_progress(Position(step=1), since=0.0)
  own = tmp_path / 'ranks' / 'progress' / '1.json'
  is_there = []

  def claimed():
    is_there.append(own.exists())
    (tmp_path / 'ranks' / 'start.txt').write_text('0001020304050607')

  process_1 += [claimed, lambda: is_there.append(own.exists())]
  assert open_rank_records(tmp_path).process_index == 1
  assert is_there == [True, False]


@pytest.mark.parametrize('earlier', [None, b'0706050403020100'])
def test_a_directory_that_is_not_shared_is_refused(tmp_path, process_1, monkeypatch, earlier):
  monkeypatch.setattr(rank_records, '_VISIBLE_LIMIT_S', 0.05)
  if earlier is not None:
    (tmp_path / 'ranks').mkdir()
    (tmp_path / 'ranks' / 'start.txt').write_bytes(earlier)
  process_1 += [lambda: None, lambda: None]
  with pytest.raises(ValueError, match=r'is not shared .* is not seen by process 1 \(of 2\); choose a directory'):
    open_rank_records(tmp_path)
  assert not list(tmp_path.glob('ranks/progress'))
