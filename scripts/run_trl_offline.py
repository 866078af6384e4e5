"""Computes tests/data/trl_offline.npz: losses on offline data and their gradients by TRL's own trainers.

    uv venv /tmp/env-trl --python 3.11 && uv pip install --python /tmp/env-trl trl==1.16.0 torch transformers
    /tmp/env-trl/bin/python scripts/run_trl_offline.py tests/data/trl_offline.npz

The loss functions of KTOTrainer, ORPOTrainer, GKDTrainer, ServerDistillationTrainer and RewardTrainer, and the ones of
transformers for classification and regression, run unchanged, in float64, on synthetic sequences. Only the models are
replaced: logits are inputs, and gradients are taken with respect to them.
"""

from collections import defaultdict
from collections.abc import Mapping
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from trl import KTOTrainer, RewardTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.server_distillation import server_distillation_trainer
from trl.trainer.utils import selective_log_softmax

B, T, V = 4, 17, 11
SEGMENTS: tuple[list[int], ...] = ([3, 4, 3, 6], [8, 9], [], [5, 4, 4, 4])  # lengths, of every row
ACCELERATOR = SimpleNamespace(device='cpu', num_processes=1, gather_for_metrics=lambda x: x, gather=lambda x: x)
KTO_SETTINGS = {'kto': (0.1, 1.0, 1.0), 'kto_weighted': (0.5, 1.5, 0.7)}  # beta, weights of good and bad answers


def packed_pairs() -> dict[str, np.ndarray]:
  """Returns rows [B, T] of pairs of segments, as PreferenceInput packs them (prompts with weight 0), with logits."""
  rng = np.random.default_rng(3)
  batch = {name: np.zeros((B, T), np.int32) for name in ('labels', 'segment_ids')}
  batch |= {name: np.zeros((B, T), np.float32) for name in ('weights', 'reference_log_probs', 'judgement')}
  batch['logits'] = (2 * rng.normal(size=(B, T, V))).astype(np.float32)
  log_probs = torch.tensor(batch['logits']).log_softmax(-1).numpy()
  for row, sizes in enumerate(SEGMENTS):
    at = 0
    for segment, size in enumerate(sizes, 1):
      first = at + 1 + segment % 2  # behind a prompt
      batch['labels'][row, at : at + size] = rng.integers(0, V, size)
      batch['segment_ids'][row, at : at + size] = segment
      batch['weights'][row, first : at + size] = 1
      own = [log_probs[row, t, batch['labels'][row, t]] for t in range(first, at + size)]
      batch['reference_log_probs'][row, first] = sum(own) + rng.normal(0 if segment % 2 else -1, 1)
      if segment % 2:
        batch['judgement'][row, first] = 1 if segment == 1 else -1
      at += size
  return batch


class Sequences:
  """Returns the segments of one side of the pairs as TRL's rows [N, L + 1], whose first token has no label."""

  def __init__(self, batch: Mapping[str, np.ndarray], logits: torch.Tensor, side: int):
    places = [(r, s) for r in range(B) for s in range(1, batch['segment_ids'][r].max() + 1) if s % 2 == side]
    at = [(row, np.flatnonzero(batch['segment_ids'][row] == segment)) for row, segment in places]
    longest = max(len(columns) for _, columns in at)

    def rows_of(name: str, kind: Any) -> torch.Tensor:
      rows = np.zeros((len(at), longest + 1))
      for number, (row, columns) in enumerate(at):
        rows[number, 1 : 1 + len(columns)] = batch[name][row, columns]
      return torch.tensor(rows, dtype=kind)

    self.ids, self.is_answer = rows_of('labels', torch.int64), rows_of('weights', torch.int64)
    self.references, self.judgement = (rows_of(n, torch.float64).sum(1) for n in ('reference_log_probs', 'judgement'))
    self.is_text = torch.tensor([[1] * (1 + len(columns)) + [0] * (longest - len(columns)) for _, columns in at])
    padded = [
      torch.nn.functional.pad(logits[row, columns], (0, 0, 0, longest + 1 - len(columns))) for row, columns in at
    ]
    self.logits = torch.stack(padded)  # [N, L + 1, V], the last one predicts nothing

  @property
  def log_probs(self) -> torch.Tensor:
    """Returns the values of the answers' tokens as float64 [N, L], and 0 elsewhere."""
    return selective_log_softmax(self.logits[:, :-1], self.ids[:, 1:]) * self.is_answer[:, 1:]


