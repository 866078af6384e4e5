"""Records tell the processes of a job about each other."""

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from spmd_tasks.distributed import rank_records
from spmd_tasks.distributed.emergency_exit import Position
from spmd_tasks.distributed.rank_records import RankRecords, open_rank_records


def test_damaged_records_are_ignored(tmp_path):
  records, _ = (RankRecords(tmp_path, process_index=index, num_processes=2) for index in range(2))
  for content in ('', '{', '[]', '{"process_index": 1}', '{"process_index": "1; rm -rf", "host": 1}', '\udc80'):
    (tmp_path / 'ranks' / 'progress' / '1.json').write_text(content, errors='surrogateescape')
    assert records.describe(Position(step=1), is_waiting=False)[1] == 'process 1 has left no record'


@pytest.fixture
def process_1(monkeypatch):
  """Makes this process 1 of 2; returns a list of functions, one of which runs at each collective."""
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


@pytest.mark.parametrize('earlier', [None, b'0706050403020100'])
def test_a_directory_that_is_not_shared_is_refused(tmp_path, process_1, monkeypatch, earlier):
  monkeypatch.setattr(rank_records, '_VISIBLE_LIMIT_S', 0.05)
  if earlier is not None:
    (tmp_path / 'ranks').mkdir()
    (tmp_path / 'ranks' / 'start.txt').write_bytes(earlier)
  process_1 += [lambda: None, lambda: None]
  with pytest.raises(ValueError, match=r'is not shared: process 1 \(of 2\).* Choose a directory'):
    open_rank_records(tmp_path)
  assert not list(tmp_path.glob('ranks/progress'))
