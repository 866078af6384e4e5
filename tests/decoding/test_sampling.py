"""Samplers against numpy: which tokens stay, how often each is drawn, and that rows do not see one another."""

import functools

import jax
import numpy as np
import pytest

from spmd_tasks.decoding import SamplingParams
from spmd_tasks.decoding.sampling import (
  SamplingArrays,
  add_biases,
  adjust,
  keep_likeliest,
  position_keys,
  request_keys,
  sample,
)

# Of these probabilities, in no order.
PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = np.log(PROBABILITIES).astype(np.float32)

# settings, and the tokens that stay
CUTS = [
  ({}, {0, 1, 2, 3, 4}),
  ({'top_k': 2}, {1, 3}),
  ({'top_k': 9}, {0, 1, 2, 3, 4}),
  ({'top_p': 0.69}, {1, 3}),
  ({'top_p': 0.71}, {1, 3, 4}),
  ({'top_p': 0.0}, {1}),
  ({'min_p': 0.3}, {1, 3, 4}),
  ({'min_p': 1.0}, {1}),
  ({'top_k': 3, 'top_p': 0.8}, {1, 3}),  # of the three that stay, two have (0.4 + 0.3) / 0.85 > 0.8
  ({'top_k': 4, 'top_p': 0.95, 'min_p': 0.35}, {1, 3, 4}),
]


def _sampling(rows):
  """Parameters of the rows; the temperature is 1 where a row gives none."""
  return SamplingArrays.from_params([SamplingParams(**{'temperature': 1.0} | row) for row in rows], len(rows))


def _keys(num_rows, position=0):
  keys = request_keys(np.arange(num_rows, dtype=np.uint32), np.zeros(num_rows, np.uint32))
  return position_keys(keys, np.full(num_rows, position, np.int32))


def test_what_stays():
  kept = jax.jit(keep_likeliest)(np.tile(LOGITS, (len(CUTS), 1)), _sampling([settings for settings, _ in CUTS]))
  for (settings, expected), row in zip(CUTS, np.asarray(kept), strict=True):
    assert set(np.flatnonzero(np.isfinite(row))) == expected, settings
    np.testing.assert_array_equal(row[np.isfinite(row)], LOGITS[np.isfinite(row)])
  infinite = np.array([[1, np.inf, 2]], np.float32)  # of a tiny temperature
  assert keep_likeliest(infinite, _sampling([{'top_p': 0.9, 'min_p': 0.1}]))[0, 1] == np.inf


def test_what_stays_of_many_tokens(rng):
  """Against numpy in float64, with ties, zeros of both signs, and masked tokens."""
  settings = [
    {'top_k': k, 'top_p': p, 'min_p': m}
    for k in (0, 1, 5, 50, 1000)
    for p in (0.0, 0.3, 0.9, 1.0)
    for m in (0.0, 0.01, 1.0)
  ]
  params = [SamplingParams(temperature=1.0, **each) for each in settings]
  keep = jax.jit(keep_likeliest)
  for scale, rounded in ((0.1, True), (5, False), (30, True)):
    logits = (scale * rng.normal(size=(len(params), 300))).astype(np.float32)
    logits = np.round(logits) if rounded else logits
    logits[:, rng.integers(0, 300, 100)] = -np.inf
    kept = np.isfinite(keep(logits, SamplingArrays.from_params(params, len(params))))
    for row, each, found in zip(logits.astype(np.float64), params, kept, strict=True):
      ratios, finite = np.exp(row - row.max()), np.isfinite(row)
      stays = row >= np.sort(row)[::-1][(each.top_k or len(row)) - 1 if each.top_k <= len(row) else -1]
      before = np.array(
        [np.sum(ratios, where=stays & (row > value)) for value in row]
      )  # of all tokens that are likelier
      if each.top_p < 1:
        stays &= (before < each.top_p * np.sum(ratios, where=stays)) | (row == row.max())
      np.testing.assert_array_equal(found, stays & (ratios >= each.min_p) & finite, err_msg=str(each))


