"""ScoredInput packs whole texts, with the weights that pool their tokens, and targets."""

import functools
import json

import numpy as np
import pytest

from experiments.finetune import FullClassifier, FullReward
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ByteTokenizer, T5ByteTokenizer
from spmd_tasks.programs.preview import examples_of
from spmd_tasks.tuning import LabeledTexts, RewardPairs, ScoredInput, SimilarTexts
from tests.inputs.batches import take

EOS, BOS = ByteTokenizer().eos_id, ByteTokenizer().bos_id


def batch_of(path, source, records, **settings):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  fields = {'tokenizer': ByteTokenizer(), 'batch_size': 1, 'seq_len': 40, 'num_epochs': 1, 'shuffle': False}
  return take(ScoredInput(source=source(pattern=str(path)), **fields | settings))[0][0]


CASES = [
  (
    RewardPairs,
    [{'prompt': 'a', 'chosen': 'b', 'rejected': 'cd', 'margin': 2}, {'chosen': 'e', 'rejected': 'f'}],
    [('ab', 2), ('acd', 0), ('e', 0), ('f', 0)],
  ),
  (LabeledTexts, [{'text': 'ab', 'label': 3}, {'text': 'c', 'label': -0.5}], [('ab', 3), ('c', -0.5)]),
  (SimilarTexts, [{'anchor': 'a', 'positive': 'a'}, {'anchor': 'bc', 'positive': 'd'}],
   [('a', 0), ('a', 0), ('bc', 0), ('d', 0)]),
]  # fmt: skip


@pytest.mark.parametrize('pooling', ['last', 'mean'])
@pytest.mark.parametrize('source, records, expected', CASES, ids=[case[0].__name__ for case in CASES])
def test_each_text_is_a_segment_with_the_weights_of_its_tokens(tmp_path, source, records, expected, pooling):
  batch = batch_of(tmp_path / 'records.jsonl', source, records, pooling=pooling)
  assert batch['segment_ids'].max() == len(expected)
  for segment, (text, target) in enumerate(expected, 1):
    at = batch['segment_ids'][0] == segment
    ids, weights = batch['ids'][0, at], batch['weights'][0, at]
    assert ids.tolist() == [BOS, *ByteTokenizer().encode(text), EOS][-ids.size :]
    assert ids[-1] == EOS
    np.testing.assert_allclose(weights, [0] * (ids.size - 1) + [1] if pooling == 'last' else 1 / ids.size)
    assert batch['targets'][0, at].sum() == batch['targets'][0, at][-1] == target


def test_a_preview_shows_a_text_once(tmp_path):
  tokenizer = T5ByteTokenizer()  # without a bos, whose repetition would not be visible
  batch = batch_of(tmp_path / 'records.jsonl', LabeledTexts, [{'text': 'ab', 'label': 3}], tokenizer=tokenizer)
  ((_, pieces),) = examples_of(None, batch, tokenizer)
  assert ''.join(text for text, _ in pieces) == 'ab'


@pytest.mark.parametrize(
  'source, record, message',
  [
    (LabeledTexts, {'text': 'a', 'label': 'good'}, r"records\.jsonl:1: 'label' must be a number .*, not 'good'"),
    (LabeledTexts, {'text': 'a', 'label': float('nan')}, "'label' must be a number .*, not nan"),
    (LabeledTexts, {'title': 'a', 'label': 1}, "the record has no text 'text'"),
    (SimilarTexts, {'anchor': 'a', 'positive': ''}, "the record has no text 'positive'"),
    (RewardPairs, {'prompt': 'a', 'chosen': 'b'}, "the pair has no 'rejected'"),
    (LabeledTexts, {'text': 'a' * 50, 'label': 1}, r'has \d+ tokens, more than seq_len = 40'),
  ],
)
def test_invalid_records_are_refused(tmp_path, source, record, message):
  with pytest.raises(UserError, match=message):
    batch_of(tmp_path / 'records.jsonl', source, [record])


@pytest.mark.parametrize('label', [2, -1, 0.5])
def test_a_label_outside_the_classes_is_refused(tmp_path, label):
  source = functools.partial(LabeledTexts, num_classes=2)
  with pytest.raises(UserError, match=f"'label' is {label}: with num_labels = 2 it must be from 0 to 1"):
    batch_of(tmp_path / 'records.jsonl', source, [{'text': 'a', 'label': 1}, {'text': 'b', 'label': label}])


@pytest.mark.parametrize(
  'recipe, changes, message',
  [
    (
      FullReward,
      {'score_loss': 'contrastive', 'packing': False},
      "num_labels = 1 must be 0 for score_loss = 'contrastive'",
    ),
    (
      FullReward,
      {'score_loss': 'classification'},
      "num_labels = 1 must be 2 or more for score_loss = 'classification'",
    ),
    (FullClassifier, {'score_loss': 'regression'}, "num_labels = 2 must be 1 for score_loss = 'regression'"),
    (FullReward, {'pooling': 'mean'}, "pooling = 'mean' is for score_loss = 'contrastive'"),
  ],
)
def test_inconsistent_settings_are_refused(recipe, changes, message):
  with pytest.raises(UserError, match=message):
    recipe(**changes).loss()
