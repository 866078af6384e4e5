"""ScoreEmbedding: a token embedding whose logits score the text instead of the next token.

Shapes: B batch, T sequence, D model, N labels.
"""

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import FanInNormal, declare_weight
from spmd_tasks.layers.embedding import TokenEmbedding
from spmd_tasks.sharding import SplitDims


class ScoreEmbedding(TokenEmbedding, kw_only=True):
  """Replaces TokenEmbedding in a LanguageModel: `logits` [B, T, N] are the scores of the text up to each token.

  Weights: `table` [V, D] and `score_kernel` [D, N], as in Hugging Face's `...ForSequenceClassification`.

  Fields:
    num_labels: N; 0 for no head: the logits are then the final activations [B, T, D].
    score_split_dims: of `score_kernel`.
  """

  num_labels: int = 1
  score_split_dims: SplitDims = ('embed', None)

  def setup(self):
    super().setup()
    if self.num_labels:
      self.score_kernel = declare_weight(
        self,
        'score_kernel',
        shape=(self.embed_dim, self.num_labels),
        init=FanInNormal(),
        split_dims=self.score_split_dims,
        num_input_dims=0,
      )

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns scores, float32 [B, T, N], for x [B, T, D]."""
    if not self.num_labels:
      return x.astype(jnp.float32)
    kernel = self.score_kernel.astype(self.dtype)
    return jnp.einsum('BTD,DN->BTN', x.astype(self.dtype), kernel, preferred_element_type=jnp.float32)
