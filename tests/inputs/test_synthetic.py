"""SyntheticText depends only on seed, batch and row, and resumes on any number of shards."""

import dataclasses

import numpy as np
import pytest

from spmd_tasks.inputs import SyntheticPairs, SyntheticText
from tests.inputs.batches import assert_same, concatenate_shards, take

SETTINGS = SyntheticText(batch_size=6, seq_len=10, vocab_size=32, seed=3, noise=0.2)


@pytest.mark.parametrize('encoder_len', [8, None])
def test_pairs_are_a_text_and_its_beginning(encoder_len):
  """In an encoder's row and a decoder's row, or in one row whose prefix is the text."""
  pairs = SyntheticPairs(batch_size=6, seq_len=13, vocab_size=32, encoder_len=encoder_len)
  whole, _ = take(pairs, 2)
  for batch in whole:
    for i, labels in enumerate(batch['labels']):
      tokens = labels[labels > 0].tolist()
      size = len(tokens) if encoder_len else 1 + 2 * int(batch['prefix_mask'][i].sum() - 1)
      text = batch['encoder_ids'][i] if encoder_len else batch['ids'][i, 1 : (size + 1) // 2]
      text = text[text > 0].tolist()
      targets = tokens if encoder_len else tokens[len(text) :]
      assert targets == [*text[: len(targets) - 1], 1]
      assert min(text) >= 2
      assert labels[batch['weights'][i] > 0].tolist() == targets
      assert batch['ids'][i, : len(tokens)].tolist() == [0, *tokens[:-1]]
  assert_same(whole, concatenate_shards([take(pairs, 2, shard=(i, 2))[0] for i in range(2)]))
  assert_same(take(pairs, 1, take(pairs, 1)[1])[0], whole[1:])


@pytest.mark.parametrize('shard_count', [2, 3, 6])
def test_shards_together_are_the_global_batch(shard_count):
  shards = [take(SETTINGS, 3, shard=(i, shard_count))[0] for i in range(shard_count)]
  assert_same(take(SETTINGS, 3)[0], concatenate_shards(shards))


@pytest.mark.parametrize('old_count, new_count', [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_resumes_exactly_on_any_number_of_shards(old_count, new_count):
  old = [take(SETTINGS, 4, shard=(i, old_count))[1] for i in range(old_count)]
  for index, state in enumerate(SETTINGS.reshard_states(old, new_count)):
    shard = (index, new_count)
    assert_same(take(SETTINGS, 2, state, shard)[0], take(SETTINGS, 6, shard=shard)[0][4:])


@pytest.mark.parametrize('change', [{'seed': 4}, {'seq_len': 11}, {'batch_size': 12}, {'noise': 0.3}])
def test_states_of_other_settings_are_refused(change):
  state = SETTINGS.make_iterator().get_state()
  with pytest.raises(ValueError, match=next(iter(change))):
    dataclasses.replace(SETTINGS, **change).make_iterator().set_state(state)


def test_the_rule_can_be_learned():
  """The most frequent successor of each token predicts the rest as often as the noise allows."""
  settings = dataclasses.replace(SETTINGS, batch_size=64, seq_len=64, noise=0.2)
  batch = next(settings.make_iterator())
  counts = np.zeros((32, 32))
  np.add.at(counts, (batch['ids'].ravel(), batch['labels'].ravel()), 1)
  accuracy = counts.max(axis=1).sum() / counts.sum()
  assert abs(accuracy - (0.8 + 0.2 / 32)) < 0.03
