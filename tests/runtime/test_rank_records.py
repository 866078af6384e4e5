"""What the processes learn of each other from their records."""

import os
import subprocess
import sys
import time

from spmd_tasks.runtime.rank_records import Position, RankRecords


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


def test_a_stated_failure_is_the_culprit_and_its_consequences_are_not(tmp_path):
  records = open_all(tmp_path)
  for record in records:
    record.write_progress(Position(step=3), since=time.time())
  records[0].write_failure(step=3, reason='process 2 left', is_own=False, stacks='')
  records[2].write_failure(step=3, reason='out of luck', is_own=True, stacks='line 1')
  assert [(failure.process_index, failure.is_own) for failure in records[1].peer_failures()] == [(2, True), (0, False)]
  assert records[1].describe(Position(step=4), is_waiting=True)[1] == 'process 2: out of luck'
  assert (tmp_path / 'ranks' / 'failures' / '2.stacks.txt').read_text() == 'line 1'
  assert [failure.process_index for failure in records[2].peer_failures()] == [0]


def test_a_process_that_has_died_here_is_named(tmp_path):
  records = open_all(tmp_path, num_processes=2)
  code = (
    'from spmd_tasks.runtime.rank_records import *; '
    f'RankRecords({str(tmp_path)!r}, process_index=1, num_processes=2).write_progress(Position(step=9), since=0.0)'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
  assert records[0].describe(Position(step=1), is_waiting=False)[1] == 'process 1 is gone from this host'


def test_a_process_without_a_record_is_named(tmp_path):
  records = open_all(tmp_path, num_processes=2)
  assert records[0].describe(Position(step=1), is_waiting=False)[1] == 'process 1 has left no record'


def test_opening_clears_what_an_earlier_run_left(tmp_path):
  records = open_all(tmp_path)
  records[1].write_failure(step=1, reason='earlier', is_own=True, stacks='x')
  records[1].write_progress(Position(step=1), since=0.0)
  assert records[0].peer_failures()
  open_all(tmp_path)
  assert records[0].peer_failures() == []
  assert not list(tmp_path.glob('ranks/*/1.*'))


def test_records_that_are_damaged_or_of_a_larger_job_are_passed_over(tmp_path):
  records = open_all(tmp_path, num_processes=2)
  larger = RankRecords(tmp_path, process_index=5, num_processes=6)
  larger.write_failure(step=1, reason='another job', is_own=True, stacks='')
  failures = tmp_path / 'ranks' / 'failures'
  for content in ('', '{', '[]', '{"process_index": 1}', '{"process_index": "1; rm -rf", "host": 1}', '\udc80'):
    (failures / '1.json').write_text(content, errors='surrogateescape')
    assert records[0].peer_failures() == []
  (failures / 'x.json').write_text('{}')
  assert records[0].peer_failures() == []


def test_a_large_jobs_report_has_only_the_remarkable_processes(tmp_path):
  records = open_all(tmp_path, num_processes=40)
  for index, record in enumerate(records):
    record.write_progress(Position(step=5 - (index == 33)), since=time.time())
  table, culprits = records[0].describe(Position(step=5), is_waiting=True)
  assert culprits == "process 33 is behind: 'start' of step 4"
  assert [line.split()[1] for line in table.splitlines()[1:]] == ['0', '33']
  assert str(os.getpid()) in table