def kto(batch: Mapping[str, np.ndarray], logits: torch.Tensor, beta: float, good: float, bad: float) -> torch.Tensor:
  own, other = Sequences(batch, logits, 1), Sequences(batch, logits, 0)

  def model(*, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
    log_probs = (own if input_ids is own.ids else other).log_probs
    return SimpleNamespace(log_probs=log_probs, entropy=log_probs, mean_logits=log_probs)

  trainer = SimpleNamespace(
    model=SimpleNamespace(training=False),
    accelerator=ACCELERATOR,
    aux_loss_enabled=False,
    precompute_ref_logps=True,
    calculate_KL=True,
    loss_type='kto',
    beta=beta,
    desirable_weight=good,
    undesirable_weight=bad,
    _metrics=defaultdict(lambda: defaultdict(list)),
    _total_train_tokens=0,
  )
  trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
  inputs = {
    'input_ids': own.ids,
    'attention_mask': own.is_text,
    'completion_mask': own.is_answer,
    'KL_input_ids': other.ids,
    'KL_attention_mask': other.is_text,
    'KL_completion_mask': other.is_answer,
    'label': own.judgement > 0,
    'ref_logps': own.references,
    'ref_KL_logps': other.references,
  }
  # Its `.to(device)` may make copies, by which the model could not tell the two calls apart.
  assert own.ids.to('cpu') is own.ids
  return KTOTrainer._compute_loss(trainer, model, inputs, False)


def orpo(batch: Mapping[str, np.ndarray], logits: torch.Tensor, beta: float) -> torch.Tensor:
  sides = [Sequences(batch, logits, side) for side in (1, 0)]
  longest = max(side.ids.shape[1] for side in sides)

  def joined(name: str) -> torch.Tensor:
    parts = [getattr(side, name) for side in sides]
    pads = [(0, 0) * (part.ndim - 2) + (0, longest - part.shape[1]) for part in parts]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])

  ids, is_answer, is_text = joined('ids'), joined('is_answer'), joined('is_text')
  concatenated = {
    'concatenated_input_ids': ids,
    'concatenated_attention_mask': is_text,
    'concatenated_labels': torch.where(is_answer == 1, ids, -100),
  }
  trainer = SimpleNamespace(
    is_encoder_decoder=False,
    aux_loss_enabled=False,
    accelerator=ACCELERATOR,
    padding_value=0,
    beta=beta,
    concatenated_inputs=lambda *_, **__: concatenated,
    get_batch_logps=ORPOTrainer.get_batch_logps,
  )
  trainer.odds_ratio_loss = lambda *args: ORPOTrainer.odds_ratio_loss(trainer, *args)
  trainer.concatenated_forward = lambda *args: ORPOTrainer.concatenated_forward(trainer, *args)
  labels = {'chosen_labels': sides[0].ids}
  model = lambda *_, **__: SimpleNamespace(logits=joined('logits'))
  return ORPOTrainer.get_batch_loss_metrics(trainer, model, labels)[0]


# beta, temperature, tokens that the teacher names (0: all), the share of the labels
DISTILLATIONS = {
  'forward': (0.0, 1.0, 0, 0.0),
  'reverse': (1.0, 1.0, 0, 0.0),
  'jensen_shannon': (0.5, 2.0, 0, 0.0),
  'generalised': (0.1, 0.7, 0, 0.3),
  'forward_top_3': (0.0, 1.0, 3, 0.0),
}


