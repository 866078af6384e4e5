"""Advantages agree with each method's formula, computed for one completion at a time in float64."""

from types import SimpleNamespace

import numpy as np
import pytest

from spmd_tasks.tuning.advantages import advantages_of, generalized_advantages, overlong_penalties
from spmd_tasks.tuning.rollout_rewards import with_advantages

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [2.0, -1.0, np.nan, 0.0], [np.nan] * 4])


def one_by_one(baseline, scale):
  result = np.zeros_like(REWARDS)
  known = REWARDS[~np.isnan(REWARDS)]
  for p, group in enumerate(REWARDS):
    values = [value for value in group if not np.isnan(value)]
    for i, reward in enumerate(group):
      if np.isnan(reward):
        continue
      others = [value for j, value in enumerate(group) if j != i and not np.isnan(value)]
      advantage = reward - {'group': np.mean(values), 'leave_one_out': np.mean(others), 'none': 0.0}[baseline]
      if scale == 'group':
        advantage /= np.std(values, ddof=1) + 1e-4
      elif scale == 'batch':
        advantage /= np.std(known, ddof=1) + 1e-4
      result[p, i] = advantage
  return result


@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
@pytest.mark.parametrize('baseline', ['group', 'leave_one_out', 'none'])
def test_advantages_agree_with_the_formula(baseline, scale):
  advantages = advantages_of(REWARDS, baseline=baseline, scale=scale)
  np.testing.assert_allclose(advantages, one_by_one(baseline, scale), rtol=1e-12, atol=1e-12)


def test_the_last_tokens_before_the_limit_cost_up_to_1():
  np.testing.assert_allclose(overlong_penalties(np.array([4, 6, 7, 8, 10]), 10, 4), [0, 0, -0.25, -0.5, -1])


@pytest.mark.parametrize('whitens', [False, True])
def test_advantages_of_tokens_are_discounted_sums_of_differences_from_the_values(whitens):
  rng, gamma, lam = np.random.default_rng(3), 0.9, 0.8
  rewards, values = rng.normal(size=(2, 5, 7))
  is_token = rng.random((5, 7)) < 0.6  # an environment's tokens are between the sampled tokens
  advantages, returns = generalized_advantages(rewards, values, is_token, gamma=gamma, lam=lam, whitens=whitens)
  expected = np.zeros((5, 7))
  for row, is_sampled in enumerate(is_token):
    (tokens,) = np.nonzero(is_sampled)
    after = [*values[row, tokens[1:]], 0.0]
    deltas = [rewards[row, t] + gamma * v - values[row, t] for t, v in zip(tokens, after, strict=True)]
    for i, t in enumerate(tokens):
      expected[row, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(tokens)))
  np.testing.assert_allclose(returns, np.where(is_token, expected + values, 0.0), rtol=1e-12, atol=1e-12)
  if whitens:
    mean = expected[is_token].mean()
    expected = np.where(is_token, (expected - mean) / np.sqrt(expected[is_token].var(ddof=1) + 1e-8), 0.0)
  np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)


def test_the_divergence_from_a_reference_is_subtracted_from_the_reward_of_its_token_or_completion():
  rng, rows = np.random.default_rng(5), 5  # the last one has no completion
  is_sampled = np.zeros((rows, 6), bool)
  for row in range(4):
    is_sampled[row, 1 : 3 + row] = True
  old, reference, values = np.where(is_sampled, rng.normal(size=(3, rows, 6)), 0.0).astype(np.float32)
  rollout = {'weights': is_sampled, 'old_log_probs': old, 'reference_log_probs': reference, 'old_values': values}
  grid, kl = np.array([[1.0, 2.0], [0.0, -1.0]]), old.astype(float) - reference
  settings = SimpleNamespace(reward_kl_weight=0.3, baseline='none', scale='none', gamma=1.0, lam=1.0)
  expected = [*(grid.reshape(-1) - 0.3 * kl[:4].sum(axis=1)), 0.0]
  np.testing.assert_allclose(with_advantages(settings, rollout, grid)['advantages'], expected, rtol=1e-6)
  settings.baseline = 'gae'
  rollout = with_advantages(settings, rollout, grid)
  for row in range(4):  # if both discounts are 1, a return is the sum of the rewards from its token on
    (tokens,) = np.nonzero(is_sampled[row])
    expected = [grid.reshape(-1)[row] - 0.3 * kl[row, tokens[i:]].sum() for i in range(len(tokens))]
    np.testing.assert_allclose(rollout['returns'][row, tokens], expected, rtol=1e-6)
  np.testing.assert_allclose(rollout['advantages'], rollout['returns'] - np.where(is_sampled, values, 0.0), atol=1e-6)
