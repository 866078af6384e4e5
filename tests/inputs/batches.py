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
