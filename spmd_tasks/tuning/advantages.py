"""Advantages from rewards, in float64 on the host: how much better a completion is than its prompt's others
(advantages_of), or each of its tokens than the values of PPO say (generalized_advantages).

Shapes: P prompts, G completions of each; R completions, T tokens. A reward that is NaN is of a completion without one:
it counts in no mean, and its advantage is 0.
"""

import numpy as np

BASELINES = ('group', 'leave_one_out', 'gae', 'none')
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


def generalized_advantages(
  rewards: np.ndarray, values: np.ndarray, is_token: np.ndarray, *, gamma: float, lam: float, whitens: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns advantages and returns, float64 [R, T], 0 at other tokens (GAE: Schulman et al., 2016; as TRL's PPO).

  Args:
    rewards, values: of each token that was sampled, and what was expected before it; [R, T].
    is_token: bool [R, T], which tokens were sampled; others, such as an environment's, are passed over.
    gamma, lam: the discounts of rewards, and of the later differences from the values.
    whitens: whether the advantages get a mean of 0 and a standard deviation of 1; the returns do not.
  """
  values = np.asarray(values, np.float64)
  advantages, running, following = np.zeros(values.shape), np.zeros(len(values)), np.zeros(len(values))
  for t in reversed(range(values.shape[1])):
    difference = rewards[:, t] + gamma * following - values[:, t]
    running = np.where(is_token[:, t], difference + gamma * lam * running, running)
    following = np.where(is_token[:, t], values[:, t], following)
    advantages[:, t] = running
  advantages = np.where(is_token, advantages, 0.0)
  returns = np.where(is_token, advantages + values, 0.0)
  if whitens and is_token.sum() > 1:
    known = advantages[is_token]
    advantages = np.where(is_token, (advantages - known.mean()) / np.sqrt(known.var(ddof=1) + 1e-8), 0.0)
  return advantages, returns