def distillation(
  batch: Mapping[str, np.ndarray], logits: torch.Tensor, beta: float, temperature: float, top_k: int, share: float
) -> torch.Tensor:
  teacher, is_answer = torch.tensor(batch['teacher_logits']).double(), torch.tensor(batch['weights']) > 0
  labels = torch.where(is_answer, torch.tensor(batch['labels']).long(), -100)
  if top_k:
    teacher_logprobs, ids = teacher.log_softmax(-1).topk(top_k)
    both = [logits.log_softmax(-1).gather(-1, ids), teacher_logprobs]
    with_rest = server_distillation_trainer._add_tail_bucket
    (student, mask), (known, _) = (with_rest(x, torch.ones_like(x, dtype=torch.bool)) for x in both)
    per_token = server_distillation_trainer._jsd_divergence(student, known, beta, mask)
    return per_token.sum(-1)[is_answer].mean()
  loss = GKDTrainer.generalized_jsd_loss(logits, teacher, labels=labels, beta=beta, temperature=temperature)
  entropy = torch.nn.functional.cross_entropy(logits[is_answer], labels[is_answer])
  return (1 - share) * loss + share * entropy


CENTER_WEIGHT, SCALE = 0.01, 20.0


def texts(batch: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
  """Returns the row and the last column of every segment, with the segments of a pair next to each other."""
  columns = [(row, np.flatnonzero(batch['segment_ids'][row] == s)) for row in range(B) for s in range(1, 5)]
  return [(row, int(positions[-1])) for row, positions in columns if positions.size]


def scores(name: str, batch: Mapping[str, np.ndarray], logits: torch.Tensor) -> torch.Tensor:
  """Returns losses on the values at the last token of every segment."""
  rows, columns = zip(*texts(batch), strict=True)
  values, targets = logits[rows, columns], torch.tensor(batch['targets'][rows, columns]).double()
  config = SimpleNamespace(num_labels=V, problem_type=None)
  if name == 'classification':
    return ForSequenceClassificationLoss(targets.long(), values, config)
  if name == 'regression':
    config = SimpleNamespace(num_labels=1, problem_type='regression')
    return ForSequenceClassificationLoss(targets, values[:, :1], config)
  if name == 'contrastive':  # as MultipleNegativesRankingLoss of sentence-transformers; the first pair of a row
    first = [n for n, (row, _) in enumerate(texts(batch)) if row not in rows[:n]]
    cosine = torch.nn.functional.cosine_similarity(values[first][:, None], values[[n + 1 for n in first]][None], dim=-1)
    return torch.nn.functional.cross_entropy(SCALE * cosine, torch.arange(len(first)))
  rewards = torch.cat([values[0::2, :1], values[1::2, :1]])
  trainer = SimpleNamespace(
    model=SimpleNamespace(training=False),
    accelerator=ACCELERATOR,
    args=SimpleNamespace(center_rewards_coefficient=CENTER_WEIGHT),
    _metrics=defaultdict(lambda: defaultdict(list)),
    _total_train_tokens=0,
  )
  inputs = {'margin': targets[0::2]} if name == 'bradley_terry' else {}
  return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), inputs)


def main() -> None:
  batch = packed_pairs()
  record: dict[str, Any] = {f'pairs/{name}': values for name, values in batch.items()}

  def note(name: str, loss_of: Any) -> None:
    logits = torch.tensor(batch['logits'], dtype=torch.float64, requires_grad=True)
    loss = loss_of(logits)
    loss.backward()
    assert logits.grad is not None
    record[f'{name}/loss'], record[f'{name}/gradient'] = loss.item(), logits.grad.numpy()

  for name, weights in KTO_SETTINGS.items():
    note(name, lambda logits, weights=weights: kto(batch, logits, *weights))
  batch['teacher_logits'] = (2 * np.random.default_rng(4).normal(size=(B, T, V))).astype(np.float32)
  record['pairs/teacher_logits'] = batch['teacher_logits']
  for name, settings in DISTILLATIONS.items():
    note(name, lambda logits, settings=settings: distillation(batch, logits, *settings))
  batch['targets'] = np.zeros((B, T), np.float32)
  for number, place in enumerate(texts(batch)):
    batch['targets'][place] = number % V
  record['pairs/targets'] = batch['targets']
  for name in ('bradley_terry', 'classification', 'regression', 'contrastive'):
    note(name, lambda logits, name=name: scores(name, batch, logits))
  note('orpo', lambda logits: orpo(batch, logits, 0.3))
  np.savez_compressed(pathlib.Path(sys.argv[1]), **record)


if __name__ == '__main__':
  main()
