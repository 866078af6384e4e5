"""Scores of given texts: those of the whole model's logits, on any mesh, whatever else is in the batch."""

import numpy as np
import pytest

from spmd_tasks import UserError, load
from tests.model_folders import write_llama

TEXTS = [((1, 7, 9), (5, 6)), ((1,), (300,)), (tuple(range(2, 40)), (8,) * 20), ((1, 7, 9), (4,)), ((3, 4), (5,) * 30)]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = write_llama(tmp_path_factory.mktemp('llama'))
  return load(folder, mesh=(1, 2, 4), overrides=['task.decode.max_len=60', 'task.decode.min_bucket=32'])


@pytest.fixture(scope='module')
def log_probs(model):
  """float64 [N, T, V], of the token that follows each of TEXTS; what stands behind a text changes nothing before it."""
  rows = np.zeros((len(TEXTS), 60), np.int32)
  for row, (context, continuation) in zip(rows, TEXTS, strict=True):
    row[: len(context) + len(continuation)] = [*context, *continuation]
  logits = np.asarray(model.logits(rows), np.float64)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_scores_are_those_of_the_logits(model, log_probs):
  greedy = int(log_probs[0, len(TEXTS[0][0]) - 1].argmax())
  texts = [*TEXTS, (TEXTS[0][0], (greedy,))]
  scores = dict(model.score(texts, num_rows=2))
  assert sorted(scores) == list(range(len(texts)))
  for number, (context, continuation) in enumerate(texts):
    first = len(context) - 1
    rows = log_probs[0 if number == len(TEXTS) else number][first : first + len(continuation)]
    expected = rows[np.arange(len(continuation)), list(continuation)]
    np.testing.assert_allclose(scores[number].logprobs, expected, atol=2e-5)  # float32
    assert scores[number].is_greedy == (rows.argmax(axis=-1) == continuation).all()
    assert scores[number].logprob == pytest.approx(sum(expected), abs=1e-4)
  assert scores[5].is_greedy
  assert [(score.logprob, score.is_greedy) for _, score in model.score([((1, 7), ())])] == [(0, True)]


@pytest.mark.parametrize(
  'text, sentence',
  [
    (((), (1,)), 'text 1 to score needs a context of at least one token'),
    (((1,) * 60, (1, 2)), 'has 61 tokens before its last one, more than max_len 60'),
    (((1,), (440,)), r'has tokens from 1 to 440, outside the vocabulary of 440'),
  ],
)
def test_texts_that_cannot_be_scored(model, text, sentence):
  with pytest.raises(UserError, match=sentence):
    list(model.score([text]))
