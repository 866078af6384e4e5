"""PreferenceLoss: direct preference optimization (DPO) and its relatives IPO, ORPO and KTO, on packed pairs of answers.

Shapes: B batch, T sequence, V vocab, P = T // 2, the maximum number of pairs in a row. All results are float32.

Batches are PreferenceInput's (preferences.py): segments 1 and 2 of a row are the prompt with the chosen and the
rejected answer of its first pair, segments 3 and 4 its second pair, and so on. For KTO a pair is a judged answer, and
the same prompt with the answer to another prompt.
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
from spmd_tasks.layers.losses import WithAuxLosses
from spmd_tasks.layers.softmax_head import label_scores_of
from spmd_tasks.learning.accumulation import split_microbatches
from spmd_tasks.learning.frozen_weights import FROZEN_TAG
from spmd_tasks.sharding.weights import leaves_by_name

_KINDS = ('sigmoid', 'ipo', 'orpo', 'kto')
_REFERENCES = {'start': 'batch', 'base': 'base'}


class PairLogProbs(NamedTuple):
  """Log-probabilities of both answers of each pair, float32 [B, P]; 0 if there is no pair.

  Fields:
    chosen, rejected: log-probabilities under the model.
    reference_chosen, reference_rejected: log-probabilities under the reference model.
    num_chosen, num_rejected: numbers of tokens.
    judgement: 1 if the chosen answer is good, -1 if it is bad, 0 if the batch has no judgements.
  """

  chosen: jax.Array
  rejected: jax.Array
  reference_chosen: jax.Array
  reference_rejected: jax.Array
  num_chosen: jax.Array
  num_rejected: jax.Array
  judgement: jax.Array


def pair_log_probs(log_probs: jax.Array, batch: Mapping[str, jax.Array]) -> PairLogProbs:
  """Sums the log-probabilities of the answers' tokens.

  Args:
    log_probs: `label_log_probs` of the model, float32 [B, T].
    batch: `labels`, `segment_ids` int32 [B, T]; `weights` float [B, T], 1 on answers; `reference_log_probs`
      float [B, T], whose sum over a segment is the reference model's log-probability of its answer; optionally
      `judgement` float [B, T], whose sum over the first segment of a pair is the pair's judgement.
  """
  weights = batch['weights'].astype(jnp.float32)
  log_probs = jnp.where(weights == 0, 0.0, log_probs) * weights
  judgement = batch.get('judgement', jnp.zeros_like(weights))
  totals = _sums_of_segments(batch, [log_probs, batch['reference_log_probs'], weights, judgement])
  chosen, rejected = (jnp.moveaxis(totals[:, side::2], -1, 0) for side in (0, 1))  # [4, B, P]
  return PairLogProbs(chosen[0], rejected[0], chosen[1], rejected[1], chosen[2], rejected[2], chosen[3])


def _sums_of_segments(batch: Mapping[str, jax.Array], columns: Sequence[jax.Array]) -> jax.Array:
  """Sums K arrays [B, T] over each of 2 P segments: float32 [B, 2 P, K]."""
  num_segments = batch['segment_ids'].shape[1] // 2 * 2

  def sum_segments(values, segment_ids):
    return jax.ops.segment_sum(values, segment_ids, num_segments=num_segments + 1)

  per_token = jnp.stack([column.astype(jnp.float32) for column in columns], axis=-1)
  return jax.vmap(sum_segments)(per_token, batch['segment_ids'])[:, 1:]  # without padding


def answer_log_probs(
  predictions: Mapping[str, Any], batch: Mapping[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
  """Returns the log-probabilities of the answers' tokens by logits / temperature, and 0 elsewhere: float32 [B, T]."""
  weights = batch['weights'].astype(jnp.float32)
  return jnp.where(weights == 0, 0.0, label_log_probs(predictions, batch, temperature)) * weights


