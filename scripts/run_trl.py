"""Computes tests/data/trl.npz for tests/tuning: losses and their gradients by TRL's own trainers.

    uv venv /tmp/env-trl --python 3.11 && uv pip install --python /tmp/env-trl trl==1.16.0 torch transformers
    /tmp/env-trl/bin/python scripts/run_trl.py tests/data/trl.npz

`_compute_loss` of GRPOTrainer and RLOOTrainer runs unchanged, in float64, on synthetic rollouts. Only the model is
replaced: its logits are inputs, and gradients are taken with respect to them.
"""

from collections import defaultdict
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head, selective_log_softmax

B, T, V, MAX_TOKENS = 6, 9, 7, 5
START = 2  # tokens of a prompt
CAP = 1.05
TEMPERATURE = 0.7
# As METHODS of spmd_tasks/tuning/reward_tuning.py.
METHODS: dict[str, dict[str, Any] | None] = {
  'grpo': {},
  'dr_grpo': {'loss_type': 'dr_grpo'},
  'dapo': {'loss_type': 'dapo', 'epsilon_high': 0.28},
  'gspo': {'importance_sampling_level': 'sequence', 'epsilon_low': 3e-4, 'epsilon_high': 4e-4},
  'rloo': None,  # a trainer of its own
  'reinforce++': {'loss_type': 'bnpo'},  # TRL has no such name; this is its mean over tokens
}


def rollouts() -> dict[str, np.ndarray]:
  """Returns rows of prompts with completions of 1 to 5 tokens, the last row without any, and logits [B, T, V]."""
  rng = np.random.default_rng(5)
  batch = {'labels': rng.integers(0, V, (B, T)).astype(np.int32), 'weights': np.zeros((B, T), np.float32)}
  for row in range(B - 1):
    batch['weights'][row, START : START + 1 + row] = 1
  batch['advantages'] = np.array([1.3, -0.7, 0.0, -1.9, 0.8, 0.0], np.float32)
  batch['logits'] = (2 * rng.normal(size=(B, T, V))).astype(np.float32)
  log_probs = selective_log_softmax(torch.tensor(batch['logits']), torch.tensor(batch['labels']).long()).numpy()
  batch['old_log_probs'] = (log_probs + rng.normal(0, 0.3, (B, T))).astype(np.float32) * batch['weights']
  batch['sampler_log_probs'] = (batch['old_log_probs'] + rng.normal(0, 0.1, (B, T))).astype(np.float32)
  batch['reference_log_probs'] = (log_probs + rng.normal(0, 0.5, (B, T))).astype(np.float32)
  return batch


class Given(torch.nn.Module):
  """A model for TRL's fused head, whose hidden states are the input logits and whose head is the identity."""

  def __init__(self, logits: torch.Tensor):
    super().__init__()
    self.logits = logits
    self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type='given'))
    self.head = torch.nn.Linear(V, V, bias=False, dtype=torch.float64)
    self.head.weight.data = torch.eye(V, dtype=torch.float64)

  def base_model(self, **_):
    return SimpleNamespace(last_hidden_state=self.logits)

  def get_output_embeddings(self):
    return self.head

  def forward(self):
    pass


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
  """Returns log-probabilities by TRL's own head, which applies the temperature."""
  model = Given(logits)
  add_fused_lm_head(model, temperature=temperature)
  return model(shift_labels=labels, fused_lm_head=True).log_probs


def loss_of(
  batch: dict[str, np.ndarray], method: str, kl_weight: float, temperature: float = 1.0
) -> tuple[float, np.ndarray]:
  """Returns TRL's loss and its gradient by the logits; with a KL weight the sampler's ratio is capped as well."""
  logits = torch.tensor(batch['logits'], dtype=torch.float64, requires_grad=True)
  rows, columns = slice(0, B - 1), slice(START, START + MAX_TOKENS)  # TRL has no rows without a completion

  def tensor(name: str) -> torch.Tensor:
    return torch.tensor(batch[name][rows, columns]).double()

  mask, labels = tensor('weights'), tensor('labels').long()
  old, sampler = tensor('old_log_probs'), tensor('sampler_log_probs')
  inputs = {
    'prompt_ids': labels[:, :0],
    'prompt_mask': labels[:, :0],
    'completion_ids': labels,
    'completion_mask': mask,
    'advantages': torch.tensor(batch['advantages'][rows]).double(),
    'old_per_token_logps': old,
    'old_logps': (old * mask).sum(1),
    'ref_per_token_logps': tensor('reference_log_probs'),
    'importance_sampling_ratio': (old - sampler).exp().clamp(max=CAP),
    'num_items_in_batch': mask.sum(),
  }
  model = SimpleNamespace(training=True)
  fields: dict[str, Any] = {
    'model': model,
    'loss_type': 'grpo',
    'importance_sampling_level': 'token',
    'epsilon_low': 0.2,
    'epsilon_high': 0.2,
    'beta': kl_weight,
    'use_vllm': kl_weight > 0,
    'vllm_importance_sampling_correction': True,
    'max_completion_length': MAX_TOKENS,
    'top_entropy_quantile': 1.0,
    'off_policy_mask_threshold': None,
    'current_gradient_accumulation_steps': 1,
    'aux_loss_enabled': False,
    '_entropy_bonus_enabled': False,
    '_metrics': defaultdict(lambda: defaultdict(list)),
    'args': SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    'accelerator': SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    '_get_per_token_logps_and_entropies': lambda *_, **__: (
      log_probs_of(logits[rows, columns], labels, temperature),
      torch.zeros_like(mask),
      None,
    ),
  }
  trainer = SimpleNamespace(**fields | (METHODS[method] or {}))
  kind = RLOOTrainer if method == 'rloo' else GRPOTrainer
  loss = kind._compute_loss(trainer, model, inputs)
  loss.backward()
  assert logits.grad is not None
  return loss.item(), logits.grad.numpy()


def main() -> None:
  batch = rollouts()
  record: dict[str, Any] = dict(batch)
  for method in METHODS:
    for name, kl_weight in (('plain', 0.0), ('kl', 0.2)):
      if method != 'rloo' or not kl_weight:  # TRL's has the KL divergence in the reward
        record[f'{method}/{name}/loss'], record[f'{method}/{name}/gradient'] = loss_of(batch, method, kl_weight)
  record['grpo/warm/loss'], record['grpo/warm/gradient'] = loss_of(batch, 'grpo', 0.0, TEMPERATURE)
  np.savez_compressed(pathlib.Path(sys.argv[1]), **record)


if __name__ == '__main__':
  main()
