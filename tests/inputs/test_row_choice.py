"""The choice of sources: every weight kept to less than one row, and all rows of the batch at nearly the same pace."""

from fractions import Fraction
import json

import numpy as np
import pytest

from spmd_tasks.inputs._row_choice import RowChoice, share_out

WEIGHTS = [
  (1,),
  (1, 1),
  (7, 3),
  (99, 1),
  (1, 1, 1),
  (50, 30, 20),
  (0.6180339, 0.2360679, 0.1458982),
  (1000, 1, 1, 1, 1),
  (16, 8, 4, 2, 1, 1),
  tuple(range(1, 13)),
]


def fractions(weights):
  exact = [Fraction(str(weight)) for weight in weights]
  return [weight / sum(exact) for weight in exact]


def choices(choice, count):
  for _ in range(count):
    sources = choice.choose()
    yield sources
    choice.advance(sources)


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('batch_size', [1, 4, 30])
def test_every_source_gives_its_weight_to_less_than_a_row_after_every_batch(weights, batch_size):
  weights, given = fractions(weights), [0] * len(weights)
  for num_batches in range(1, 150):
    counts = share_out(weights, given=given, batch_size=batch_size, num_batches=num_batches)
    assert sum(counts) == batch_size
    given = [had + count for had, count in zip(given, counts)]
    for had, weight in zip(given, weights):
      assert abs(had - weight * batch_size * num_batches) < 1


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('batch_size', [1, 6, 64])
def test_no_row_of_the_batch_is_far_ahead_of_another_in_any_source(weights, batch_size):
  choice = RowChoice(batch_size, [(0, fractions(weights))], seed=3)
  for _ in choices(choice, 120):
    spread = choice.rows_read.max(axis=1) - choice.rows_read.min(axis=1)
    assert spread.max() <= 2
  assert choice.rows_read.sum() == 120 * batch_size


def test_rows_of_a_batch_are_drawn_anew_for_every_batch_and_seed():
  def places(seed, count=40):
    choice = RowChoice(16, [(0, fractions((1, 1)))], seed)
    return np.array(list(choices(choice, count)))

  assert (places(1) == places(1)).all()
  assert (places(1) != places(2)).any()
  # After an even number of batches all rows are even again, and the next draw is a new one.
  assert len({tuple(row) for row in places(1)[::2]}) == 20


def test_weights_change_after_the_given_batches_and_count_anew():
  schedule = [(0, fractions((1, 1))), (10, fractions((0, 1))), (13, fractions((3, 1)))]
  sources = np.array(list(choices(RowChoice(8, schedule, 0), 20)))
  ones = sources.sum(axis=1)  # how many rows of each batch are of source 1
  assert ones[:10].tolist() == [4] * 10
  assert ones[10:13].tolist() == [8] * 3
  assert ones[13:].tolist() == [2] * 7


@pytest.mark.parametrize('num_before', [0, 1, 7, 12])
def test_a_position_is_plain_data(num_before):
  schedule = [(0, fractions((5, 3, 2))), (9, fractions((1, 1, 1)))]
  whole = list(choices(RowChoice(7, schedule, 5), 20))
  first, second = RowChoice(7, schedule, 5), RowChoice(7, schedule, 5)
  list(choices(first, num_before))
  second.set_state(json.loads(json.dumps(first.get_state())))
  np.testing.assert_array_equal(list(choices(second, 20 - num_before)), whole[num_before:])
