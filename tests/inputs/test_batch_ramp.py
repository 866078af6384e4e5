"""A BatchRamp reads every row of its source once, whatever the sizes, the number of hosts and the restarts."""

import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import BatchRamp, Mixture, SyntheticText
from spmd_tasks.inputs.base import progress_of

SOURCE = SyntheticText(batch_size=4, seq_len=3, vocab_size=50)
SIZES = ((0, 4), (3, 8), (5, 12))
RAMP = BatchRamp(source=SOURCE, sizes=SIZES)
MIXTURE = Mixture(
  sources={'a': SOURCE, 'b': SyntheticText(batch_size=4, seq_len=3, vocab_size=9)}, weights={'a': 2, 'b': 1}
)


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def sorted_rows(batches):
  return sorted(map(tuple, np.concatenate([batch['ids'] for batch in batches]).tolist()))


@pytest.mark.parametrize('source', [SOURCE, MIXTURE], ids=['text', 'mixture'])
def test_every_row_is_read_once(source):
  batches = take(BatchRamp(source=source, sizes=SIZES).make_iterator(), 7)
  assert [len(batch['ids']) for batch in batches] == [4, 4, 4, 8, 8, 12, 12]
  assert sorted_rows(batches) == sorted_rows(take(source.make_iterator(), 13))
  # Row q k + j is row q of the j-th batch of the source.
  fourth, fifth = take(source.make_iterator(), 5)[3:]
  for name, rows in batches[3].items():
    np.testing.assert_array_equal(rows[0::2], fourth[name])
    np.testing.assert_array_equal(rows[1::2], fifth[name])


def test_batches_do_not_depend_on_the_number_of_hosts():
  whole = take(RAMP.make_iterator(), 7)
  shards = [take(RAMP.make_iterator(index, 2), 7) for index in range(2)]
  for batch, *parts in zip(whole, *shards, strict=True):
    np.testing.assert_array_equal(batch['ids'], np.concatenate([part['ids'] for part in parts]))


def test_a_position_is_exact_also_for_another_number_of_hosts():
  expected = take(RAMP.make_iterator(), 7)[4:]
  iterators = [RAMP.make_iterator(index, 2) for index in range(2)]
  for iterator in iterators:
    take(iterator, 4)
  states = [iterator.get_state() for iterator in iterators]
  iterators[0].set_state(states[0])
  np.testing.assert_array_equal(next(iterators[0])['ids'], expected[0]['ids'][:4])
  [state] = RAMP.reshard_states(states, 1)
  iterator = RAMP.make_iterator()
  iterator.set_state(state)
  for batch, again in zip(expected, take(iterator, 3), strict=True):
    np.testing.assert_array_equal(batch['ids'], again['ids'])
  assert [progress_of(RAMP, {**state, 'num_batches': n})['batch_size'] for n in (0, 1, 3, 4, 5, 6)] == [
    4,
    4,
    4,
    8,
    8,
    12,
  ]


def test_a_job_may_get_a_ramp_when_it_resumes():
  plain = SOURCE.make_iterator()
  before = take(plain, 3)
  state = plain.get_state()
  iterator = RAMP.make_iterator()
  iterator.set_state(state)
  batches = take(iterator, 4)
  assert [len(batch['ids']) for batch in batches] == [4, 4, 4, 8]
  assert sorted_rows(before + batches) == sorted_rows(take(SOURCE.make_iterator(), 8))


class Uncounted:
  """An input whose position does not say how many batches it has read, and whose fourth batch fails once."""

  batch_size = 1

  def element_spec(self):
    return {'ids': np.zeros((1, 1), np.int32)}

  def make_iterator(self, shard_index=0, shard_count=1):
    return UncountedIterator()


class UncountedIterator:
  position, has_failed = 0, False

  def __next__(self):
    if self.position == 3 and not self.has_failed:
      self.has_failed = True
      raise OSError('the disk is busy')
    self.position += 1
    return {'ids': np.array([[self.position]], np.int32)}

  def get_state(self):
    return {'kind': 'uncounted', 'at': self.position}

  def set_state(self, state):
    self.position = state['at']


def test_a_batch_that_could_not_be_read_is_read_again():
  iterator = BatchRamp(source=Uncounted(), sizes=((0, 2),)).make_iterator()
  assert next(iterator)['ids'].ravel().tolist() == [1, 2]
  with pytest.raises(OSError, match='busy'):
    next(iterator)
  assert next(iterator)['ids'].ravel().tolist() == [3, 4]


def test_what_cannot_work_is_refused():
  for sizes, message in (
    ((), r'sizes of BatchRamp are \(\): they must be'),
    (((1, 4),), 'with 0 batches in the first pair'),
    (((0, 4), (5, 8), (5, 12)), 'more in each of the next'),
    (((0, 4), (5, 6)), 'batch size 6 of BatchRamp must be a multiple of the batch size of its source, 4'),
  ):
    with pytest.raises(UserError, match=message):
      BatchRamp(source=SOURCE, sizes=sizes)
