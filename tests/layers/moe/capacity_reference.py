"""Who gets a slot of an expert, as loops: tokens ask for slots one after the other."""

import jax.numpy as jnp
import numpy as np


def quotients(ratios):
  """Name -> numerator / denominator, which are sums over the tokens; 0 if there are none."""
  return {name: numerator / jnp.maximum(denominator, 1.0) for name, (numerator, denominator) in ratios.items()}


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
