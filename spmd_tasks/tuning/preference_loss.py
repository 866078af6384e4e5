"""PreferenceLoss: direct preference optimisation (DPO) and its relatives, on packed pairs of answers.

Shapes: B batch, T sequence, V vocab, P the most pairs that a row can hold, T // 2. All results are float32.

A batch is PreferenceInput's (preferences.py): segments 1, 2 of a row are the chosen and the rejected answer of
its first pair, 3, 4 those of its second, and so on, each behind its prompt.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput, losses_by_source
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.layers.label_scores import predicted_label_scores
from spmd_tasks.layers.losses import WithAuxLosses
from spmd_tasks.learning.frozen_weights import FROZEN_TAG
from spmd_tasks.tuning.adapted_weights import AdapterNames, adapters_of, without_adapters

_KINDS = ('sigmoid', 'ipo')
_REFERENCES = ('batch', 'base')


class PairLogProbs(NamedTuple):
  """Log-probabilities of both answers of each pair, float32 [B, P]; 0 where there is no pair.

  Fields:
    chosen, rejected: under the model.
    reference_chosen, reference_rejected: under the reference model.
    num_chosen, num_rejected: tokens of the answers.
  """

  chosen: jax.Array
  rejected: jax.Array
  reference_chosen: jax.Array
  reference_rejected: jax.Array
  num_chosen: jax.Array
  num_rejected: jax.Array


def pair_log_probs(predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> PairLogProbs:
  """Sums the log-probabilities of the answers' tokens.

  Args:
    predictions: `logits` float [B, T, V], or in their place `label_scores`.
    batch: `labels`, `segment_ids` int32 [B, T], `weights` float [B, T] (1 on answers), and `reference_log_probs`
      float [B, T], whose sum over a segment is the reference model's log-probability of its answer.
  """
  weights = batch['weights'].astype(jnp.float32)
  log_probs = answer_log_probs(predictions, batch)
  num_pairs = weights.shape[1] // 2
  per_token = jnp.stack([log_probs, batch['reference_log_probs'].astype(jnp.float32), weights], axis=-1)  # [B, T, 3]

  def sum_segments(values, segment_ids):
    return jax.ops.segment_sum(values, segment_ids, num_segments=2 * num_pairs + 1)

  totals = jax.vmap(sum_segments)(per_token, batch['segment_ids'])[:, 1:]  # without padding
  chosen, rejected = totals[:, 0::2], totals[:, 1::2]  # [B, P, 3]
  return PairLogProbs(
    chosen[..., 0], rejected[..., 0], chosen[..., 1], rejected[..., 1], chosen[..., 2], rejected[..., 2]
  )


def answer_log_probs(predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the log-probability of each token of an answer, and 0 elsewhere, float32 [B, T]."""
  weights = batch['weights'].astype(jnp.float32)
  scores = predicted_label_scores(predictions, batch['labels'])
  log_probs = scores.label_logit - scores.log_normalizer
  return jnp.where(weights == 0, 0.0, jnp.where(scores.is_known, log_probs, jnp.nan)) * weights


