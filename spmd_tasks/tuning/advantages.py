"""advantages_of: how much better each completion is than its prompt's others, from rewards; float64 on the host.

Shapes: P prompts, G completions of each. A reward that is NaN is of a completion without one: it counts in no mean, and
its advantage is 0.
"""

import numpy as np

BASELINES = ('group', 'leave_one_out', 'none')
SCALES = ('group', 'batch', 'none')
_EPSILON = 1e-4  # of a standard deviation, as in TRL


def advantages_of(rewards: np.ndarray, *, baseline: str, scale: str) -> np.ndarray:
  """Returns advantages, float64 [P, G], of rewards [P, G].

  Args:
    rewards: NaN where there is none.
    baseline: what is subtracted: the mean of the 'group' (GRPO), the mean of the group's other rewards
      ('leave_one_out': RLOO), or 'none'.
    scale: what the result is divided by: the standard deviation of the 'group' (GRPO), of the whole 'batch'
      (REINFORCE++), or 'none' (Dr. GRPO).
  """
  rewards = np.asarray(rewards, np.float64)
  is_known = ~np.isnan(rewards)
  given, count = np.where(is_known, rewards, 0.0), is_known.sum(1, keepdims=True)
  mean = given.sum(1, keepdims=True) / np.maximum(count, 1)
  if baseline == 'group':
    result = given - mean
  elif baseline == 'leave_one_out':
    result = (given - mean) * count / np.maximum(count - 1, 1)
  else:
    result = given
  if scale == 'group':
    squares = np.where(is_known, (given - mean) ** 2, 0.0).sum(1, keepdims=True)
    result = result / (np.sqrt(squares / np.maximum(count - 1, 1)) + _EPSILON)
  elif scale == 'batch' and is_known.sum() > 1:
    result = result / (np.std(rewards[is_known], ddof=1) + _EPSILON)
  return np.where(is_known, result, 0.0)


def overlong_penalties(num_tokens: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
  """Returns what the last `margin` tokens before `max_tokens` cost, from 0 to -1 (DAPO, equation 13)."""
  return -np.clip((np.asarray(num_tokens, np.float64) - (max_tokens - margin)) / margin, 0.0, 1.0)
