"""Beam search against a search of all texts, in float64."""

import functools

import history_model
import jax
import numpy as np
import pytest

from spmd_tasks.decoding.beam import beam_search

MAX_TOKENS = 3
STOP = (4, 2)  # for one prompt; the other has one stop token
PROMPTS = ([1, 3, 0], [2])


def all_texts(weights, prompt, stop_ids, max_tokens, length_penalty):
  """(score, log-probability, tokens) of every text, best first."""
  found = []

  def extend(tokens, logprob):
    if tokens and (tokens[-1] in stop_ids or len(tokens) == max_tokens):
      found.append((logprob / ((5 + len(tokens)) / 6) ** length_penalty, logprob, tokens))
      return
    following = history_model.logprobs(weights, prompt + tokens)
    for token in range(history_model.VOCAB):
      extend([*tokens, token], logprob + following[token])

  extend([], 0.0)
  return sorted(found, reverse=True)


def t5x_texts(weights, prompt, stop_ids, max_tokens, length_penalty, num_beams):
  """The same of a beam search as T5X has it."""
  live, ended = [(0.0, [])], []
  for length in range(1, max_tokens + 1):
    following = [(total, tokens, history_model.logprobs(weights, prompt + tokens)) for total, tokens in live]
    longer = [(total + new[t], [*tokens, t]) for total, tokens, new in following for t in range(history_model.VOCAB)]
    longer.sort(reverse=True)
    penalty = ((5 + len(prompt) - 1 + length) / 6) ** length_penalty
    ended += [(total / penalty, total, text) for total, text in longer[: 2 * num_beams] if text[-1] in stop_ids]
    ended = sorted(ended, reverse=True)[:num_beams]
    live = [(total, text) for total, text in longer if text[-1] not in stop_ids][:num_beams]
  return ended or [(total, total, text) for total, text in live]


@functools.cache
def _search(num_beams, length_penalty, rule='exact'):
  cache = history_model.empty_cache(len(PROMPTS) * num_beams, 3 + MAX_TOKENS)

  def search(weights, *arrays):
    return beam_search(
      history_model.forward,
      weights,
      cache,
      *arrays,
      num_beams=num_beams,
      max_new_tokens=MAX_TOKENS,
      length_penalty=length_penalty,
      rule=rule,
    )

  return jax.jit(search)


def _run(rng, num_beams, length_penalty, max_tokens=(MAX_TOKENS, MAX_TOKENS - 1), rule='exact'):
  weights = history_model.make_weights(rng)
  ids = np.zeros((2, 3), np.int32)
  for row, prompt in zip(ids, PROMPTS, strict=True):
    row[: len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
  stop_ids = np.array([[STOP[0], -1], STOP], np.int32)
  found = _search(num_beams, length_penalty, rule)(weights, ids, lengths, np.array(max_tokens, np.int32), stop_ids)
  texts = all_texts if rule == 'exact' else functools.partial(t5x_texts, num_beams=num_beams)
  expected = [
    texts(weights, prompt, stop, limit, length_penalty)
    for prompt, stop, limit in zip(PROMPTS, ((STOP[0],), STOP), max_tokens, strict=True)
  ]
  return jax.device_get(found), expected


@pytest.mark.parametrize('length_penalty', [0.0, 1.0])
def test_wide_beams_find_the_best_texts(rng, length_penalty):
  num_beams = 16  # as many as texts of two tokens without a stop: nothing is ever cut
  found, expected = _run(rng, num_beams, length_penalty)
  for row, texts in enumerate(expected):
    for beam, (score, logprob, tokens) in enumerate(texts[:num_beams]):
      length = found.lengths[row, beam]
      assert found.tokens[row, beam, :length].tolist() == tokens
      np.testing.assert_allclose(found.scores[row, beam], score, rtol=1e-5)
      np.testing.assert_allclose(found.logprobs[row, beam], logprob, rtol=1e-5)


@pytest.mark.parametrize('seed', [0, 4, 6])
def test_the_rule_of_t5x_ends_texts_among_the_best_only(seed):
  """With seed 6 a prompt has fewer ended texts than beams, and with 4 none, which leaves the live ones."""
  found, expected = _run(np.random.default_rng(seed), 2, 0.6, rule='t5x')
  for row, texts in enumerate(expected):
    kept = [found.tokens[row, beam, :length].tolist() for beam, length in enumerate(found.lengths[row]) if length]
    assert kept == [tokens for _, _, tokens in texts]
    np.testing.assert_allclose(found.scores[row, : len(kept)], [score for score, _, _ in texts], rtol=1e-5)
