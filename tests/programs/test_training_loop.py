"""The training loop on a step that is a script: what is counted, when intervals act, and why it stops."""

import types

import pytest

from spmd_tasks.programs.training_loop import (
  Interval,
  TrainingDivergedError,
  TrainingInputEndedError,
  TrainingLoop,
)

GOOD = {'skipped': 0.0, 'loss': 1.0, 'grad_norm': 1.0, 'weight_norm': 3.0}
SKIPPED = GOOD | {'skipped': 1.0, 'loss': float('nan')}
BAD_WEIGHTS = GOOD | {'weight_norm': float('nan')}


def run(outcomes, *, num_train_steps, every=None, max_consecutive_skips=3, stop_at=None):
  """Runs the loop over a list of step outcomes; returns (events, the loop, what it raised or returned)."""
  events = []
  state = types.SimpleNamespace(step=0, learner=types.SimpleNamespace(num_skipped=0, num_skipped_in_a_row=0))
  remaining = iter(outcomes)
  loop = TrainingLoop(
    train_step=lambda state, batch: (state, batch),  # the batch is its own outcome
    state=state,
    batches=iter([(outcome, {'position': number}) for number, outcome in enumerate(remaining, 1)]),
    num_train_steps=num_train_steps,
    max_consecutive_skips=max_consecutive_skips,
    intervals=[Interval(every, lambda step, loop: events.append(('act', step, loop.input_state['position'])))],
    on_launch=lambda step, activity: None,
    on_step=lambda step, metrics: events.append(('step', step)),
    on_skip=lambda step, metrics: events.append(('skip', step)),
    should_stop=lambda: loop.step == stop_at,
  )
  try:
    ended = loop.run()
  except Exception as error:
    ended = error
  return events, loop, ended


def test_a_skipped_step_is_made_up_for_and_intervals_see_applied_steps_only():
  events, loop, ended = run([GOOD, SKIPPED, GOOD, GOOD, SKIPPED, GOOD], num_train_steps=4, every=2)
  assert ended is True
  assert (loop.step, loop.num_skipped) == (4, 2)
  # The position saved at step 2 is behind the batch of step 2, the skipped one included: nothing is read twice.
  assert [event for event in events if event[0] == 'act'] == [('act', 2, 3), ('act', 4, 6)]
  assert [event[1] for event in events if event[0] == 'step'] == [1, 2, 3, 4]


def test_it_stops_after_n_skips_in_a_row_and_says_that_the_weights_are_good():
  events, _loop, ended = run([GOOD, SKIPPED, GOOD] + [SKIPPED] * 5, num_train_steps=9)
  assert isinstance(ended, TrainingDivergedError)
  assert '3 steps in a row' in str(ended)
  assert 'those of step 2, still good' in str(ended)
  assert events.count(('skip', 2)) == 3


def test_weights_that_are_not_finite_are_never_acted_on():
  events, _loop, ended = run([GOOD, BAD_WEIGHTS, GOOD], num_train_steps=3, every=1)
  assert isinstance(ended, TrainingDivergedError)
  assert 'step 2 made weights that are not finite' in str(ended)
  assert [event for event in events if event[0] == 'act'] == [('act', 1, 1)]


def test_an_input_that_ends_leaves_the_loop_settled():
  _events, loop, ended = run([GOOD, SKIPPED, GOOD], num_train_steps=9)
  assert isinstance(ended, TrainingInputEndedError)
  assert 'after step 2 of 9' in str(ended)
  assert (loop.step, loop.input_state) == (2, {'position': 3})


def test_a_request_to_stop_is_answered_between_steps():
  events, loop, ended = run([GOOD] * 9, num_train_steps=9, stop_at=4)
  assert ended is False
  assert loop.step == 4
  assert events[-1] == ('step', 4)


@pytest.mark.parametrize('every, steps', [(None, []), (1, [1, 2, 3]), (2, [2]), (5, [])])
def test_intervals(every, steps):
  events, _, ended = run([GOOD] * 3, num_train_steps=3, every=every)
  assert ended is True
  assert [event[1] for event in events if event[0] == 'act'] == steps
