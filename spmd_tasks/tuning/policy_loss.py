"""PolicyLoss: the policy gradient loss on completions that the model sampled (GRPO and its relatives).

Shapes: B rows, each a prompt and one sampled completion, T tokens. All results are float32.

    A        advantage of a completion: how much its reward exceeds the expected reward (advantages.py)
    log p    log-probability of a token under the model
    log q    the same under the model that sampled it, both by the forward pass of training
    log s    the same as the sampler computed it, with its cache
    ratio    exp(log p - log q), of a token, or of a whole completion
    loss     -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_weight KL
    V, U     value of a token under the model, and when it was sampled; if there are values, the loss also has
             value_weight max((V - return)^2, (clip(V, U - value_clip, U + value_clip) - return)^2) / 2

The methods of reward_tuning.py choose among these. PPO has values; its formulas and defaults are TRL's.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput
from spmd_tasks.tuning.preference_loss import ReferenceLoss, answer_log_probs

_RATIOS = ('token', 'sequence', 'sequence_sum')
_AGGREGATIONS = ('sequences', 'tokens', 'max_tokens')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(ReferenceLoss):
  """The clipped policy gradient loss; the module's docstring has the formulas.

  Fields:
    ratio: 'token'; or one ratio for a completion, from the mean ('sequence') or the sum ('sequence_sum') of its
      tokens' log p - log q.
    aggregation: 'sequences' is the mean over completions of their means over tokens, 'tokens' the mean over all tokens,
      and 'max_tokens' the sum over tokens divided by B * max_tokens.
    max_tokens: the maximum length of a completion; for aggregation='max_tokens' only.
    clip_low, clip_high: how far a ratio may move in the direction of its advantage.
    kl_weight: the weight of the KL divergence from a reference model, estimated by exp(d) - d - 1 with
      d = log r - log p (Schulman, 2020); 0 needs no reference.
    temperature: the sampling temperature; all log-probabilities are computed from logits / temperature.
    value_weight, value_clip: for the loss of the values; 0 needs no values.
    sampler_cap: multiplies each token's loss by min(q / s, sampler_cap), which corrects for numerical differences of
      the sampler (truncated importance sampling: Yao et al., 2025); None does not.
    reference_from, aux_loss_weights, num_aux_layers: see ReferenceLoss.
  """

  ratio: str = 'token'
  aggregation: str = 'sequences'
  max_tokens: int | None = None
  clip_low: float = 0.2
  clip_high: float = 0.2
  kl_weight: float = 0.0
  temperature: float = 1.0
  value_weight: float = 0.0
  value_clip: float = 0.2
  sampler_cap: float | None = None

  def __post_init__(self):
    super().__post_init__()
    for name, choices in (('ratio', _RATIOS), ('aggregation', _AGGREGATIONS)):
      if getattr(self, name) not in choices:
        raise UserError(f'{name}={getattr(self, name)!r} must be one of {", ".join(map(repr, choices))}.')
    if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or min(self.kl_weight, self.value_weight, self.value_clip) < 0:
      raise UserError(
        f'clip_low={self.clip_low} must be from 0 to 1, and clip_high={self.clip_high}, kl_weight={self.kl_weight}, '
        f'value_weight={self.value_weight} and value_clip={self.value_clip} at least 0.'
      )
    if not 0 < self.temperature < float('inf'):
      raise UserError(f'temperature={self.temperature} must be positive: at 0 the completions of a prompt are equal.')
    if self.sampler_cap is not None and not self.sampler_cap > 0:
      raise UserError(f'sampler_cap={self.sampler_cap} must be positive, such as 2.0, or None.')
    if (self.aggregation == 'max_tokens') != (self.max_tokens is not None):
      raise UserError(
        f"max_tokens={self.max_tokens} must be set for aggregation='max_tokens' only, not for {self.aggregation!r}."
      )

  @property
  def compares_with_base(self) -> bool:
    return super().compares_with_base and self.kl_weight > 0

  def may_have_empty_microbatches(self, batch: Mapping[str, jax.Array]) -> bool:
    """Returns whether the last microbatches may be padding only, so that the step may skip them."""
    return _is_packed(batch)

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of completions, or of tokens for aggregation='tokens'.

    Args:
      predictions: `logits` float [B, T, V] or `softmax_head`; optionally `aux`; `values` float [B, T] if value_weight
        is not 0.
      batch: `labels` int32 [B, T];
        `weights` float [B, T], 1 on the tokens of completions;
        `advantages` float [B], or float [B, T] together with `returns` and `old_values` (U) float [B, T];
        `segment_ids` int32 [B, T] and `completion_lengths` float [B, T], the number of sampled tokens in the text of
        each token, if rows have several texts (rollout_packing.py);
        `sampler_log_probs` float [B, T], log s;
        `old_log_probs` float [B, T], log q, or log p if missing;
        `reference_log_probs` float [B, T] if kl_weight is not 0.
    """
    weights = batch['weights'].astype(jnp.float32)
    log_probs = answer_log_probs(predictions, batch, self.temperature)
    old = batch.get('old_log_probs', jax.lax.stop_gradient(log_probs))
    num_tokens = jnp.sum(weights, axis=1)  # [B]
    lengths = jnp.maximum(batch.get('completion_lengths', num_tokens[:, None]), 1.0)

    log_ratio = (log_probs - old) * weights
    if self.ratio != 'token':
      log_ratio = _sums_of_texts(log_ratio, batch)
      log_ratio = jnp.broadcast_to(log_ratio / lengths if self.ratio == 'sequence' else log_ratio, weights.shape)
    ratio, advantages = jnp.exp(log_ratio), batch['advantages'].astype(jnp.float32).reshape(len(weights), -1)
    clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
    objective = -jnp.minimum(ratio * advantages, clipped * advantages)
    is_clipped = ((advantages < 0) & (ratio < 1 - self.clip_low)) | ((advantages > 0) & (ratio > 1 + self.clip_high))
    mismatch = jnp.abs(old - batch['sampler_log_probs']) * weights
    if self.sampler_cap is not None:
      objective *= jnp.minimum(jnp.exp(old - batch['sampler_log_probs']), self.sampler_cap)
    per_token = {'clip_fraction': is_clipped, 'entropy': -log_probs, 'sampler_mismatch': mismatch}
    if self.kl_weight:
      difference = batch['reference_log_probs'] - log_probs
      per_token['kl'] = jnp.exp(difference) - difference - 1
      objective += self.kl_weight * per_token['kl']
    if self.value_weight:
      values, old_values = predictions['values'], batch['old_values']
      clipped_values = old_values + jnp.clip(values - old_values, -self.value_clip, self.value_clip)
      errors = (jnp.square(x - batch['returns']) for x in (values, clipped_values))
      per_token['value_loss'] = 0.5 * jnp.maximum(*errors)
      objective += self.value_weight * per_token['value_loss']

    # One sum over a stack: if B is sharded, each separate sum would be a separate all-reduce.
    rows = [jnp.sum(x * weights, axis=1) for x in (objective, *per_token.values())]
    rows += [jnp.sum(x * weights / lengths, axis=1) for x in (objective, jnp.ones_like(weights))]
    total, *totals, total_of_means, num_texts, tokens = jnp.sum(jnp.stack([*rows, num_tokens]), axis=1)
    weight = tokens if self.aggregation == 'tokens' else jnp.round(num_texts)
    loss = {
      'sequences': total_of_means,
      'tokens': total,
      'max_tokens': total / (self.max_tokens or 1),
    }[self.aggregation] / jnp.maximum(weight, 1.0)
    metrics = {name: (total / jnp.maximum(tokens, 1.0), tokens) for name, total in zip(per_token, totals, strict=True)}
    loss, metrics = self.add_aux_losses(loss, weight, metrics, predictions.get('aux', {}))
    return LossOutput(loss=loss, weight=weight, metrics=metrics)


def _is_packed(batch: Mapping[str, jax.Array]) -> bool:
  return 'completion_lengths' in batch and 'segment_ids' in batch


def _sums_of_texts(values: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns for each token the sum over its text: [B, T], or [B, 1] if each row is one text."""
  if not _is_packed(batch):
    return jnp.sum(values, axis=1, keepdims=True)

  def sums_of(values: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(values, ids, num_segments=len(ids) + 1)[ids]

  return jax.vmap(sums_of)(values, batch['segment_ids'])
