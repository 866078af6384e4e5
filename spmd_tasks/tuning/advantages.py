"""Advantages from rewards, in float64 on the host.

`advantages_of` compares a completion with the other completions of its prompt; `generalized_advantages` compares each
token with the values of PPO.

Shapes: P prompts, G completions of each; R completions, T tokens. A reward is NaN if it failed: no mean includes it,
and its advantage is 0.
"""

import numpy as np

BASELINES = ('group', 'leave_one_out', 'gae', 'none')
SCALES = ('group', 'batch', 'none')
_EPSILON = 1e-4  # added to standard deviations, as in TRL


def advantages_of(rewards: np.ndarray, *, baseline: str, scale: str) -> np.ndarray:
  """Returns the advantages of rewards, float64 [P, G].

  Args:
    rewards: [P, G], NaN if a reward failed.
    baseline: what to subtract: the mean of the 'group' (GRPO), the mean of the group's other rewards
      ('leave_one_out', RLOO), or 'none'.
    scale: what to divide by: the standard deviation of the 'group' (GRPO) or of the whole 'batch' (REINFORCE++), or
      'none' (Dr. GRPO).
  """
  rewards = np.asarray(rewards, np.float64)
  is_known = ~np.isnan(rewards)
  known, count = np.where(is_known, rewards, 0.0), is_known.sum(1, keepdims=True)
  mean = known.sum(1, keepdims=True) / np.maximum(count, 1)
  if baseline == 'group':
    result = known - mean
  elif baseline == 'leave_one_out':
    result = (known - mean) * count / np.maximum(count - 1, 1)
  else:
    result = known
  if scale == 'group':
    squares = np.where(is_known, (known - mean) ** 2, 0.0).sum(1, keepdims=True)
    result = result / (np.sqrt(squares / np.maximum(count - 1, 1)) + _EPSILON)
  elif scale == 'batch' and is_known.sum() > 1:
    result = result / (np.std(rewards[is_known], ddof=1) + _EPSILON)
  return np.where(is_known, result, 0.0)


def overlong_penalties(num_tokens: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
  """Returns the penalty for the last `margin` tokens before `max_tokens`, from 0 to -1 (DAPO, equation 13)."""
  return -np.clip((np.asarray(num_tokens, np.float64) - (max_tokens - margin)) / margin, 0.0, 1.0)


def generalized_advantages(
  rewards: np.ndarray, values: np.ndarray, is_token: np.ndarray, *, gamma: float, lam: float, whitens: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns advantages and returns, float64 [R, T] (GAE: Schulman et al., 2016; as in TRL's PPO).

  Args:
    rewards: [R, T], the reward for each sampled token.
    values: [R, T], the reward that was expected before each token.
    is_token: bool [R, T], which tokens were sampled; other tokens, such as an environment's, are skipped and get 0.
    gamma, lam: the discounts of rewards, and of later differences from the values.
    whitens: whether to scale the advantages, but not the returns, to mean 0 and standard deviation 1.
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
    sampled = advantages[is_token]
    advantages = np.where(is_token, (advantages - sampled.mean()) / np.sqrt(sampled.var(ddof=1) + 1e-8), 0.0)
  return advantages, returns