def base_log_probs(task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns `answer_log_probs` under the task's model without its adapters, without a gradient."""
  names = [AdapterNames(kernel=name) for name in adapters_of(task.model)]
  left_out = {name for each in names for name in (each.a, each.b, each.magnitude)}
  flat = traverse_util.flatten_dict(variables['params'], sep='/')
  weights = traverse_util.unflatten_dict({name: leaf for name, leaf in flat.items() if name not in left_out}, sep='/')
  base = {**variables, 'params': jax.lax.stop_gradient(weights)}
  predictions = dataclasses.replace(task, model=without_adapters(task.model)).predict(base, batch)
  return answer_log_probs(predictions, batch)


def refuse_trained_base(weight_specs: Any) -> None:
  """Raises a UserError if a weight is trained that is no adapter's, so that there is no base to compare with."""
  specs = traverse_util.flatten_dict(weight_specs, sep='/')
  trained = [name for name, spec in specs.items() if not {FROZEN_TAG, ADAPTER_TAG} & {*spec.tags}]
  if trained or not any(ADAPTER_TAG in spec.tags for spec in specs.values()):
    found = f'{trained[0]} is trained' if trained else 'there are no adapters'
    raise UserError(
      f'the loss compares with the base, the model without its adapters, but {found}: train adapters alone, as '
      "finetune.LoraDpo does, or take the model that training starts from as the reference (reference='start')."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss(WithAuxLosses):
  """Mean over pairs of a function of how much more than the reference the model prefers the chosen answer.

  With h = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)), p the model and r the reference:

    sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing: DPO (Rafailov et al., 2023)
    ipo      (h - 1 / (2 beta))^2: IPO (Azar et al., 2023), whose regularisation tau is `beta`

  The rewards in the metrics are beta (log p - log r). A pair counts once, whatever the length of its answers.

  Fields:
    kind: 'sigmoid' or 'ipo'.
    beta: how strongly the model is held to the reference.
    length_normalized: every log-probability is divided by the number of tokens of its answer, as in Tülu 3 and SimPO;
      TRL's IPO is this one.
    label_smoothing: the probability that a label is wrong (conservative DPO, Mitchell, 2023); 'sigmoid' only.
    reference_from: where the log-probabilities of r are from: the 'batch', or the 'base' of the model, which is the
      model without its adapters: every step runs it too.
    aux_loss_weights, num_aux_layers: as in LanguageModelLoss.
  """

  kind: str = 'sigmoid'
  beta: float = 0.1
  length_normalized: bool = False
  label_smoothing: float = 0.0
  reference_from: str = 'batch'

  def __post_init__(self):
    if self.kind not in _KINDS:
      raise UserError(f'kind={self.kind!r} must be one of {", ".join(map(repr, _KINDS))}.')
    if self.reference_from not in _REFERENCES:
      raise UserError(f'reference_from={self.reference_from!r} must be one of {", ".join(map(repr, _REFERENCES))}.')
    if not self.beta > 0:
      raise UserError(f'beta={self.beta} must be positive: 0.1 is usual.')
    if not 0.0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind != 'sigmoid'):
      raise UserError(
        f"label_smoothing={self.label_smoothing} must be at least 0 and less than 0.5, and 0 unless kind is 'sigmoid'."
      )

  def with_model(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]
  ) -> Mapping[str, jax.Array]:
    """Returns the batch with the log-probabilities that the model without its adapters gives to its answers."""
    if self.reference_from != 'base':
      return batch
    return {**batch, 'reference_log_probs': base_log_probs(task, variables, batch)}

  def check_weights(self, weight_specs: Any) -> None:
    """Raises a UserError if the loss compares with the base, and a weight is trained that is no adapter's."""
    if self.reference_from == 'base':
      refuse_trained_base(weight_specs)

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of pairs.

    Args:
      predictions: as for `pair_log_probs`; optionally `aux`, as for LanguageModelLoss.
      batch: as for `pair_log_probs`.
    """
    pairs = pair_log_probs(predictions, batch)
    is_pair = (pairs.num_chosen > 0) & (pairs.num_rejected > 0)
    chosen, rejected = pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected
    if self.length_normalized:
      chosen = chosen / jnp.maximum(pairs.num_chosen, 1.0)
      rejected = rejected / jnp.maximum(pairs.num_rejected, 1.0)
    difference = chosen - rejected
    if self.kind == 'ipo':
      objective = jnp.square(difference - 1 / (2 * self.beta))
    else:
      objective = -jax.nn.log_sigmoid(self.beta * difference) * (1 - self.label_smoothing)
      if self.label_smoothing:
        objective -= jax.nn.log_sigmoid(-self.beta * difference) * self.label_smoothing
    per_pair = {
      'reward_margin': self.beta * difference,
      'reward_accuracy': (difference > 0).astype(jnp.float32),
      'chosen_reward': self.beta * chosen,
      'rejected_reward': self.beta * rejected,
      'chosen_log_prob': pairs.chosen,
      'rejected_log_prob': pairs.rejected,
    }
    # One sum over a stack: if B is sharded, each separate sum would be a separate all-reduce.
    stack = jnp.stack([objective, *per_pair.values(), jnp.ones_like(objective)])
    *totals, weight = jnp.sum(jnp.where(is_pair[None], stack, 0.0), axis=(1, 2))
    loss, *means = (jnp.where(weight == 0, 0.0, total / jnp.maximum(weight, 1.0)) for total in totals)
    metrics = {name: (mean, weight) for name, mean in zip(per_pair, means, strict=True)}
    metrics |= losses_by_source(objective, is_pair.astype(jnp.float32), batch)
    loss, metrics = self.add_aux_losses(loss, weight, metrics, predictions.get('aux', {}))
    per_example = {'reward_margin': jnp.sum(jnp.where(is_pair, self.beta * difference, 0.0), axis=-1)}
    return LossOutput(loss=loss, weight=weight, metrics=metrics, per_example=per_example)
