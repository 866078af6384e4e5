"""PreferenceInput packs whole pairs, with weights on the answers and references at their first tokens."""

import dataclasses
import json

import numpy as np
import pytest

from spmd_tasks.inputs import ByteTokenizer, ChatTemplate
from spmd_tasks.tuning import JudgedAnswers, PreferenceInput, Preferences
from tests.inputs.batches import take

PAIRS = [{'prompt': 'p' * (i % 4), 'chosen': f'{i}c', 'rejected': f'{i}' + 'r' * (i % 3)} for i in range(23)]
EOS = ByteTokenizer().eos_id


@pytest.fixture
def pairs(tmp_path):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(''.join(json.dumps(pair) + '\n' for pair in PAIRS))
  np.save(tmp_path / 'reference.npy', np.arange(46, dtype=np.float32).reshape(23, 2) + 1)
  return PreferenceInput(
    source=Preferences(pattern=str(path)),
    tokenizer=ByteTokenizer(),
    batch_size=4,
    seq_len=40,
    reference=str(tmp_path / 'reference.npy'),
    num_epochs=1,
    shuffle=False,
  )


def answers(batches):
  """Yields (prompt, answer, reference) of each segment, the first two as text."""
  decode = ByteTokenizer().decode
  for batch in batches:
    for row in range(len(batch['ids'])):
      assert batch['segment_ids'][row].max() % 2 == 0  # whole pairs
      for segment in range(1, batch['segment_ids'][row].max() + 1):
        at = np.flatnonzero(batch['segment_ids'][row] == segment)
        answer = at[batch['weights'][row, at] > 0]
        references = batch['reference_log_probs'][row, at]
        assert references.nonzero()[0].tolist() == ([answer[0] - at[0]] if references.any() else [])
        assert batch['labels'][row, at[-1]] == EOS
        yield (
          decode(batch['ids'][row, at[: answer[0] - at[0] + 1]]),
          decode(batch['labels'][row, answer]),
          references.sum(),
        )


def test_one_epoch_has_every_pair_once_and_whole(pairs):
  batches, _ = take(pairs)
  expected = [
    (pair['prompt'], pair[name], 2 * i + 1 + (name == 'rejected'))
    for i, pair in enumerate(PAIRS)
    for name in ('chosen', 'rejected')
  ]
  assert list(answers(batches)) == expected
  assert batches[0]['segment_ids'].max() > 2  # packed
  alone, _ = take(dataclasses.replace(pairs, packing=False))
  assert max(batch['segment_ids'].max() for batch in alone) == 2
  assert list(answers(alone)) == expected


def test_numbered_pairs_have_the_indices_of_their_records(pairs):
  numbered = dataclasses.replace(pairs, seq_len=13, too_long='skip').numbered()
  batches, state = take(numbered)
  assert set(batches[0]) == set(numbered.element_spec()) >= {'record_index'}
  indices = np.unique(np.concatenate([batch['record_index'].ravel() for batch in batches]))
  lengths = [sum(len(pair['prompt']) + len(pair[name]) + 1 for name in ('chosen', 'rejected')) for pair in PAIRS]
  assert indices.tolist() == [0, *(i + 1 for i, length in enumerate(lengths) if length <= 13)]
  assert state['num_too_long'] == [[0, sum(length > 13 for length in lengths)]]


def test_conversations_with_and_without_a_prompt(pairs, tmp_path):
  template = ChatTemplate(
    template='{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}'
    '{% if add_generation_prompt %}<a>{% endif %}',
    writes_bos=True,
  )
  ask, yes, no = ({'role': r, 'content': c} for r, c in (('user', 'q'), ('assistant', 'yes'), ('assistant', 'no')))
  path = tmp_path / 'talks.jsonl'
  records = [
    {'prompt': [ask], 'chosen': [yes], 'rejected': [no]},
    {'chosen': [ask, yes], 'rejected': [ask, no]},
    {'prompt': [ask, no, ask], 'chosen': [yes], 'rejected': [no]},
  ]
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  settings = dataclasses.replace(pairs, source=Preferences(pattern=str(path)), template=template, seq_len=99)
  batch = take(settings.without_reference())[0][0]
  decode = ByteTokenizer().decode
  texts = []
  for segment in range(1, 7):
    at = batch['segment_ids'][0] == segment
    labels, weights = batch['labels'][0, at], batch['weights'][0, at]
    texts.append((decode([batch['ids'][0, at][0], *labels[weights == 0]]), decode(labels[weights > 0])))
  short, long = '<u>q;<a>', '<u>q;<a>no;<u>q;<a>'
  assert texts == [(prompt, answer) for prompt in (short, short, long) for answer in ('yes;', 'no;')]


