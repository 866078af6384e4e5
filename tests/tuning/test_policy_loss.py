"""PolicyLoss against TRL's own GRPOTrainer and RLOOTrainer in float64, on the same logits (scripts/run_trl.py)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.tuning import PolicyLoss
from spmd_tasks.tuning.reward_tuning import METHODS
from spmd_tasks.tuning.rollout_packing import pack

TRL = np.load(Path(__file__).parents[1] / 'data' / 'trl.npz')
MAX_TOKENS = 5
KINDS_OF_LOSS = [name for name in METHODS if name not in ('ppo', 'reinforce++')]  # whose losses are as dapo's
KINDS = {'plain': {}, 'kl': {'kl_weight': 0.2, 'sampler_cap': 1.05}, 'warm': {'temperature': 0.7}}


def rollouts():
  """Rows of prompts with completions of 1 to 5 tokens, the last row without any; and logits [B, T, V]."""
  batch = {name: TRL[name] for name in TRL.files if '/' not in name}
  return batch, batch.pop('logits')


def settings_of(method, **more):
  fields = dataclasses.asdict(METHODS[method])
  names = ('ratio', 'aggregation', 'clip_low', 'clip_high')
  chosen = {name: fields[name] for name in names} | more
  return chosen | ({'max_tokens': MAX_TOKENS} if chosen['aggregation'] == 'max_tokens' else {})


@pytest.mark.parametrize('name', [each.removesuffix('/loss') for each in TRL.files if each.endswith('/loss')])
def test_loss_and_gradient_are_those_of_trl(name):
  batch, logits = rollouts()
  method, kind = name.split('/')
  loss = PolicyLoss(**settings_of(method, **KINDS[kind]))
  value, gradient = jax.value_and_grad(lambda logits: loss({'logits': logits}, batch).loss)(jnp.asarray(logits))
  np.testing.assert_allclose(value, TRL[f'{name}/loss'], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, TRL[f'{name}/gradient'], rtol=1e-5, atol=1e-7)


def test_loss_and_gradients_with_values_are_those_of_ppo():
  """The formulas of TRL's PPOTrainer (trl/experimental/ppo), by torch in float64."""
  import torch

  batch, logits = rollouts()
  rng, shape = np.random.default_rng(7), batch['weights'].shape
  values, old_values, returns, advantages = rng.normal(size=(4, *shape)).astype(np.float32)
  batch |= {'advantages': advantages, 'old_values': old_values, 'returns': returns}
  mask = batch['weights'] > 0

  def masked_mean(x):
    return x[torch.tensor(mask)].mean()

  given = {name: torch.tensor(each).double() for name, each in batch.items() if name != 'labels'}
  ours = [torch.tensor(each).double().requires_grad_() for each in (logits, values)]
  log_probs = ours[0].log_softmax(-1).gather(-1, torch.tensor(batch['labels']).long()[..., None])[..., 0]
  near = torch.clamp(ours[1], given['old_values'] - 0.2, given['old_values'] + 0.2)
  errors = torch.max((ours[1] - given['returns']) ** 2, (near - given['returns']) ** 2)
  ratio = torch.exp(log_probs - given['old_log_probs'])
  clipped = -given['advantages'] * torch.clamp(ratio, 0.8, 1.2)
  expected = masked_mean(torch.max(-given['advantages'] * ratio, clipped)) + 0.1 * 0.5 * masked_mean(errors)
  expected.backward()

  loss = PolicyLoss(**settings_of('ppo', value_weight=0.1))
  found, gradients = jax.value_and_grad(lambda p: loss(p, batch).loss)({'logits': logits, 'values': values})
  np.testing.assert_allclose(found, expected.item(), rtol=1e-5, atol=1e-6)
  for name, each in zip(('logits', 'values'), ours, strict=True):
    np.testing.assert_allclose(gradients[name], each.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('method', KINDS_OF_LOSS)
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


@pytest.mark.parametrize('method', KINDS_OF_LOSS)
def test_texts_that_share_rows_have_the_loss_and_the_gradient_that_they_have_alone(method):
  batch, logits = rollouts()
  rng, lengths = np.random.default_rng(3), 1 + np.argmax(np.cumsum(batch['weights'], axis=1), axis=1)
  lengths[~batch['weights'].any(axis=1)] = 0
  batch['segment_ids'] = (np.arange(batch['weights'].shape[1]) < lengths[:, None]).astype(np.int32)
  batch['ids'] = rng.integers(1, 9, batch['segment_ids'].shape, np.int32) * batch['segment_ids']
  twice = {name: np.concatenate([each, each]) for name, each in (batch | {'logits': logits}).items()}
  wide = {name: np.pad(x, ((0, 0), (0, 20), (0, 0))[: x.ndim]) if x.ndim > 1 else x for name, x in twice.items()}
  loss = PolicyLoss(**settings_of(method, kl_weight=0.1))

  def of(given):
    return jax.value_and_grad(lambda logits: loss({'logits': logits}, given).loss)(jnp.asarray(given['logits']))

  packed = pack(wide, 4, pad_id=0)
  is_used = (packed['segment_ids'] > 0).any(axis=1).reshape(-1, 4)  # [rows of a microbatch, microbatches]
  assert 1 < is_used.sum() <= 3
  assert not is_used[:, 1:].any()
  assert packed['segment_ids'].max() > 1
  assert packed['ids'].sum() == wide['ids'].sum()
  expected, gradient = of(wide)
  found, of_packed = of(packed)
  without = {name: each for name, each in packed.items() if name != 'segment_ids'}
  assert loss.fills_first_parts(packed)
  assert not loss.fills_first_parts(without)
  assert loss.ratio != 'token' or of(without)[0] == found
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  moved = pack(wide | {'logits': np.asarray(gradient)}, 4, pad_id=0)['logits']
  np.testing.assert_allclose(of_packed, moved, rtol=1e-5, atol=1e-8)


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
