"""Advantages against each method's formula, by hand for each completion in float64."""

import numpy as np
import pytest

from spmd_tasks.tuning.advantages import advantages_of, overlong_penalties

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
def test_advantages_are_those_of_the_formula(baseline, scale):
  found = advantages_of(REWARDS, baseline=baseline, scale=scale)
  np.testing.assert_allclose(found, one_by_one(baseline, scale), rtol=1e-12, atol=1e-12)


def test_the_last_tokens_before_the_limit_cost_up_to_1():
  np.testing.assert_allclose(overlong_penalties(np.array([4, 6, 7, 8, 10]), 10, 4), [0, 0, -0.25, -0.5, -1])
