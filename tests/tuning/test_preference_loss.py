"""PreferenceLoss agrees with TRL's formulas, written in torch with one sequence per answer, on the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.tuning import PreferenceLoss

B, T, V = 3, 17, 11


def packed_pairs():
  """Returns rows with two pairs, one pair and none, [B, T] arrays; prompts have weight 0."""
  rng = np.random.default_rng(3)
  lengths = [[3, 4, 3, 6], [8, 9], []]
  batch = {name: np.zeros((B, T), np.int32) for name in ('labels', 'segment_ids')}
  batch |= {name: np.zeros((B, T), np.float32) for name in ('weights', 'reference_log_probs')}
  for row, sizes in enumerate(lengths):
    start = 0
    for segment, size in enumerate(sizes, 1):
      end, answer = start + size, start + 1 + segment % 2
      batch['labels'][row, start:end] = rng.integers(0, V, size)
      batch['segment_ids'][row, start:end] = segment
      batch['weights'][row, answer:end] = 1
      batch['reference_log_probs'][row, answer] = rng.normal(-4, 1)
      start = end
  return batch, rng.normal(size=(B, T, V)).astype(np.float32) * 2


def by_torch(batch, logits, *, beta, kind='sigmoid', length_normalized=False, label_smoothing=0.0):
  """Computes TRL's `dpo_loss`; returns (loss, its gradient by the logits, metrics)."""
  import torch
  import torch.nn.functional as F

  logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
  chosen, rejected, reference_chosen, reference_rejected = [], [], [], []
  for row in range(B):
    for segment in range(1, batch['segment_ids'][row].max() + 1):
      at = np.flatnonzero((batch['segment_ids'][row] == segment) & (batch['weights'][row] > 0))
      labels = torch.tensor(batch['labels'][row, at], dtype=torch.int64)
      per_token = torch.gather(logits[row, at].log_softmax(-1), 1, labels[:, None])[:, 0]
      reference = torch.tensor(batch['reference_log_probs'][row, at].sum(), dtype=torch.float64)
      num = len(at) if length_normalized else 1
      (chosen if segment % 2 else rejected).append(per_token.sum() / num)
      (reference_chosen if segment % 2 else reference_rejected).append(reference / num)
  stacks = [torch.stack(x) for x in (chosen, rejected, reference_chosen, reference_rejected)]
  chosen, rejected, reference_chosen, reference_rejected = stacks
  difference = (chosen - rejected) - (reference_chosen - reference_rejected)
  if kind == 'sigmoid':
    losses = (
      -F.logsigmoid(beta * difference) * (1 - label_smoothing) - F.logsigmoid(-beta * difference) * label_smoothing
    )
  else:
    losses = (difference - 1 / (2 * beta)) ** 2
  losses.mean().backward()
  chosen_rewards, rejected_rewards = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
  metrics = {
    'chosen_reward': chosen_rewards.mean(),
    'rejected_reward': rejected_rewards.mean(),
    'reward_margin': (chosen_rewards - rejected_rewards).mean(),
    'reward_accuracy': (chosen_rewards > rejected_rewards).double().mean(),
  }
  return losses.mean().item(), logits.grad.numpy(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
  'settings',
  [
    {'beta': 0.1},
    {'beta': 0.5, 'label_smoothing': 0.2},
    {'beta': 0.1, 'kind': 'ipo'},
    {'beta': 0.3, 'kind': 'ipo', 'length_normalized': True},
    {'beta': 2.0, 'length_normalized': True},
  ],
  ids=['dpo', 'smoothed', 'ipo', "TRL's ipo", 'normalized'],
)
def test_loss_gradient_and_metrics_agree_with_trl(settings):
  batch, logits = packed_pairs()
  expected, expected_gradient, metrics = by_torch(batch, logits, **settings)
  loss = PreferenceLoss(**settings)

  def loss_of(logits):
    output = loss({'logits': logits}, batch)
    return output.loss, output

  (value, output), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(jnp.asarray(logits))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6, rtol=1e-4)
  assert output.weight == 3
  for name, value in metrics.items():
    np.testing.assert_allclose(output.metrics[name][0], value, rtol=1e-5, err_msg=name)
  assert (gradient[2] == 0).all()


def test_padding_has_loss_0_and_a_label_outside_the_vocabulary_loss_nan():
  batch, logits = packed_pairs()
  empty = {name: np.zeros_like(value) for name, value in batch.items()}
  for kind in ('sigmoid', 'ipo'):
    output = PreferenceLoss(kind=kind)({'logits': logits}, empty)
    assert output.loss == output.weight == 0
  batch['labels'][0, 12] = V
  assert batch['weights'][0, 12] == 1
  assert np.isnan(PreferenceLoss()({'logits': logits}, batch).loss)


def test_aux_losses_are_added():
  batch, logits = packed_pairs()
  loss = PreferenceLoss(aux_loss_weights={'balance': 0.5})
  with_aux = loss({'logits': logits, 'aux': {'balance': jnp.array([2.0, 4.0])}}, batch)
  np.testing.assert_allclose(with_aux.loss, PreferenceLoss()({'logits': logits}, batch).loss + 1.5, rtol=1e-6)
  assert with_aux.metrics['balance'][0] == 3
  with pytest.raises(ValueError, match="aux_loss_weights names 'balance'"):
    loss({'logits': logits}, batch)
