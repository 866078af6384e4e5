"""Helpers for tests of inputs: read batches, compare them, concatenate the batches of shards."""

import itertools
import json

import numpy as np


def take(settings, count=None, state=None, shard=(0, 1)):
  """Reads `count` batches, or all, of a new iterator, from `state` (through JSON); returns them and the position."""
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
  """Returns the documents of an opened source, with their pieces concatenated."""
  whole, pieces = [], []
  for index in range(len(source)):
    for text, is_end in source[index].documents:
      pieces.append(text)
      if is_end:
        whole.append(np.concatenate(pieces).tolist() if isinstance(text, np.ndarray) else ''.join(pieces))
        pieces = []
  assert not pieces
  return whole


def concatenate_shards(shards):
  """Returns the global batches from the lists of batches of all shards."""
  return [{name: np.concatenate([batch[name] for batch in step]) for name in step[0]} for step in zip(*shards)]


def check_positions(settings):
  """Asserts that two shards read the batches of one, and each goes on where the other was; returns the fourth batch."""
  one = settings.make_iterator()
  two = [settings.make_iterator(i, 2) for i in range(2)]
  for _ in range(3):
    batch = next(one)
    assert_same(concatenate_shards([[next(shard)] for shard in two]), [batch])
  states = json.loads(json.dumps([[shard.get_state() for shard in shards] for shards in ([one], two)]))
  following = next(one)
  for saved, count in zip(states, (2, 1), strict=True):
    shards = [settings.make_iterator(i, count) for i in range(count)]
    for shard, state in zip(shards, settings.reshard_states(saved, count), strict=True):
      shard.set_state(state)
    assert_same(concatenate_shards([[next(shard)] for shard in shards]), [following])
  return following
