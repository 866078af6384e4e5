"""PreferenceLoss: direct preference optimisation (DPO) and its relatives ORPO and KTO, on packed pairs of answers.

Shapes: B batch, T sequence, V vocab, P the most pairs that a row can hold, T // 2. All results are float32.

A batch is PreferenceInput's (preferences.py): segments 1, 2 of a row are the chosen and the rejected answer of
its first pair, 3, 4 those of its second, and so on, each behind its prompt. For KTO a pair is one judged answer and,
behind the same prompt, the answer to another one.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.adapters.adapted_weights import AdapterNames, adapters_of, without_adapters
from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput, losses_by_source
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.layers.label_scores import predicted_label_scores
from spmd_tasks.layers.losses import WithAuxLosses
from spmd_tasks.learning.accumulation import split_microbatches
from spmd_tasks.learning.frozen_weights import FROZEN_TAG
from spmd_tasks.sharding.weights import leaves_by_name

_KINDS = ('sigmoid', 'ipo', 'orpo', 'kto')
_REFERENCES = {'start': 'batch', 'base': 'base'}


class PairLogProbs(NamedTuple):
  """Log-probabilities of both answers of each pair, float32 [B, P]; 0 where there is no pair.

  Fields:
    chosen, rejected: under the model.
    reference_chosen, reference_rejected: under the reference model.
    num_chosen, num_rejected: tokens of the answers.
    judgement: 1 where the chosen answer is a good one, -1 where it is a bad one; 0 in batches that do not say it.
  """

  chosen: jax.Array
  rejected: jax.Array
  reference_chosen: jax.Array
  reference_rejected: jax.Array
  num_chosen: jax.Array
  num_rejected: jax.Array
  judgement: jax.Array


def pair_log_probs(predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> PairLogProbs:
  """Sums the log-probabilities of the answers' tokens.

  Args:
    predictions: `logits` float [B, T, V], or in their place `label_scores`.
    batch: `labels`, `segment_ids` int32 [B, T], `weights` float [B, T] (1 on answers), and `reference_log_probs`
      float [B, T], whose sum over a segment is the reference model's log-probability of its answer; optionally
      `judgement` float [B, T], whose sum over the first segment of a pair is that of the pair.
  """
  weights = batch['weights'].astype(jnp.float32)
  log_probs = answer_log_probs(predictions, batch)
  judgement = batch.get('judgement', jnp.zeros_like(weights))
  totals = _sums_of_segments(batch, [log_probs, batch['reference_log_probs'], weights, judgement])
  chosen, rejected = (jnp.moveaxis(totals[:, side::2], -1, 0) for side in (0, 1))  # [4, B, P]
  return PairLogProbs(chosen[0], rejected[0], chosen[1], rejected[1], chosen[2], rejected[2], chosen[3])


def _sums_of_segments(batch: Mapping[str, jax.Array], columns: Sequence[jax.Array]) -> jax.Array:
  """Sums K arrays [B, T] over each segment of 2 P: float32 [B, 2 P, K]."""
  num_segments = batch['segment_ids'].shape[1] // 2 * 2

  def sum_segments(values, segment_ids):
    return jax.ops.segment_sum(values, segment_ids, num_segments=num_segments + 1)

  per_token = jnp.stack([column.astype(jnp.float32) for column in columns], axis=-1)
  return jax.vmap(sum_segments)(per_token, batch['segment_ids'])[:, 1:]  # without padding


def answer_log_probs(
  predictions: Mapping[str, Any], batch: Mapping[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
  """Returns the log-probability of each token of an answer by logits / temperature, and 0 elsewhere, float32 [B, T]."""
  weights = batch['weights'].astype(jnp.float32)
  if temperature != 1:
    if 'logits' not in predictions:
      raise UserError(f'temperature={temperature} needs all logits: set task.model.num_logit_chunks=1.')
    predictions = {'logits': predictions['logits'].astype(jnp.float32) / temperature}
  return jnp.where(weights == 0, 0.0, _log_probs(predictions, batch)) * weights


def _log_probs(predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
  """The log-probability of every token, float32 [B, T]; NaN for an unknown one."""
  scores = predicted_label_scores(predictions, batch['labels'])
  return jnp.where(scores.is_known, scores.label_logit - scores.log_normalizer, jnp.nan)


def base_log_probs(
  task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
  """Returns `answer_log_probs` under the task's model without its adapters, without a gradient."""
  names = [AdapterNames(kernel=name) for name in adapters_of(task.model)]
  left_out = {name for each in names for name in (each.a, each.b, each.magnitude)}
  flat = traverse_util.flatten_dict(variables['params'], sep='/')
  weights = traverse_util.unflatten_dict({name: leaf for name, leaf in flat.items() if name not in left_out}, sep='/')
  base = {**variables, 'params': jax.lax.stop_gradient(weights)}
  predictions = dataclasses.replace(task, model=without_adapters(task.model)).predict(base, batch)
  return answer_log_probs(predictions, batch, temperature)


