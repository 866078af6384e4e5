"""The training loop on a step that is a script: what is counted, what is acted on, and why the loop ends."""

import types

from spmd_tasks.programs.training_loop import TrainingDivergedError, TrainingLoop

GOOD = {'skipped': 0.0, 'loss': 1.0, 'grad_norm': 1.0, 'weight_norm': 3.0}
SKIPPED = GOOD | {'skipped': 1.0, 'loss': float('nan')}
BAD_WEIGHTS = GOOD | {'weight_norm': float('nan')}


def run(outcomes, *, num_train_steps, every=None):
  """Runs the loop over a list of step outcomes.

  Returns (events, the loop, the error that it raised). An event is (kind, step, number of steps launched until then).
  The kinds are step, skip, and act for a finished step that is a multiple of `every`, which the loop awaits.
  """
  state = types.SimpleNamespace(step=0, learner=types.SimpleNamespace(num_skipped=0, num_skipped_in_a_row=0))

  def is_due(step):
    return every is not None and step % every == 0

  loop = TrainingLoop(
    train_step=lambda state, batch: (state, batch),  # the batch is its own outcome
    state=state,
    num_train_steps=num_train_steps,
    max_consecutive_skips=3,
    is_awaited=is_due,
    platform='tpu',
    on_activity=lambda step, activity: None,
    should_stop=lambda: False,
  )
  batches = iter([(outcome, {'position': number}) for number, outcome in enumerate(outcomes, 1)])
  events, error = [], None
  try:
    for step, is_skipped, *_ in loop.run(batches):
      assert loop.step == step
      events.append(('skip' if is_skipped else 'step', step, loop.input_state['position']))
      if not is_skipped and is_due(step):
        events.append(('act', step, loop.input_state['position']))
  except TrainingDivergedError as diverged:
    error = diverged
  return events, loop, error


def test_a_skipped_step_is_made_up_for_and_awaited_steps_are_exact():
  events, loop, error = run([GOOD, SKIPPED, GOOD, GOOD, SKIPPED, GOOD], num_train_steps=4, every=2)
  assert error is None
  assert (loop.step, loop.num_skipped) == (4, 2)
  # The position saved at step 2 is behind the batch of step 2, the skipped one included: nothing is read twice.
  assert [event for event in events if event[0] == 'act'] == [('act', 2, 3), ('act', 4, 6)]
  assert [event[1] for event in events if event[0] == 'step'] == [1, 2, 3, 4]


def test_weights_that_are_not_finite_are_never_acted_on():
  events, _, error = run([GOOD, BAD_WEIGHTS, GOOD], num_train_steps=3, every=1)
  assert 'step 2 made weights that are not finite' in str(error)
  assert events == [('step', 1, 1), ('act', 1, 1)]


def test_an_input_that_ends_leaves_no_step_in_flight():
  events, loop, error = run([GOOD, SKIPPED, GOOD], num_train_steps=9)
  assert error is None
  assert loop.input_has_ended
  assert (loop.step, loop.input_state) == (2, {'position': 3})
  assert events[-1] == ('step', 2, 3)
