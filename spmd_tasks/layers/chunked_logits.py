"""Computes the LabelScores of logits [B, T, V] for a part of the tokens at a time, never all logits at once.

With a vocabulary of 128,256 the float32 logits of a row of 8,192 tokens are 4.2 GB, and their gradient is as large. The
backward pass computes each part again (a product with the softmax kernel, 2% of the step of an 8B model).

Shapes: B batch, T sequence, D model, V vocab, N chunks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.label_scores import LabelScores, predicted_label_scores


def label_scores_in_chunks(
  logits_of: Callable[[Any, jax.Array], jax.Array], weights: Any, x: jax.Array, labels: jax.Array, *, num_chunks: int
) -> LabelScores:
  """Computes `label_scores(logits_of(weights, x), labels)` for T / N tokens of each row at a time.

  Chunk n has the tokens n, n + N, n + 2 N, ... of a row, so that devices that share a sequence share every chunk.

  Args:
    logits_of: (weights, x [B, t, D]) -> float32 [B, t, V].
    weights: of the logits, a tree of arrays; their gradients are summed over the chunks in their own dtype.
    x, labels: [B, T, D] and int32 [B, T].
    num_chunks: N. A UserError if it does not divide T.
  """
  num_rows, length = labels.shape
  if num_chunks < 1 or length % num_chunks:
    raise UserError(
      f'num_logit_chunks={num_chunks} must divide the {length} tokens of a row: choose a divisor, or 1 for all at once.'
    )

  def chunks(array: jax.Array) -> jax.Array:
    return jnp.moveaxis(array.reshape(num_rows, length // num_chunks, num_chunks, *array.shape[2:]), 2, 0)

  def scores_of(weights: Any, x: jax.Array, labels: jax.Array) -> LabelScores:
    return predicted_label_scores({'logits': logits_of(weights, x)}, labels)

  scores_of = jax.checkpoint(scores_of, prevent_cse=False)
  scores = jax.lax.map(lambda xs: scores_of(weights, *xs), (chunks(x), chunks(labels)))
  return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 2).reshape(num_rows, length), scores)
