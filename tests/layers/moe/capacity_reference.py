"""The capacity computation as loops over tokens and slots, in float64 numpy; gradients by central differences.

Written from the definition: tokens ask for slots one after the other, and what has no slot adds nothing.
"""

import jax.numpy as jnp
import numpy as np


def quotients(ratios):
  """Name -> numerator / denominator, which are sums over the tokens; 0 if there are none."""
  return {name: numerator / jnp.maximum(denominator, 1.0) for name, (numerator, denominator) in ratios.items()}


def silu(x):
  return x / (1 + np.exp(-x))


def expert_ffn(x, up, down, gate):
  """[D] for x [D] through one expert with activation silu; gate is None for a plain network."""
  return (silu(x @ up) if gate is None else silu(x @ gate) * (x @ up)) @ down


def places_by_loop(expert_ids, priorities, capacity, is_by_token=False):
  """[S, k] for one group's expert_ids [S, k], num_experts if not routed: the place in the expert's slots, or -1."""
  tokens, choices = range(len(expert_ids)), range(expert_ids.shape[1])
  if priorities is not None:
    tokens = sorted(tokens, key=lambda token: -priorities[token])
  order = [(token, choice) for choice in choices for token in tokens]
  places, num_used = np.full(expert_ids.shape, -1), {}
  for token, choice in sorted(order) if is_by_token else order:
    expert = expert_ids[token, choice]
    used = num_used.get(expert, 0)
    if used < capacity:
      places[token, choice] = used
      num_used[expert] = used + 1
  return places


def kept_choices(expert_ids, num_experts, scores, *, group_size, capacity, priority='position'):
  """Bool [B, T, k]: which choices have a slot."""
  shape = expert_ids.shape
  groups = expert_ids.reshape(-1, group_size, shape[2])
  grouped_scores = scores.reshape(-1, group_size, num_experts)
  kept = []
  for ids, group_scores in zip(groups, grouped_scores, strict=True):
    first = np.minimum(ids[:, 0], num_experts - 1)
    priorities = group_scores[np.arange(group_size), first] if priority == 'score' else None
    kept.append((places_by_loop(ids, priorities, capacity, priority == 'token') >= 0) & (ids < num_experts))
  return np.stack(kept).reshape(shape)


def capacity_result(x, gates, up, down, gate, *, expert_ids, kept):
  """[B, T, D] for x [B, T, D], gates [B, T, k] and the experts' weights."""
  result = np.zeros_like(x)
  for row, token in np.ndindex(*x.shape[:2]):
    chosen = [choice for choice in range(gates.shape[2]) if kept[row, token, choice]]
    for choice in chosen:
      expert = expert_ids[row, token, choice]
      y = expert_ffn(x[row, token], up[expert], down[expert], None if gate is None else gate[expert])
      result[row, token] += gates[row, token, choice] * y
  return result


def central_differences(function, arrays, step=1e-5):
  """The gradient of the scalar `function(*arrays)` in each of the float64 arrays; None stays None."""
  gradients = []
  for array in arrays:
    if array is None:
      gradients.append(None)
      continue
    gradient = np.zeros_like(array)
    for index in np.ndindex(*array.shape):
      value = array[index]
      array[index] = value + step
      above = function(*arrays)
      array[index] = value - step
      gradient[index] = (above - function(*arrays)) / (2 * step)
      array[index] = value
    gradients.append(gradient)
  return gradients