@functools.cache
def _draws():
  """For each of some settings, 4000 draws by different keys."""
  settings = [
    ({}, PROBABILITIES),
    ({'temperature': 0.5}, PROBABILITIES**2),
    ({'top_k': 3}, PROBABILITIES * [0, 1, 0, 1, 1]),
    ({'top_p': 0.5, 'temperature': 2.0}, np.sqrt(PROBABILITIES) * [0, 1, 0, 1, 0]),
    ({'min_p': 0.3}, PROBABILITIES * [0, 1, 0, 1, 1]),
  ]
  num_draws = 4000
  rows = [row for row, _ in settings for _ in range(num_draws)]
  logits = np.tile(LOGITS, (len(rows), 1))
  tokens = jax.jit(sample)(logits, _keys(len(rows)), _sampling(rows), np.ones(len(rows), bool))
  expected = [weights / weights.sum() for _, weights in settings]
  return np.asarray(tokens).reshape(len(settings), num_draws), expected


@pytest.mark.parametrize('case', range(5))
def test_frequencies(case):
  draws, expected = _draws()
  counts = np.bincount(draws[case], minlength=5) / draws.shape[1]
  # Four standard deviations of a frequency of 4000 draws.
  assert np.all(np.abs(counts - expected[case]) <= 4 * np.sqrt(expected[case] * (1 - expected[case]) / draws.shape[1]))


def test_a_row_has_the_same_token_whatever_the_others_need(rng):
  """One branch of four computes all rows: what the most demanding of them needs."""
  logits, keys = rng.normal(size=(4, 50)).astype(np.float32), np.asarray(_keys(4))
  rows = [{'temperature': 0.0}, {'temperature': 2.0}, {'temperature': 2.0, 'top_k': 3}, {'temperature': 1.0}]
  biases = ((), (), (), ((7, 100.0),))
  params = [SamplingParams(**row) for row in rows]
  arrays = SamplingArrays.from_params(params, 4, biases)
  draw = jax.jit(sample)
  together = np.asarray(draw(logits, keys, arrays, np.ones(4, bool)))
  for n in (1, 3):
    fewer = draw(logits[:n], keys[:n], SamplingArrays.from_params(params[:n], n, biases[:n]), np.ones(n, bool))
    np.testing.assert_array_equal(fewer, together[:n])
    active = np.arange(4) < n  # nobody reads what an inactive row gives
    np.testing.assert_array_equal(draw(logits, keys, arrays, active)[:n], together[:n])
  assert together[0] == logits[0].argmax()
  assert together[3] == 7


def test_penalties_and_biases(rng):
  """Against numpy in float64; and rows without them keep their bits beside others."""
  logits, counts = rng.normal(size=(6, 40)).astype(np.float32) * 5, rng.integers(0, 4, (6, 40)).astype(np.int32)
  seen = (counts > 0) | (rng.random((6, 40)) < 0.2)
  rows = [
    {},
    {'frequency_penalty': 0.7},
    {'presence_penalty': -1.5},
    {'repetition_penalty': 1.3, 'frequency_penalty': -2.0, 'presence_penalty': 2.0},
    {},
    {'presence_penalty': 0.25},
  ]
  biases = [(), (), ((3, 100.0),), (), ((0, -100.0), (39, 2.5)), tuple((token, token / 7) for token in range(40))]
  params = [SamplingParams(**row) for row in rows]
  expected = logits.astype(np.float64)
  for row, (each, pairs) in enumerate(zip(params, biases, strict=True)):
    factors = np.where(expected[row] > 0, 1 / each.repetition_penalty, each.repetition_penalty)
    expected[row] *= np.where(seen[row], factors, 1)
    expected[row] -= each.frequency_penalty * counts[row] + each.presence_penalty * (counts[row] > 0)
    for token, bias in pairs:
      expected[row, token] += bias
  sampling = SamplingArrays.from_params(params, 6, biases)
  found = np.asarray(add_biases(adjust(logits, seen, counts, sampling), sampling))
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
  np.testing.assert_array_equal(found[0], logits[0])
  for row in range(6):
    one = slice(row, row + 1)
    sampling = SamplingArrays.from_params(params[one], 1, biases[one])
    alone = add_biases(adjust(logits[one], seen[one], counts[one], sampling), sampling)
    np.testing.assert_array_equal(alone[0], found[row])
