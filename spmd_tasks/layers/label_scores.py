"""LabelScores: what a language-model loss reads of the logits [B, T, V], a few numbers per token.

`in_chunks` computes them for a part of the tokens at a time, so that all logits are never in memory. With a vocabulary
of 128,256, the float32 logits of a row of 8,192 tokens take 4.2 GB, and so does their gradient. The backward pass
recomputes each chunk (a product with the softmax kernel, 2% of the step of an 8B model).

Shapes: B batch, T sequence, D model, V vocab, N chunks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError


class LabelScores(struct.PyTreeNode):
  """The numbers that a loss needs of logits [..., V] and labels [...]: float32 [...], except `is_known`.

  Fields:
    log_normalizer: logsumexp of the logits.
    label_logit: the logit of the label; 0 if the label is not in [0, V).
    mean_logit: the mean of all logits, for label smoothing.
    highest_other: the highest logit except the label's, without a gradient.
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
  """Returns the `label_scores` [B, T] of a model's predictions, or computes them from its `logits` [B, T, V]."""
  scores = predictions.get('label_scores')
  return label_scores(predictions['logits'], labels) if scores is None else scores


def in_chunks(function: Callable[..., Any], weights: Any, *arrays: jax.Array, num_chunks: int) -> Any:
  """Computes function(weights, *arrays) for T / N tokens of each row at a time.

  Chunk n has tokens n, n + N, n + 2 N, ... of a row, so that every device that holds a part of a row computes a part of
  every chunk.

  Args:
    function: returns a tree of arrays [..., B, t] for t tokens.
    weights: a tree of arrays; their gradients are summed over the chunks in their own dtype.
    arrays: [B, T, ...].
    num_chunks: N.

  Raises:
    UserError: `num_chunks` does not divide T.
  """
  num_rows, length = arrays[0].shape[:2]
  if length % num_chunks:
    raise UserError(
      f'num_logit_chunks={num_chunks} must divide the {length} tokens of a row: choose a divisor, or 1 for all at once.'
    )
  chunks = [jnp.moveaxis(x.reshape(num_rows, -1, num_chunks, *x.shape[2:]), 2, 0) for x in arrays]
  function = jax.checkpoint(function, prevent_cse=False)
  results = jax.lax.map(lambda xs: function(weights, *xs), chunks)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1).reshape(*x.shape[1:-1], length), results)
