"""What tests of inputs do with batches: take some, compare them, join those of shards."""

import itertools
import json

import numpy as np


def take(settings, count=None, state=None, shard=(0, 1)):
  """Returns (batches of a new iterator, its position); from `state` on, as JSON has it; all batches without a count."""
  iterator = settings.make_iterator(*shard)
  if state is not None:
    iterator.set_state(json.loads(json.dumps(state)))
  batches = list(itertools.islice(iterator, count))
  state = iterator.get_state()
  iterator.close()
  return batches, state


def assert_same(batches, others):
  """Asserts that two lists of batches have the same entries, bit for bit."""
  assert len(batches) == len(others)
  for batch, other in zip(batches, others):
    assert batch.keys() == other.keys()
    for name in batch:
      np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


def documents(source):
  """The documents of all blocks of an opened source, their pieces joined."""
  found, piece = [], []
  for index in range(len(source)):
    for text, is_end in source[index].documents:
      piece.append(text)
      if is_end:
        found.append(np.concatenate(piece).tolist() if isinstance(text, np.ndarray) else ''.join(piece))
        piece = []
  assert not piece
  return found


def join(shards):
  """Returns the global batches of the batches of all shards."""
  return [{name: np.concatenate([batch[name] for batch in step]) for name in step[0]} for step in zip(*shards)]


def check_positions(settings):
  """Asserts that two shards have the batches of one, and that one goes on from theirs; returns its fourth batch."""
  one = settings.make_iterator()
  two = [settings.make_iterator(i, 2) for i in range(2)]
  for _ in range(3):
    batch = next(one)
    halves = [next(each) for each in two]
    assert all((np.concatenate([half[name] for half in halves]) == rows).all() for name, rows in batch.items())
  states = json.loads(json.dumps([each.get_state() for each in two]))
  [state] = settings.reshard_states(states, 1)
  again = settings.make_iterator()
  again.set_state(state)
  following = next(one)
  assert all((rows == following[name]).all() for name, rows in next(again).items())
  return following
