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


def expected(model, context, continuation):
  """(log-probabilities of the continuation, whether they are the likeliest), from the logits of the whole text."""
  logits = np.asarray(model.logits([[*context, *continuation]]), np.float64)[0, len(context) - 1 : -1]
  logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  rows = np.arange(len(continuation))
  return logprobs[rows, list(continuation)], (logits.argmax(axis=-1) == continuation).all()


def test_scores_are_those_of_the_logits(model):
  greedy = int(np.asarray(model.logits([[1, 7, 9]]))[0, -1].argmax())
  texts = [*TEXTS, ((1, 7, 9), (greedy,))]
  scores = dict(model.score(texts, num_rows=2))
  assert sorted(scores) == list(range(len(texts)))
  for number, (context, continuation) in enumerate(texts):
    logprobs, is_greedy = expected(model, context, continuation)
    np.testing.assert_allclose(scores[number].logprobs, logprobs, atol=2e-5)  # float32
    assert scores[number].is_greedy == is_greedy
    assert scores[number].logprob == pytest.approx(sum(logprobs), abs=1e-4)
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
