"""ScoreLoss: the loss of reward models, classifiers, regression and embeddings, on batches of ScoredInput.

Shapes: B batch, T sequence, S texts of a row, N labels or features of a vector. All results are float32.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput, losses_by_source
from spmd_tasks.layers.losses import WithAuxLosses

_KINDS = ('bradley_terry', 'classification', 'regression', 'contrastive')


def text_vectors(
  predictions: Mapping[str, Any], batch: Mapping[str, jax.Array], num_texts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the vectors of each row's texts [B, S, N], their targets [B, S], and which texts exist, bool [B, S].

  Args:
    predictions: `logits` float [B, T, N].
    batch: `weights`, `targets` float [B, T], `segment_ids` int32 [B, T].
    num_texts: S; further texts of a row are ignored.
  """
  weights = batch['weights'].astype(jnp.float32)
  values = jnp.where(weights[..., None] == 0, 0.0, predictions['logits']) * weights[..., None]
  columns = jnp.concatenate([values, jnp.stack([batch['targets'], weights], axis=-1)], axis=-1)
  ids = jnp.where(batch['segment_ids'] > num_texts, 0, batch['segment_ids'])
  sums = jax.vmap(lambda rows, ids: jax.ops.segment_sum(rows, ids, num_segments=num_texts + 1))(columns, ids)[:, 1:]
  return sums[..., :-2], sums[..., -2], sums[..., -1] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreLoss(WithAuxLosses):
  """The mean over texts, or over pairs of texts, of one of these losses:

    bradley_terry   -log sigmoid(score(chosen) - score(rejected) - margin)
                    + center_weight (score(chosen) + score(rejected))^2
                    (Ouyang et al., 2022; Eisenstein et al., 2023)
    classification  cross-entropy of N scores with the label
    regression      (score - label)^2
    contrastive     cross-entropy of identifying a pair's second text by `scale` times its cosine similarity with the
                    first text, among the second texts of all rows of the microbatch, on all devices (InfoNCE: van den
                    Oord et al., 2018); a row has one pair

  Fields:
    kind: the name of the loss.
    center_weight: for bradley_terry only.
    scale: for contrastive only; 20 as in sentence-transformers.
    aux_loss_weights, num_aux_layers: see WithAuxLosses.
  """

  kind: str
  center_weight: float = 0.0
  scale: float = 20.0

  def __post_init__(self):
    if self.kind not in _KINDS:
      raise UserError(f'kind={self.kind!r} must be one of {", ".join(map(repr, _KINDS))}.')
    if not self.scale > 0 or self.center_weight < 0:
      raise UserError(f'scale={self.scale} must be positive, and center_weight={self.center_weight} at least 0.')

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of texts or pairs; see `text_vectors` for the arguments."""
    num_texts = 2 if self.kind == 'contrastive' else batch['weights'].shape[1] // 2 * 2
    vectors, targets, is_text = text_vectors(predictions, batch, num_texts)
    objective, values, mask = getattr(self, f'_{self.kind}')(vectors, targets, is_text)
    stack = jnp.where(mask, jnp.stack([objective, *values.values()]), 0.0)
    *totals, weight = jnp.sum(jnp.concatenate([stack, mask[None].astype(jnp.float32)]), axis=(1, 2))
    loss, *means = (total / jnp.maximum(weight, 1.0) for total in totals)
    metrics = {name: (mean, weight) for name, mean in zip(values, means, strict=True)}
    metrics |= losses_by_source(objective, mask.astype(jnp.float32), batch)
    loss, metrics = self.add_aux_losses(loss, weight, metrics, predictions.get('aux', {}))
    return LossOutput(loss=loss, weight=weight, metrics=metrics)

  # Each method returns the losses, metrics by name, and the mask of texts or pairs, [B, S] or [B, S / 2] each.

  def _bradley_terry(self, vectors: jax.Array, targets: jax.Array, is_text: jax.Array) -> Any:
    chosen, rejected = vectors[:, 0::2, 0], vectors[:, 1::2, 0]
    objective = -jax.nn.log_sigmoid(chosen - rejected - targets[:, 0::2])
    if self.center_weight:
      objective += self.center_weight * jnp.square(chosen + rejected)
    values = {
      'reward_accuracy': (chosen > rejected).astype(jnp.float32),
      'reward_margin': chosen - rejected,
      'chosen_reward': chosen,
      'rejected_reward': rejected,
    }
    return objective, values, is_text[:, 0::2] & is_text[:, 1::2]

  def _classification(self, vectors: jax.Array, targets: jax.Array, is_text: jax.Array) -> Any:
    labels, num_labels = targets.astype(jnp.int32), vectors.shape[-1]
    objective = optax.softmax_cross_entropy_with_integer_labels(vectors, jnp.clip(labels, 0, num_labels - 1))
    objective = jnp.where((labels >= 0) & (labels < num_labels), objective, jnp.nan)
    return objective, {'accuracy': (jnp.argmax(vectors, axis=-1) == labels).astype(jnp.float32)}, is_text

  def _regression(self, vectors: jax.Array, targets: jax.Array, is_text: jax.Array) -> Any:
    difference = vectors[..., 0] - targets
    return jnp.square(difference), {'absolute_error': jnp.abs(difference)}, is_text

  def _contrastive(self, vectors: jax.Array, targets: jax.Array, is_text: jax.Array) -> Any:
    is_pair = jnp.all(is_text, axis=1, keepdims=True)  # [B, 1]
    square = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    vectors = vectors * jax.lax.rsqrt(jnp.where(is_pair[..., None], jnp.maximum(square, 1e-24), 1.0))
    similarity = self.scale * jnp.einsum('BN,CN->BC', vectors[:, 0], vectors[:, 1], precision='highest')
    scores = jnp.where(is_pair[:, 0][None, :], similarity, -1e30)
    positive = jnp.diagonal(scores)
    objective = jnp.where(is_pair[:, 0], jax.nn.logsumexp(scores, axis=1) - positive, 0.0)
    is_highest = (positive >= jnp.max(scores, axis=1)).astype(jnp.float32)
    metrics = {'accuracy': is_highest[:, None], 'similarity': positive[:, None] / self.scale}
    return objective[:, None], metrics, is_pair
