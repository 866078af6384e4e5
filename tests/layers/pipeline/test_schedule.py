"""Schedules as tables: who works on what in which tick, against what a pipeline must respect."""

import pytest

from spmd_tasks.layers.pipeline import Schedule

SIZES = [(1, 1, 1), (2, 4, 1), (4, 4, 1), (4, 12, 1), (2, 2, 2), (4, 8, 2), (4, 4, 3), (8, 16, 2)]


def when(schedule):
  """{(microbatch, repeat, stage): tick} of all work."""
  ticks = {}
  for t in range(schedule.num_ticks):
    for p in range(schedule.num_stages):
      microbatch, repeat, is_work = schedule.work(p, t)
      if is_work:
        assert (microbatch, repeat, p) not in ticks
        ticks[microbatch, repeat, p] = t
  return ticks


@pytest.mark.parametrize('stages, microbatches, repeats', SIZES)
def test_each_stage_does_all_its_work_once_after_the_stage_below_and_rests_in_the_bubble(stages, microbatches, repeats):
  schedule = Schedule(num_stages=stages, num_microbatches=microbatches, num_repeats=repeats)
  ticks = when(schedule)
  assert len(ticks) == stages * microbatches * repeats
  for (m, v, p), tick in ticks.items():
    if p > 0:
      assert tick == ticks[m, v, p - 1] + 1
    elif v > 0:
      assert tick > ticks[m, v - 1, stages - 1]
  idle = schedule.num_ticks * stages - len(ticks)
  assert idle / (schedule.num_ticks * stages) == pytest.approx(schedule.bubble_fraction)
  assert schedule.bubble_fraction == pytest.approx((stages - 1) / (microbatches * repeats + stages - 1))
