"""LabelScores: what a language-model loss needs to know of its logits [B, T, V], a few numbers per token.

chunked_logits.py computes them without ever holding all logits. Shapes: B batch, T sequence, V vocab.
"""

from collections.abc import Mapping
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import by_row


class LabelScores(struct.PyTreeNode):
  """The numbers that a loss needs of logits [..., V] and labels [...]; float32 [...], but for `is_known`.

  Fields:
    log_normalizer: logsumexp of the logits.
    label_logit: the logit of the label; 0 if there is no such token.
    mean_logit: the mean of all logits, which label smoothing needs.
    highest_other: the highest logit but for the label's, without a gradient.
    is_known: bool, whether the label is in [0, V).
    vocab_size: V, an int.
  """

  log_normalizer: jax.Array
  label_logit: jax.Array
  mean_logit: jax.Array
  highest_other: jax.Array
  is_known: jax.Array
  vocab_size: int = struct.field(pytree_node=False)


def label_scores(logits: jax.Array, labels: jax.Array) -> LabelScores:
  """Computes the LabelScores of logits [B, T, V] and labels int32 [B, T]."""
  logits = logits.astype(jnp.float32)
  # A comparison and a sum instead of a gather: if V is sharded, every device sums its own slice.
  is_label = labels[..., None] == jnp.arange(logits.shape[-1])[None, None, :]
  return LabelScores(
    log_normalizer=jax.nn.logsumexp(logits, axis=-1),
    label_logit=jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1),
    mean_logit=jnp.mean(logits, axis=-1),
    # XLA's CPU backend runs an argmax 20 times slower than a max (and a max over a `where` 8 times slower, hence the
    # subtraction), and over a sharded V an argmax also moves indices.
    highest_other=jnp.max(jax.lax.stop_gradient(logits) - 1e30 * is_label, axis=-1),
    is_known=(labels >= 0) & (labels < logits.shape[-1]),
    vocab_size=logits.shape[-1],
  )


def predicted_label_scores(predictions: Mapping[str, Any], labels: jax.Array) -> LabelScores:
  """Returns the `label_scores` of a model's predictions [B, T], or those of its `logits` [B, T, V]."""
  scores = predictions.get('label_scores')
  return by_row(label_scores, predictions['logits'], labels, num_dims=2) if scores is None else scores