def test_a_judged_answer_is_paired_with_the_answer_before_it(pairs, tmp_path):
  records = [{'prompt': 'p' * (i % 4), 'completion': f'{i}c', 'label': i % 3 > 0} for i in range(5)]
  (tmp_path / 'judged.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  judged = dataclasses.replace(pairs, source=JudgedAnswers(pattern=str(tmp_path / 'judged.jsonl')), packing=False)
  batches, _ = take(judged)
  assert list(answers(batches)) == [
    (record['prompt'], records[i - other]['completion'], 2 * i + 1 + other)
    for i, record in enumerate(records)
    for other in (0, 1)
  ]
  judgements = np.concatenate([batch['judgement'] for batch in batches])
  assert [row[row != 0].tolist() for row in judgements if row.any()] == [[2.0 * (i % 3 > 0) - 1] for i in range(5)]
  (tmp_path / 'judged.jsonl').write_text(json.dumps({'prompt': 'a', 'completion': 'b', 'label': 'good'}))
  with pytest.raises(ValueError, match=r"judged\.jsonl:1: .* label 'good': .* true or false"):
    take(judged)


def test_a_pair_longer_than_a_row(pairs):
  with pytest.raises(ValueError, match=r'pairs\.jsonl:\d+: the pair has \d+ tokens, .* seq_len = 12'):
    take(dataclasses.replace(pairs, seq_len=12))
  cut, state = take(dataclasses.replace(pairs, seq_len=8, too_long='truncate').without_reference())
  assert state['num_too_long'][0][0] > 0
  assert all((batch['segment_ids'].max(axis=1) % 2 == 0).all() for batch in cut)


def test_a_pair_whose_truncated_answers_are_equal_is_left_out(pairs, tmp_path):
  records = [{'prompt': 'a', 'chosen': 'bbbbc', 'rejected': 'bbbbd'}, {'prompt': 'a', 'chosen': 'c', 'rejected': 'd'}]
  (tmp_path / 'pairs.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  cut, state = take(dataclasses.replace(pairs, seq_len=8, too_long='truncate').without_reference())
  assert [answer for _, answer, _ in answers(cut)] == ['c', 'd']
  assert state['num_too_long'] == [[0, 1]]


TURN, ANSWER = {'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'c'}


@pytest.mark.parametrize(
  'record, message',
  [
    ({'chosen': 'a'}, "the pair has no 'rejected', only"),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}, "'chosen' and 'rejected' are equal: correct"),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': ''}, "'rejected' is empty: add"),
    ({'prompt': 'a', 'chosen': [{'role': 'user', 'content': 'b'}], 'rejected': 'c'}, 'must be all texts, or all lists'),
    (
      {'prompt': [{'role': 'user', 'content': 'a'}], 'chosen': [{'role': 'user', 'content': 'b'}], 'rejected': []},
      "'chosen' must end with a message of the assistant",
    ),
    (
      {'chosen': [TURN, {'role': 'assistant', 'content': 'b', 'weight': 0}], 'rejected': [TURN, ANSWER]},
      "a message of 'chosen' has the weight 0",
    ),
  ],
)
def test_invalid_pairs_are_refused(pairs, tmp_path, record, message):
  (tmp_path / 'pairs.jsonl').write_text(json.dumps(record))
  with pytest.raises(ValueError, match=message) as refused:
    take(pairs)
  assert '\n' not in str(refused.value)


def test_invalid_references_are_refused(pairs, tmp_path):
  with pytest.raises(ValueError, match='train first'):
    dataclasses.replace(pairs, reference=None).make_iterator()
  np.save(tmp_path / 'short.npy', np.ones((2, 2), np.float32))
  (tmp_path / 'broken.npy').write_bytes(b'x')
  np.save(tmp_path / 'wide.npy', np.ones((2, 3)))
  for name, message in (
    ('short', 'has no log-probabilities of record 2'),
    ('broken', 'cannot be read'),
    ('none', 'cannot be read'),
    ('wide', r'cannot be read \(it has float64\[2, 3\]'),
  ):
    with pytest.raises(ValueError, match=message):
      take(dataclasses.replace(pairs, reference=str(tmp_path / f'{name}.npy')))
