"""Schedules as tables: who works on what in which tick, against what a pipeline must respect."""

import numpy as np
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
def test_each_stage_does_all_its_work_once_and_after_the_stage_below(stages, microbatches, repeats):
  schedule = Schedule(num_stages=stages, num_microbatches=microbatches, num_repeats=repeats)
  ticks = when(schedule)
  assert len(ticks) == stages * microbatches * repeats
  for (m, v, p), tick in ticks.items():
    if p > 0:
      assert tick == ticks[m, v, p - 1] + 1
    elif v > 0:
      assert tick > ticks[m, v - 1, stages - 1]


@pytest.mark.parametrize('stages, microbatches, repeats', SIZES)
def test_the_bubble_is_what_the_formula_says(stages, microbatches, repeats):
  schedule = Schedule(num_stages=stages, num_microbatches=microbatches, num_repeats=repeats)
  idle = schedule.num_ticks * stages - len(when(schedule))
  assert idle / (schedule.num_ticks * stages) == pytest.approx(schedule.bubble_fraction)
  assert schedule.bubble_fraction == pytest.approx((stages - 1) / (microbatches * repeats + stages - 1))


def test_the_tables_of_the_docstring():
  def row(schedule, stage):
    text = ''
    for t in range(schedule.num_ticks):
      m, v, is_work = schedule.work(stage, t)
      text += str(m) + v * "'" + ' ' if is_work else '. '
    return text.strip()

  gpipe = Schedule(num_stages=2, num_microbatches=4)
  assert [row(gpipe, p) for p in range(2)] == ['0 1 2 3 .', '. 0 1 2 3']
  circular = Schedule(num_stages=2, num_microbatches=2, num_repeats=2)
  assert [row(circular, p) for p in range(2)] == ["0 1 0' 1' .", ". 0 1 0' 1'"]


def test_bubbles_have_indices_in_range():
  schedule = Schedule(num_stages=4, num_microbatches=4, num_repeats=2)
  microbatch, repeat, _ = schedule.work(np.arange(4)[:, None], np.arange(schedule.num_ticks)[None])
  assert set(microbatch.ravel()) == set(range(4))
  assert set(repeat.ravel()) == {0, 1}


@pytest.mark.parametrize('stages, microbatches', [(1, 1), (2, 4), (4, 4), (4, 12)])
def test_one_forward_one_backward_goes_back_from_the_last_stage(stages, microbatches):
  """What its gradient rule relies on: the forward schedule with the stages in reverse is a backward schedule."""
  schedule = Schedule(num_stages=stages, num_microbatches=microbatches)
  backward = {}
  for t in range(schedule.num_ticks):
    for p in range(stages):
      microbatch, _, is_work = schedule.work(stages - 1 - p, t)
      if is_work:
        assert (microbatch, p) not in backward
        backward[microbatch, p] = t
  assert len(backward) == stages * microbatches
  for (m, p), tick in backward.items():
    assert p == stages - 1 or tick == backward[m, p + 1] + 1


@pytest.mark.parametrize('stages, microbatches, nearest', [(4, 6, 8), (4, 2, 4), (4, 9, 8), (2, 1, 2), (8, 0, 8)])
def test_microbatches_that_the_stages_do_not_divide(stages, microbatches, nearest):
  message = f'num_microbatches={microbatches} must be a multiple of the {stages} stages.*: {nearest} is the nearest'
  with pytest.raises(ValueError, match=message):
    Schedule(num_stages=stages, num_microbatches=microbatches)