def reference_from(reference: str) -> str:
  """A loss's `reference_from` for a recipe's `reference`, 'start' or 'base'; raises a UserError for another one."""
  if reference not in _REFERENCES:
    raise UserError(f'reference = {reference!r} must be one of {", ".join(map(repr, _REFERENCES))}.')
  return _REFERENCES[reference]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLoss(WithAuxLosses):
  """A loss that compares the model with a reference.

  Fields:
    reference_from: where the log-probabilities of the reference are from: the 'batch', or the 'base' of the model,
      which is the model without its adapters: every step runs it too.
    aux_loss_weights, num_aux_layers: as in WithAuxLosses.
  """

  reference_from: str = 'batch'

  def __post_init__(self):
    if self.reference_from not in _REFERENCES.values():
      raise UserError(f"reference_from={self.reference_from!r} must be one of 'batch', 'base'.")

  @property
  def compares_with_base(self) -> bool:
    return self.reference_from == 'base'

  @property
  def temperature(self) -> float:
    """All log-probabilities are of logits / temperature."""
    return 1.0

  def prepare_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]
  ) -> Mapping[str, jax.Array]:
    """Returns the batch with the log-probabilities of the model without its adapters, if the reference is that."""
    if not self.compares_with_base:
      return batch
    return {**batch, 'reference_log_probs': base_log_probs(task, variables, batch, self.temperature)}

  def check_weights(self, weight_specs: Any) -> None:
    """Raises a UserError if the loss compares with the base, and a weight is trained that is no adapter's."""
    specs = leaves_by_name(weight_specs)  # of a quantized kernel its parts, which have its tags
    trained = [name for name, spec in specs.items() if not {FROZEN_TAG, ADAPTER_TAG} & {*spec.tags}]
    if self.compares_with_base and (trained or not any(ADAPTER_TAG in spec.tags for spec in specs.values())):
      found = f'{trained[0]} is trained' if trained else 'there are no adapters'
      raise UserError(
        f'the loss compares with the base, the model without its adapters, but {found}: train adapters alone, as '
        "finetune.LoraDpo does, or take the model that training starts from as the reference (reference='start')."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss(ReferenceLoss):
  """Mean over pairs of a function of how much more than the reference the model prefers the chosen answer.

  With h = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)), p the model and r the reference:

    sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing: DPO (Rafailov et al., 2023)
    ipo      (h - 1 / (2 beta))^2: IPO (Azar et al., 2023), whose regularisation tau is `beta`
    orpo     -beta log sigmoid(log odds(chosen) - log odds(rejected)), odds(y) = p / (1 - p) with p the geometric mean
             over the tokens, beside the mean of -log p over all tokens of chosen answers and their prompts; there is no
             reference: ORPO (Hong et al., 2024)
    kto      w (1 - sigmoid(beta d)), d = log p(y) - log r(y) - z of a good answer y and the negative of that of a bad
             one, w the weight of its kind, and z, without a gradient, the mean of log p - log r over all answers of the
             batch behind prompts that they do not belong to, at least 0: KTO (Ethayarajh et al., 2024)

  The rewards in the metrics are beta (log p - log r). A pair counts once, whatever the length of its answers. The means
  over tokens of orpo and z of kto are those of the whole batch, also where gradients are accumulated over microbatches.

  Fields:
    kind: 'sigmoid', 'ipo', 'orpo' or 'kto'.
    beta: how strongly the model is held to the reference; of orpo, how much the odds count.
    length_normalized: every log-probability is divided by the number of tokens of its answer, as in Tülu 3 and SimPO;
      TRL's IPO is this one. Not of orpo, which always does so, and kto.
    label_smoothing: the probability that a label is wrong (conservative DPO, Mitchell, 2023); 'sigmoid' only.
    good_weight, bad_weight: w of kto.
    reference_from, aux_loss_weights, num_aux_layers: as in ReferenceLoss.
  """

  kind: str = 'sigmoid'
  beta: float = 0.1
  length_normalized: bool = False
  label_smoothing: float = 0.0
  good_weight: float = 1.0
  bad_weight: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    if self.kind not in _KINDS:
      raise UserError(f'kind={self.kind!r} must be one of {", ".join(map(repr, _KINDS))}.')
    if not self.beta > 0:
      raise UserError(f'beta={self.beta} must be positive: 0.1 is usual.')
    if not 0.0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind != 'sigmoid'):
      raise UserError(
        f"label_smoothing={self.label_smoothing} must be at least 0 and less than 0.5, and 0 unless kind is 'sigmoid'."
      )
    if self.kind == 'orpo' and self.reference_from == 'base':
      raise UserError("kind='orpo' has no reference, but reference_from is 'base': leave it out.")
    if self.length_normalized and self.kind in ('orpo', 'kto'):
      raise UserError(f"length_normalized=True is of kind 'sigmoid' and 'ipo', not of {self.kind!r}: leave it out.")

  def prepare_whole_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array], num_microbatches: int
  ) -> Mapping[str, jax.Array]:
    """Returns the batch with what depends on all its microbatches: z of kto, the weights of tokens of orpo."""
    if self.kind == 'orpo':
      return {**batch, 'chosen_weights': _chosen_weights(batch)}
    if self.kind != 'kto':
      return batch

    def sums_of(part: Mapping[str, jax.Array]) -> jax.Array:
      part = self.prepare_batch(task, variables, part)
      return _divergence_sums(pair_log_probs(task.predict(variables, part), part))

    sums = jax.lax.map(sums_of, split_microbatches(batch, num_microbatches))
    divergence = _divergence(jnp.sum(sums, axis=0))
    return {**batch, 'divergence': jnp.broadcast_to(divergence, batch['labels'].shape[:1])}

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of pairs.

    Args:
      predictions: as for `pair_log_probs`; optionally `aux`, as for LanguageModelLoss.
      batch: as for `pair_log_probs`; that of kto has `judgement`.
    """
    pairs = pair_log_probs(predictions, batch)
    is_pair = (pairs.num_chosen > 0) & (pairs.num_rejected > 0)
    chosen, rejected = pairs.chosen, pairs.rejected
    if self.kind != 'orpo':
      chosen, rejected = chosen - pairs.reference_chosen, rejected - pairs.reference_rejected
    if self.length_normalized or self.kind == 'orpo':
      chosen = chosen / jnp.maximum(pairs.num_chosen, 1.0)
      rejected = rejected / jnp.maximum(pairs.num_rejected, 1.0)
    difference = chosen - rejected
    masks = {}
    per_pair = {
      'reward_margin': self.beta * difference,
      'reward_accuracy': (difference > 0).astype(jnp.float32),
      'chosen_reward': self.beta * chosen,
      'rejected_reward': self.beta * rejected,
      'chosen_log_prob': pairs.chosen,
      'rejected_log_prob': pairs.rejected,
    }
    if self.kind == 'ipo':
      objective = jnp.square(difference - 1 / (2 * self.beta))
    elif self.kind == 'orpo':
      log_odds = [log_prob - _log_of_rest(log_prob) for log_prob in (chosen, rejected)]
      objective = -self.beta * jax.nn.log_sigmoid(log_odds[0] - log_odds[1])
    elif self.kind == 'kto':
      sums = _divergence_sums(pairs)
      divergence = batch['divergence'][:, None] if 'divergence' in batch else _divergence(sums)
      is_good = pairs.judgement > 0
      weights = jnp.where(is_good, self.good_weight, self.bad_weight)
      objective = weights * (1 - jax.nn.sigmoid(self.beta * pairs.judgement * (chosen - divergence)))
      masks = {'good': is_pair & is_good, 'bad': is_pair & (pairs.judgement < 0)}
      per_pair = {'kl': jnp.broadcast_to(divergence, chosen.shape)}
      for name in masks:
        per_pair |= {f'{name}_reward': self.beta * chosen, f'{name}_log_prob': pairs.chosen}
    else:
      objective = -jax.nn.log_sigmoid(self.beta * difference) * (1 - self.label_smoothing)
      if self.label_smoothing:
        objective -= jax.nn.log_sigmoid(-self.beta * difference) * self.label_smoothing
    # One sum over a stack: if B is sharded, each separate sum would be a separate all-reduce.
    counted = jnp.stack([is_pair, *(masks.get(name.partition('_')[0], is_pair) for name in per_pair)])  # [N, B, P]
    values = jnp.where(counted, jnp.stack([objective, *per_pair.values()]), 0.0)
    totals, (weight, *weights) = jnp.sum(jnp.stack([values, counted.astype(jnp.float32)]), axis=(2, 3))
    loss, *means = totals / jnp.maximum(jnp.stack([weight, *weights]), 1.0)
    metrics = {name: (mean, count) for name, mean, count in zip(per_pair, means, weights, strict=True)}
    if self.kind == 'orpo':
      shares = batch.get('chosen_weights', _chosen_weights(batch))
      nll = -jnp.sum(jnp.where(shares == 0, 0.0, _log_probs(predictions, batch)) * shares) / jnp.maximum(weight, 1.0)
      loss, metrics['chosen_nll'] = loss + nll, (nll, weight)
    metrics |= losses_by_source(objective, is_pair.astype(jnp.float32), batch)
    loss, metrics = self.add_aux_losses(loss, weight, metrics, predictions.get('aux', {}))
    name, rewards = ('reward', chosen) if self.kind == 'kto' else ('reward_margin', difference)
    per_example = {name: jnp.sum(jnp.where(is_pair, self.beta * rewards, 0.0), axis=-1)}
    return LossOutput(loss=loss, weight=weight, metrics=metrics, per_example=per_example)


def _log_of_rest(log_prob: jax.Array) -> jax.Array:
  """log(1 - exp(x)) for x < 0; also where there is no pair, and x is 0, it has a finite gradient."""
  return jnp.log(-jnp.expm1(jnp.minimum(log_prob, -1e-7)))


def _chosen_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
  """float32 [B, T]: of the tokens of chosen answers and their prompts, so that a sum becomes a mean times the pairs."""
  num_tokens = _sums_of_segments(batch, [batch['weights']])[..., 0]  # [B, 2 P]
  is_pair = (num_tokens[:, 0::2] > 0) & (num_tokens[:, 1::2] > 0)
  segments = batch['segment_ids']
  is_chosen = jnp.take_along_axis(is_pair, jnp.maximum(segments - 1, 0) // 2, axis=1) & (segments % 2 == 1)
  return is_chosen * (jnp.sum(is_pair) / jnp.maximum(jnp.sum(is_chosen), 1.0))


def _divergence_sums(pairs: PairLogProbs) -> jax.Array:
  """float32 [2]: log p - log r summed over the answers behind prompts that they do not belong to; their number."""
  is_answer = pairs.num_rejected > 0
  differences = jnp.where(is_answer, pairs.rejected - pairs.reference_rejected, 0.0)
  return jax.lax.stop_gradient(jnp.sum(jnp.stack([differences, is_answer.astype(jnp.float32)]), axis=(1, 2)))


def _divergence(sums: jax.Array) -> jax.Array:
  return jnp.maximum(sums[0] / jnp.maximum(sums[1], 1.0), 0.0)
