"""SyntheticText is a function of seed, batch and row; it resumes on any number of shards."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from spmd_tasks.inputs import SyntheticPairs, SyntheticText

SETTINGS = SyntheticText(batch_size=6, seq_len=10, vocab_size=32, seed=3, noise=0.2)


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def assert_same(batches, others):
  assert len(batches) == len(others)
  for batch, other in zip(batches, others):
    for name in batch:
      np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


@pytest.mark.parametrize('encoder_len', [8, None])
def test_pairs_are_a_text_and_its_beginning(encoder_len):
  """By the encoder's row, or in one row, whose first text is the prefix."""
  pairs = SyntheticPairs(batch_size=6, seq_len=13, vocab_size=32, encoder_len=encoder_len)
  whole = take(pairs.make_iterator(), 2)
  for batch in whole:
    for i, labels in enumerate(batch['labels']):
      tokens = labels[labels > 0].tolist()
      size = len(tokens) if encoder_len else 1 + 2 * int(batch['prefix_mask'][i].sum() - 1)
      text = batch['encoder_ids'][i] if encoder_len else batch['ids'][i, 1 : (size + 1) // 2]
      text = text[text > 0].tolist()
      learnt = tokens if encoder_len else tokens[len(text) :]
      assert learnt == [*text[: len(learnt) - 1], 1]
      assert min(text) >= 2
      assert labels[batch['weights'][i] > 0].tolist() == learnt
      assert batch['ids'][i, : len(tokens)].tolist() == [0, *tokens[:-1]]
  shards = [take(pairs.make_iterator(i, 2), 2) for i in range(2)]
  assert_same(whole, [{k: np.concatenate([shard[b][k] for shard in shards]) for k in whole[b]} for b in range(2)])
  resumed = pairs.make_iterator()
  resumed.set_state({**pairs.make_iterator().get_state(), 'next_batch': 1})
  assert_same(take(resumed, 1), whole[1:])


@pytest.mark.parametrize('shard_count', [2, 3, 6])
def test_shards_together_are_the_global_batch(shard_count):
  whole = take(SETTINGS.make_iterator(), 3)
  shards = [take(SETTINGS.make_iterator(i, shard_count), 3) for i in range(shard_count)]
  joined = [{k: np.concatenate([shard[b][k] for shard in shards]) for k in whole[b]} for b in range(3)]
  assert_same(whole, joined)


@pytest.mark.parametrize('old_count, new_count', [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_resumes_exactly_on_any_number_of_shards(old_count, new_count):
  old = [SETTINGS.make_iterator(i, old_count) for i in range(old_count)]
  for iterator in old:
    take(iterator, 4)
  states = SETTINGS.reshard_states([json.loads(json.dumps(it.get_state())) for it in old], new_count)
  for index, state in enumerate(states):
    resumed = SETTINGS.make_iterator(index, new_count)
    resumed.set_state(state)
    assert_same(take(resumed, 2), take(SETTINGS.make_iterator(index, new_count), 6)[4:])


@pytest.mark.parametrize('change', [{'seed': 4}, {'seq_len': 11}, {'batch_size': 12}, {'noise': 0.3}])
def test_other_settings_refuse_the_state(change):
  state = SETTINGS.make_iterator().get_state()
  with pytest.raises(ValueError, match=next(iter(change))):
    dataclasses.replace(SETTINGS, **change).make_iterator().set_state(state)


def test_a_rule_can_be_learnt():
  """The most frequent successor of each token predicts the rest as often as the noise allows."""
  settings = dataclasses.replace(SETTINGS, batch_size=64, seq_len=64, noise=0.2)
  batch = next(settings.make_iterator())
  counts = np.zeros((32, 32))
  np.add.at(counts, (batch['ids'].ravel(), batch['labels'].ravel()), 1)
  accuracy = counts.max(axis=1).sum() / counts.sum()
  assert abs(accuracy - (0.8 + 0.2 / 32)) < 0.03
