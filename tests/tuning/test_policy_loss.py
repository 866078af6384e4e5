"""PolicyLoss agrees with TRL's own GRPOTrainer and RLOOTrainer in float64, on the same logits (scripts/run_trl.py)."""

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
KINDS_OF_LOSS = [name for name in METHODS if name not in ('ppo', 'reinforce++')]  # which have the same loss as dapo
KINDS = {'plain': {}, 'kl': {'kl_weight': 0.2, 'sampler_cap': 1.05}, 'warm': {'temperature': 0.7}}


def rollouts():
  """Returns rows of prompts with completions of 1 to 5 tokens, the last row with none, and logits [B, T, V]."""
  batch = {name: TRL[name] for name in TRL.files if '/' not in name}
  return batch, batch.pop('logits')


def settings_of(method, **more):
  fields = dataclasses.asdict(METHODS[method])
  names = ('ratio', 'aggregation', 'clip_low', 'clip_high')
  settings = {name: fields[name] for name in names} | more
  return settings | ({'max_tokens': MAX_TOKENS} if settings['aggregation'] == 'max_tokens' else {})


@pytest.mark.parametrize('name', [name.removesuffix('/loss') for name in TRL.files if name.endswith('/loss')])
def test_loss_and_gradient_agree_with_trl(name):
  batch, logits = rollouts()
  method, kind = name.split('/')
  loss = PolicyLoss(**settings_of(method, **KINDS[kind]))
  value, gradient = jax.value_and_grad(lambda logits: loss({'logits': logits}, batch).loss)(jnp.asarray(logits))
  np.testing.assert_allclose(value, TRL[f'{name}/loss'], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, TRL[f'{name}/gradient'], rtol=1e-5, atol=1e-7)


def test_loss_and_gradients_with_values_agree_with_ppo():
  """The reference has the formulas of TRL's PPOTrainer (trl/experimental/ppo), in torch and float64."""
  import torch

  batch, logits = rollouts()
  rng, shape = np.random.default_rng(7), batch['weights'].shape
  values, old_values, returns, advantages = rng.normal(size=(4, *shape)).astype(np.float32)
  batch |= {'advantages': advantages, 'old_values': old_values, 'returns': returns}
  mask = batch['weights'] > 0

  def masked_mean(x):
    return x[torch.tensor(mask)].mean()

  tensors = {name: torch.tensor(x).double() for name, x in batch.items() if name != 'labels'}
  inputs = {name: torch.tensor(x).double().requires_grad_() for name, x in (('logits', logits), ('values', values))}
  labels = torch.tensor(batch['labels']).long()[..., None]
  log_probs = inputs['logits'].log_softmax(-1).gather(-1, labels)[..., 0]
  clipped_values = torch.clamp(inputs['values'], tensors['old_values'] - 0.2, tensors['old_values'] + 0.2)
  errors = torch.max((inputs['values'] - tensors['returns']) ** 2, (clipped_values - tensors['returns']) ** 2)
  ratio = torch.exp(log_probs - tensors['old_log_probs'])
  clipped = -tensors['advantages'] * torch.clamp(ratio, 0.8, 1.2)
  expected = masked_mean(torch.max(-tensors['advantages'] * ratio, clipped)) + 0.1 * 0.5 * masked_mean(errors)
  expected.backward()

  loss = PolicyLoss(**settings_of('ppo', value_weight=0.1))
  value, gradients = jax.value_and_grad(lambda p: loss(p, batch).loss)({'logits': logits, 'values': values})
  np.testing.assert_allclose(value, expected.item(), rtol=1e-5, atol=1e-6)
  for name, x in inputs.items():
    np.testing.assert_allclose(gradients[name], x.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('method', KINDS_OF_LOSS)
def test_microbatches_add_up_by_their_weights(method):
  batch, logits = rollouts()
  loss = PolicyLoss(**settings_of(method, kl_weight=0.1))
  whole = loss({'logits': logits}, batch)
  parts = [
    loss({'logits': logits[rows]}, {name: x[rows] for name, x in batch.items()}) for rows in (slice(0, 2), slice(2, 6))
  ]
  total = sum(part.loss * part.weight for part in parts) / sum(part.weight for part in parts)
  np.testing.assert_allclose(total, whole.loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sum(part.weight for part in parts), whole.weight)


@pytest.mark.parametrize('method', KINDS_OF_LOSS)
def test_packed_texts_have_the_same_loss_and_gradient_as_unpacked_texts(method):
  batch, logits = rollouts()
  rng, lengths = np.random.default_rng(3), 1 + np.argmax(np.cumsum(batch['weights'], axis=1), axis=1)
  lengths[~batch['weights'].any(axis=1)] = 0
  batch['segment_ids'] = (np.arange(batch['weights'].shape[1]) < lengths[:, None]).astype(np.int32)
  batch['ids'] = rng.integers(1, 9, batch['segment_ids'].shape, np.int32) * batch['segment_ids']
  twice = {name: np.concatenate([x, x]) for name, x in (batch | {'logits': logits}).items()}
  wide = {name: np.pad(x, ((0, 0), (0, 20), (0, 0))[: x.ndim]) if x.ndim > 1 else x for name, x in twice.items()}
  loss = PolicyLoss(**settings_of(method, kl_weight=0.1))

  def value_and_gradient(batch):
    return jax.value_and_grad(lambda logits: loss({'logits': logits}, batch).loss)(jnp.asarray(batch['logits']))

  packed = pack(wide, 4, pad_id=0)
  is_used = (packed['segment_ids'] > 0).any(axis=1).reshape(-1, 4)  # [rows of a microbatch, microbatches]
  assert 1 < is_used.sum() <= 3
  assert not is_used[:, 1:].any()
  assert packed['segment_ids'].max() > 1
  assert packed['ids'].sum() == wide['ids'].sum()
  expected, gradient = value_and_gradient(wide)
  value, packed_gradient = value_and_gradient(packed)
  without_segments = {name: x for name, x in packed.items() if name != 'segment_ids'}
  assert loss.may_have_empty_microbatches(packed)
  assert not loss.may_have_empty_microbatches(without_segments)
  assert loss.ratio != 'token' or value_and_gradient(without_segments)[0] == value
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  expected_gradient = pack(wide | {'logits': np.asarray(gradient)}, 4, pad_id=0)['logits']
  np.testing.assert_allclose(packed_gradient, expected_gradient, rtol=1e-5, atol=1e-8)


def test_without_old_log_probs_the_ratio_is_1_and_the_mismatch_is_the_sampler_s():
  batch, logits = rollouts()
  log_probs = np.take_along_axis(jax.nn.log_softmax(logits), batch['labels'][..., None], -1)[..., 0]
  batch['sampler_log_probs'] = np.where(batch['weights'] > 0, log_probs, 0.0).astype(np.float32)
  batch['sampler_log_probs'][1, 3] += 0.25
  del batch['old_log_probs']
  output = PolicyLoss()({'logits': logits}, batch)
  assert float(output.metrics['clip_fraction'][0]) == 0
  np.testing.assert_allclose(output.metrics['sampler_mismatch'][0], 0.25 / batch['weights'].sum(), atol=1e-6)
  # The loss is minus the mean advantage of the completions, whatever the probabilities.
  np.testing.assert_allclose(output.loss, -np.mean(batch['advantages'][:5]), atol=1e-6)
