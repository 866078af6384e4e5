"""PolicyLoss against the formulas of TRL's GRPO and RLOO trainers, written in torch float64, on the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.tuning import PolicyLoss
from spmd_tasks.tuning.reward_tuning import METHODS

B, T, V = 6, 9, 7
MAX_TOKENS = 5


def rollouts():
  """Rows of prompts with completions of 1 to 5 tokens, the last row without any; and logits [B, T, V]."""
  rng = np.random.default_rng(5)
  batch = {'labels': rng.integers(0, V, (B, T)).astype(np.int32), 'weights': np.zeros((B, T), np.float32)}
  for row in range(B - 1):
    batch['weights'][row, 2 : 3 + row] = 1
  batch['advantages'] = np.array([1.3, -0.7, 0.0, -1.9, 0.8, 0.0], np.float32)
  for name in ('old_log_probs', 'sampler_log_probs', 'reference_log_probs'):
    batch[name] = np.zeros((B, T), np.float32)
  logits = (2 * rng.normal(size=(B, T, V))).astype(np.float32)
  log_probs = np.take_along_axis(jax.nn.log_softmax(logits), batch['labels'][..., None], -1)[..., 0]
  batch['old_log_probs'] = (log_probs + rng.normal(0, 0.3, (B, T))).astype(np.float32) * batch['weights']
  batch['sampler_log_probs'] = (batch['old_log_probs'] + rng.normal(0, 0.1, (B, T))).astype(np.float32)
  batch['reference_log_probs'] = (log_probs + rng.normal(0, 0.5, (B, T))).astype(np.float32)
  return batch, logits


def by_torch(batch, logits, *, ratio, aggregation, clip_low, clip_high, kl_weight=0.0, sampler_cap=None, **_):
  """TRL's loss, and its gradient by the logits."""
  import torch

  logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
  mask, labels = torch.tensor(batch['weights']).double(), torch.tensor(batch['labels'], dtype=torch.int64)
  old, sampler, reference = (
    torch.tensor(batch[f'{name}_log_probs']).double() for name in ('old', 'sampler', 'reference')
  )
  advantages = torch.tensor(batch['advantages']).double()
  per_token = torch.gather(logits.log_softmax(-1), 2, labels[..., None])[..., 0]
  rows = mask.sum(1) > 0
  log_ratio = per_token - old
  if ratio == 'sequence_sum':  # RLOO: a completion is one action
    ratios = ((per_token * mask).sum(1) - (old * mask).sum(1)).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.min(ratios * advantages, clipped * advantages)[:, None].expand_as(mask)
  else:
    weights = log_ratio
    if ratio == 'sequence':
      weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    first, second = weights.exp(), weights.exp().clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.min(first * advantages[:, None], second * advantages[:, None]).expand_as(mask)
  if sampler_cap is not None:
    losses = losses * (old - sampler).exp().clamp(max=sampler_cap)
  difference = reference - per_token
  losses = losses + kl_weight * (difference.exp() - difference - 1)
  if aggregation == 'sequences':
    loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[rows].mean()
  elif aggregation == 'tokens':
    loss = (losses * mask).sum() / mask.sum()
  else:
    loss = (losses * mask)[rows].sum() / (rows.sum() * MAX_TOKENS)
  loss.backward()
  return loss.item(), logits.grad.numpy()


def settings_of(method, **more):
  fields = dataclasses.asdict(METHODS[method])
  names = ('ratio', 'aggregation', 'clip_low', 'clip_high')
  chosen = {name: fields[name] for name in names} | more
  return chosen | ({'max_tokens': MAX_TOKENS} if chosen['aggregation'] == 'max_tokens' else {})


@pytest.mark.parametrize('more', [{}, {'kl_weight': 0.2, 'sampler_cap': 1.05}], ids=['plain', 'kl and cap'])
@pytest.mark.parametrize('method', METHODS)
def test_loss_and_gradient_are_those_of_trl(method, more):
  batch, logits = rollouts()
  settings = settings_of(method, **more)
  loss = PolicyLoss(**settings)
  value, gradient = jax.value_and_grad(lambda logits: loss({'logits': logits}, batch).loss)(jnp.asarray(logits))
  wanted, wanted_gradient = by_torch(batch, logits, **settings)
  np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('method', METHODS)
def test_microbatches_add_up_by_their_weights(method):
  batch, logits = rollouts()
  loss = PolicyLoss(**settings_of(method, kl_weight=0.1))
  whole = loss({'logits': logits}, batch)
  parts = [
    loss({'logits': logits[rows]}, {name: each[rows] for name, each in batch.items()})
    for rows in (slice(0, 2), slice(2, 6))
  ]
  total = sum(part.loss * part.weight for part in parts) / sum(part.weight for part in parts)
  np.testing.assert_allclose(total, whole.loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sum(part.weight for part in parts), whole.weight)


def test_without_old_log_probs_the_ratio_is_1_and_the_mismatch_is_that_of_the_sampler():
  batch, logits = rollouts()
  own = np.take_along_axis(jax.nn.log_softmax(logits), batch['labels'][..., None], -1)[..., 0]
  batch['sampler_log_probs'] = np.where(batch['weights'] > 0, own, 0.0).astype(np.float32)
  batch['sampler_log_probs'][1, 3] += 0.25
  del batch['old_log_probs']
  output = PolicyLoss()({'logits': logits}, batch)
  assert float(output.metrics['clip_fraction'][0]) == 0
  np.testing.assert_allclose(output.metrics['sampler_mismatch'][0], 0.25 / batch['weights'].sum(), atol=1e-6)
  # The loss is minus the mean advantage of the completions, whatever the probabilities.
  np.testing.assert_allclose(output.loss, -np.mean(batch['advantages'][:5]), atol=1e-6)