def label_log_probs(
  predictions: Mapping[str, Any], batch: Mapping[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
  """Returns the log-probability of each label, float32 [B, T]; NaN if a label is outside the vocabulary.

  The predictions have `logits` float [B, T, V], or a SoftmaxHead as `softmax_head`.
  """
  scores = label_scores_of(predictions, batch['labels'], temperature)
  return jnp.where(scores.is_known, scores.label_logit - scores.log_normalizer, jnp.nan)


def base_log_probs(
  task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
  """Returns `answer_log_probs` of the task's model without its adapters, and without a gradient."""
  adapters = [AdapterNames(kernel=name) for name in adapters_of(task.model)]
  adapter_weights = {name for names in adapters for name in (names.a, names.b, names.magnitude)}
  flat = traverse_util.flatten_dict(variables['params'], sep='/')
  weights = {name: leaf for name, leaf in flat.items() if name not in adapter_weights}
  params = jax.lax.stop_gradient(traverse_util.unflatten_dict(weights, sep='/'))
  base = {**variables, 'params': params}
  predictions = dataclasses.replace(task, model=without_adapters(task.model)).predict(base, batch)
  return answer_log_probs(predictions, batch, temperature)


def reference_from(reference: str) -> str:
  """Returns a loss's `reference_from` for a recipe's `reference`. Raises a UserError unless it is 'start' or 'base'."""
  if reference not in _REFERENCES:
    raise UserError(f'reference = {reference!r} must be one of {", ".join(map(repr, _REFERENCES))}.')
  return _REFERENCES[reference]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLoss(WithAuxLosses):
  """Base class of losses that compare the model with a reference model.

  Fields:
    reference_from: 'batch' if batches have the reference's log-probabilities, or 'base' if each step computes them with
      the model without its adapters.
    aux_loss_weights, num_aux_layers: see WithAuxLosses.
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
    """The temperature by which all logits are divided."""
    return 1.0

  def prepare_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]
  ) -> Mapping[str, jax.Array]:
    """Adds the log-probabilities of the model without its adapters, if it is the reference."""
    if not self.compares_with_base:
      return batch
    return {**batch, 'reference_log_probs': base_log_probs(task, variables, batch, self.temperature)}

  def check_weights(self, weight_specs: Any) -> None:
    """Raises a UserError if the loss compares with the base, but weights other than adapters are trained."""
    specs = leaves_by_name(weight_specs)  # the parts of a quantized kernel have its tags
    trained = [name for name, spec in specs.items() if not {FROZEN_TAG, ADAPTER_TAG} & {*spec.tags}]
    if self.compares_with_base and (trained or not any(ADAPTER_TAG in spec.tags for spec in specs.values())):
      problem = f'{trained[0]} is trained' if trained else 'there are no adapters'
      raise UserError(
        f"reference='base' is the model without its adapters, but {problem}: train only adapters, like "
        "finetune.LoraDpo, or set reference='start'."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss(ReferenceLoss):
  """The mean over pairs of a loss of how much more the model prefers the chosen answer than the reference does.

  With h = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)), p the model and r the reference:

    sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing: DPO (Rafailov et al., 2023)
    ipo      (h - 1 / (2 beta))^2: IPO (Azar et al., 2023), with its regularization tau as `beta`
    orpo     -beta log sigmoid(log odds(chosen) - log odds(rejected)), where odds(y) = p / (1 - p) and p is the
             geometric mean over tokens, plus the mean of -log p over all tokens of chosen answers and their prompts;
             without a reference: ORPO (Hong et al., 2024)
    kto      w (1 - sigmoid(+-beta (log p(y) - log r(y) - z))), + for a good and - for a bad answer y, w the weight of
             good or bad answers, z = max(0, mean of log p - log r over the batch's answers to other prompts), without a
             gradient: KTO (Ethayarajh et al., 2024)

  The rewards in the metrics are beta (log p - log r). Each pair counts once, whatever the length of its answers. The
  mean over tokens in orpo, and z in kto, are computed over the whole batch, even if it has several microbatches.

  Fields:
    kind: 'sigmoid', 'ipo', 'orpo' or 'kto'.
    beta: how strongly the model is held to the reference; for orpo, the weight of the odds.
    length_normalized: whether to divide log-probabilities by the number of tokens of the answer, as in Tülu 3, SimPO
      and TRL's IPO; for 'sigmoid' and 'ipo' only. orpo always does.
    label_smoothing: the probability that a label is wrong (conservative DPO, Mitchell, 2023); for 'sigmoid' only.
    good_weight, bad_weight: w of kto.
    reference_from, aux_loss_weights, num_aux_layers: see ReferenceLoss.
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
      raise UserError(f'beta={self.beta} must be positive, such as 0.1.')
    if not 0.0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind != 'sigmoid'):
      raise UserError(f"label_smoothing={self.label_smoothing} must be in [0, 0.5), and 0 unless kind is 'sigmoid'.")
    if self.kind == 'orpo' and self.reference_from == 'base':
      raise UserError("kind='orpo' has no reference, but reference_from is 'base': remove it.")
    if self.length_normalized and self.kind in ('orpo', 'kto'):
      raise UserError(f"length_normalized=True is for kind='sigmoid' and 'ipo', not {self.kind!r}: remove it.")

  def prepare_whole_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array], num_microbatches: int
  ) -> Mapping[str, jax.Array]:
    """Adds values that depend on all microbatches: z of kto, or the weights of tokens of orpo."""
    if self.kind == 'orpo':
      return {**batch, 'chosen_weights': _chosen_weights(batch)}
    if self.kind != 'kto':
      return batch

    def sums_of(part: Mapping[str, jax.Array]) -> jax.Array:
      part = self.prepare_batch(task, variables, part)
      return _divergence_sums(pair_log_probs(label_log_probs(task.predict(variables, part), part), part))

    sums = jax.lax.map(sums_of, split_microbatches(batch, num_microbatches))
    divergence = _divergence(jnp.sum(sums, axis=0))
    return {**batch, 'divergence': jnp.broadcast_to(divergence, batch['labels'].shape[:1])}

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of pairs.

    Args:
      predictions: see `label_log_probs`; optionally `aux`, see LanguageModelLoss.
      batch: see `pair_log_probs`; kto requires `judgement`.
    """
    log_probs = label_log_probs(predictions, batch)
    pairs = pair_log_probs(log_probs, batch)
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
    mask = jnp.stack([is_pair, *(masks.get(name.partition('_')[0], is_pair) for name in per_pair)])  # [N, B, P]
    values = jnp.where(mask, jnp.stack([objective, *per_pair.values()]), 0.0)
    totals, (weight, *weights) = jnp.sum(jnp.stack([values, mask.astype(jnp.float32)]), axis=(2, 3))
    loss, *means = totals / jnp.maximum(jnp.stack([weight, *weights]), 1.0)
    metrics = {name: (mean, count) for name, mean, count in zip(per_pair, means, weights, strict=True)}
    if self.kind == 'orpo':
      shares = batch.get('chosen_weights', _chosen_weights(batch))
      nll = -jnp.sum(jnp.where(shares == 0, 0.0, log_probs) * shares) / jnp.maximum(weight, 1.0)
      loss, metrics['chosen_nll'] = loss + nll, (nll, weight)
    metrics |= losses_by_source(objective, is_pair.astype(jnp.float32), batch)
    loss, metrics = self.add_aux_losses(loss, weight, metrics, predictions.get('aux', {}))
    name, rewards = ('reward', chosen) if self.kind == 'kto' else ('reward_margin', difference)
    per_example = {name: jnp.sum(jnp.where(is_pair, self.beta * rewards, 0.0), axis=-1)}
    return LossOutput(loss=loss, weight=weight, metrics=metrics, per_example=per_example)


def _log_of_rest(log_prob: jax.Array) -> jax.Array:
  """Returns log(1 - exp(x)) for x <= 0, with a finite gradient at 0, the value if there is no pair."""
  return jnp.log(-jnp.expm1(jnp.minimum(log_prob, -1e-7)))


def _chosen_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns equal weights of the tokens of chosen answers and their prompts, float32 [B, T]; they sum to the pairs."""
  num_tokens = _sums_of_segments(batch, [batch['weights']])[..., 0]  # [B, 2 P]
  is_pair = (num_tokens[:, 0::2] > 0) & (num_tokens[:, 1::2] > 0)
  segments = batch['segment_ids']
  is_chosen = jnp.take_along_axis(is_pair, jnp.maximum(segments - 1, 0) // 2, axis=1) & (segments % 2 == 1)
  return is_chosen * (jnp.sum(is_pair) / jnp.maximum(jnp.sum(is_chosen), 1.0))


def _divergence_sums(pairs: PairLogProbs) -> jax.Array:
  """Returns the sum of log p - log r over the answers to other prompts, and their number: float32 [2]."""
  is_answer = pairs.num_rejected > 0
  differences = jnp.where(is_answer, pairs.rejected - pairs.reference_rejected, 0.0)
  return jax.lax.stop_gradient(jnp.sum(jnp.stack([differences, is_answer.astype(jnp.float32)]), axis=(1, 2)))


def _divergence(sums: jax.Array) -> jax.Array:
  return jnp.maximum(sums[0] / jnp.maximum(sums[1], 1.0), 0.0)
